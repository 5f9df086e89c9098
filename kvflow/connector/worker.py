"""The connector's half inside an engine's worker: vLLM's own, but for how it waits, for events and for the dead."""

import importlib
import socket
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.platforms import current_platform

from kvflow.connector.patience import patient_progress

CONNECT_S = 2.0
"""Seconds that the host of another engine may take to accept a connection."""


class KvflowWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        if current_platform.is_cpu():
            with patient_progress(importlib.import_module("nixl._api").nixlBind):
                super().__init__(vllm_config, engine_id, kv_cache_config)
        else:
            super().__init__(vllm_config, engine_id, kv_cache_config)

    def _nixl_handshake(self, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        """Raises `OSError` at once for an engine that is gone, where vLLM waits 5 s for its answer.

        Runs in a thread of its own; whatever it raises, the request computes its tokens instead.
        """
        socket.create_connection((host, port), timeout=CONNECT_S).close()
        return super()._nixl_handshake(host, port, *args, **kwargs)
