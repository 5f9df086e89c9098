"""The class that vLLM loads: `kv_connector="KvflowConnector"`, `kv_connector_module_path="kvflow.connector.connector"`.

vLLM's pull connector with two other halves. Transfers, handshakes, and the engine's `vllm:nixl_*` metrics are vLLM's.
"""

from typing import Any

from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.platforms import current_platform

from kvflow.connector import versions
from kvflow.connector.patience import patient_queues
from kvflow.connector.scheduler import KvflowScheduler
from kvflow.connector.worker import KvflowWorker
from kvflow.errors import ConfigError


class KvflowConnector(NixlPullConnector):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises `VersionError`, and `ConfigError` for what vLLM supports only under its own connectors' names."""
        versions.check()
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise ConfigError("kvflow's connector takes no decode_context_parallel_size above 1.")
        if any(group.host_resident for group in kv_cache_config.kv_cache_groups):
            raise ConfigError("kvflow's connector takes no KV cache that lives in host memory (HiSparse).")
        if current_platform.is_cpu() and _computes_without_context(vllm_config):
            raise ConfigError(
                "kvflow's connector takes no model with latent attention on CPUs: vLLM gives wrong tokens there where "
                "a request did not compute all of its own KV."
            )
        if current_platform.is_cpu():
            patient_queues(shm_broadcast)
        # Not vLLM's class between: it would make a worker of its own first, with threads and a network endpoint.
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = KvflowScheduler(vllm_config, self.engine_id, kv_cache_config)
            if self.connector_scheduler.is_bidirectional_kv_xfer_enabled:
                _load_safely(vllm_config.kv_transfer_config)
        else:
            self.connector_worker = KvflowWorker(vllm_config, self.engine_id, kv_cache_config)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.connector_scheduler.bind_block_pool(gpu_block_pool)


def _computes_without_context(vllm_config: Any) -> bool:
    """vLLM rules out chunks and its prefix cache for such models there. KV from elsewhere it takes, and the answer is
    another one than without: measured, for prompts of 20 tokens too.
    """
    return bool(vllm_config.model_config.use_mla and not vllm_config.scheduler_config.enable_chunked_prefill)


def _load_safely(transfer: Any) -> None:
    """Make vLLM's scheduler, which asks for the role next, wait with blocks that a step still writes.

    It does so for consumers only: their transfers would write into such a block before the step has. In a prefill
    engine that pulls, whose client leaves in the middle of a long prompt, that is as wrong.
    """
    if transfer.kv_role == "kv_producer":
        transfer.kv_role = "kv_both"
