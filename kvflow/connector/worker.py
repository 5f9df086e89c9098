"""The connector's half inside an engine's worker: vLLM's own, but for how NIXL waits on machines without a GPU."""

import importlib
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.platforms import current_platform

from kvflow.connector.patience import patient_progress


class KvflowWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        if current_platform.is_cpu():
            with patient_progress(importlib.import_module("nixl._api").nixlBind):
                super().__init__(vllm_config, engine_id, kv_cache_config)
        else:
            super().__init__(vllm_config, engine_id, kv_cache_config)
