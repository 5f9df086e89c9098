"""The class that vLLM loads: `kv_connector="KvflowConnector"`, `kv_connector_module_path="kvflow.connector.connector"`.

vLLM's pull connector with another scheduler half. Transfers, handshakes, and the engine's `vllm:nixl_*` metrics are
vLLM's own.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from kvflow.connector import versions
from kvflow.connector.scheduler import KvflowScheduler
from kvflow.errors import ConfigError


class KvflowConnector(NixlPullConnector):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises `VersionError`, and `ConfigError` for what vLLM supports only under its own connectors' names."""
        versions.check()
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise ConfigError("kvflow's connector takes no decode_context_parallel_size above 1.")
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = KvflowScheduler(vllm_config, self.engine_id, kv_cache_config)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.connector_scheduler.bind_block_pool(gpu_block_pool)
