"""One stock engine and one kvflow, started once for all tests in this folder."""

from collections.abc import Iterator

import pytest

from tests.engines.differential.servers import Pair, pair
from tests.engines.tiny import Kind


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("differential"), Kind.QWEN3) as started:
        yield started
