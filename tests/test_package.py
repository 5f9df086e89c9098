"""What `import kvflow` gives, and what it costs."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import kvflow
from kvflow.errors import ConfigError
from tests.cluster import cluster

CHECKOUT = Path(__file__).parent.parent


def run(code: str, *flags: str) -> str:
    return subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_version_is_that_of_the_distribution() -> None:
    assert kvflow.__version__ == importlib.metadata.version("kvflow")


def test_a_plain_checkout_has_a_version_too() -> None:
    assert run("import sys; sys.path.insert(0, '.'); import kvflow; print(kvflow.__version__)", "-S") == "0+unknown"


async def test_the_router_of_a_plain_checkout_says_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    async with cluster() as c:
        assert (await c.get("/version")).json == {"version": "0+unknown"}


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(hasattr(kvflow, name) for name in kvflow.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(kvflow, "nothing")  # noqa: B009
    assert issubclass(ConfigError, kvflow.KvflowError)


def test_importing_it_imports_next_to_nothing() -> None:
    loaded = set(run("import sys; import kvflow; print(*sys.modules)").split())
    assert {name for name in loaded if name.startswith("kvflow")} == {"kvflow", "kvflow.errors"}
    assert not {"vllm", "torch", "hydra", "omegaconf", "starlette", "importlib.metadata"} & loaded


def test_the_graph_of_an_embedding_program() -> None:
    from kvflow import config, graph

    loaded = config.load(config.compose("serve", ["cluster=simulated", "router.port=0"]))
    assert [spec.name for spec in graph.build(loaded).specs] == ["prefill-0", "decode-0"]
