import importlib
import warnings
from typing import Any

import pytest

from kvflow.connector.versions import HOOKS


@pytest.fixture(scope="session")
def vllm() -> Any:
    """All of vLLM that the connector touches, imported once; its import warns, and warnings are errors here."""
    pytest.importorskip("vllm.version")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for hook in HOOKS:
            importlib.import_module(hook.path.partition(":")[0])
        importlib.import_module("kvflow.connector.connector")
        return importlib.import_module("vllm")


@pytest.fixture(scope="session")
def scheduling(vllm: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ARG001
    """`tests.connector.scheduling`, whose imports are vLLM's, with a model for it."""
    module: Any = importlib.import_module("tests.connector.scheduling")
    return module.Engines(tmp_path_factory.mktemp("model"))
