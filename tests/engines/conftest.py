"""Two runs of `kvflow serve` with real engines, each started once and shared by all tests that need such a one.

They run one after the other, because together they would need the machine twice; tests are ordered accordingly by the
names of their files.
"""

import signal
from collections.abc import Iterator

import pytest

from tests.engines.serving import Serving, start


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Prefix caching off on the prefill node, as if it never had the conversation; ends by SIGTERM."""
    serving = start(tmp_path_factory.mktemp("plain") / "serve.log", "cluster.prefill.prefix_caching=false")
    yield from _until_signal(serving, signal.SIGTERM, 0)


@pytest.fixture(scope="module")
def caching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """As by default, but for a decode pool with room for about 20 conversations of 2,000 tokens; ends by SIGKILL."""
    serving = start(
        tmp_path_factory.mktemp("caching") / "serve.log",
        "cluster.decode.kv_blocks=340",
        "cluster.decode.prefix_caching=false",
        "model.max_model_len=4096",
    )
    yield from _until_signal(serving, signal.SIGKILL, -signal.SIGKILL)


def _until_signal(serving: Serving, number: signal.Signals, status: int) -> Iterator[Serving]:
    try:
        serving.wait_ready()
        yield serving
        assert serving.stop(number) == status
    finally:
        if serving.process.poll() is None:
            serving.process.kill()
            serving.process.wait()
