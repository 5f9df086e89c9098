import importlib
from typing import Any

import pytest

from tests.net import free_ports


def test_an_engine_that_is_gone_is_found_out_at_once(vllm: Any) -> None:  # noqa: ARG001
    worker: Any = importlib.import_module("kvflow.connector.worker").KvflowWorker
    with pytest.raises(ConnectionRefusedError):
        worker._nixl_handshake(worker.__new__(worker), "127.0.0.1", free_ports(1)[0], 1, "engine")
