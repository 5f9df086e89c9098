"""The connector's half inside an engine's worker: vLLM's own, but for how NIXL waits on machines without a GPU."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.platforms import current_platform

POLL_US = 1000
"""Microseconds that NIXL's progress thread may wait for an event; events wake it up before."""


class KvflowWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        if current_platform.is_cpu():
            with patient_progress(importlib.import_module("nixl._api").nixlBind):
                super().__init__(vllm_config, engine_id, kv_cache_config)
        else:
            super().__init__(vllm_config, engine_id, kv_cache_config)


@contextmanager
def patient_progress(bindings: Any) -> Iterator[None]:
    """Let the NIXL agents that are created meanwhile sleep between events.

    NIXL's Python layer sets the thread's delay to 0 and offers no way to set another, which makes it a busy loop: right
    where another core does the computing, but on a CPU engine it runs on the core that computes. Measured on 2 cores:
    96 % of a core for an idle agent, 2 % with the delay.
    """
    original = bindings.nixlAgentConfig

    class Patient(original):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, max(value, POLL_US) if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Patient
    try:
        yield
    finally:
        bindings.nixlAgentConfig = original
