"""The command line and environment of an engine. Pure: values in, text out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvflow.launchers.machine import Cores
from kvflow.types import Role

KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
SILENT_ENDPOINTS = "/health,/metrics,/kvflow/node"
"""What the router asks all the time, and nobody wants in an engine's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """How KV moves. The fields of vLLM's `KVTransferConfig` that do not depend on the node."""

    name: str
    module_path: str
    middleware: str
    backends: tuple[str, ...]
    buffer_device: str
    lease_s: int
    load_failure_policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine, completely decided."""

    role: Role
    python: str
    """The interpreter that runs it."""
    model: str
    """A directory or a Hugging Face id."""
    served_name: str
    max_model_len: int
    dtype: str
    listen: str
    port: int
    side_channel_host: str
    side_channel_port: int
    connector: Connector
    offline: bool = False
    """Everything is on the disk: do not ask Hugging Face."""
    prefix_caching: bool = True
    tensor_parallel_size: int = 1
    max_num_seqs: int | None = None
    kv_cache_bytes: int | None = None
    kv_blocks: int | None = None
    gpu_memory_share: float | None = None
    """Of each GPU; None where the engine has its GPUs for itself."""
    gpus: tuple[str, ...] = ()
    """Empty: all that it finds."""
    cpus: tuple[Cores, ...] = ()
    """On CPUs: those of each tensor-parallel rank."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM, in snake_case."""
    env: Mapping[str, str] = field(default_factory=dict)


def command(engine: Engine) -> tuple[str, ...]:
    """The arguments are those of vLLM's API server."""
    return (
        engine.python,
        "-m",
        "kvflow.nodes.engine_entry",
        *flag("model", engine.model),
        *flag("served_model_name", engine.served_name),
        *flag("host", engine.listen),
        *flag("port", engine.port),
        *flag("max_model_len", engine.max_model_len),
        *flag("dtype", engine.dtype),
        *flag("tensor_parallel_size", engine.tensor_parallel_size if engine.tensor_parallel_size > 1 else None),
        *flag("enable_prefix_caching", engine.prefix_caching),
        *flag("max_num_seqs", engine.max_num_seqs),
        *flag("kv_cache_memory_bytes", engine.kv_cache_bytes),
        *flag("num_gpu_blocks_override", engine.kv_blocks),
        *flag("gpu_memory_utilization", engine.gpu_memory_share),
        *flag("enable_prompt_tokens_details", True),
        *flag("disable_access_log_for_endpoints", SILENT_ENDPOINTS),
        *flag("middleware", engine.connector.middleware),
        *flag("kv_transfer_config", kv_transfer_config(engine.role, engine.connector)),
        *(word for name, value in engine.args.items() for word in flag(name, value)),
    )


def environment(engine: Engine) -> tuple[tuple[str, str], ...]:
    """Variables on top of those that kvflow runs with, sorted by name; `engine.env` wins."""
    variables = {
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": engine.side_channel_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(engine.side_channel_port),
        # Hashes that engines exchange or derive from equal input are then equal in all of them.
        "PYTHONHASHSEED": "0",
    }
    if engine.offline:
        variables["HF_HUB_OFFLINE"] = "1"
    if engine.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(engine.gpus)
    if engine.cpus:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(_ranges, engine.cpus))
        # Loopback and shared memory: what UCX would try else only costs time, or fails.
        variables["UCX_TLS"] = "tcp,self,sm"
    return tuple(sorted({**variables, **engine.env}.items()))


def kv_transfer_config(role: Role, connector: Connector) -> dict[str, Any]:
    """vLLM's `KVTransferConfig`. No engine id: each life of an engine gets a new one, which tells its handles apart.

    Threshold and TTL are per engine there; kvflow decides both for each request, so the threshold is out of the way and
    the TTL, left at its default, counts for nothing that a request of ours says otherwise about.
    """
    return {
        "kv_connector": connector.name,
        "kv_connector_module_path": connector.module_path,
        "kv_role": KV_ROLES[role],
        "kv_buffer_device": connector.buffer_device,
        "kv_load_failure_policy": connector.load_failure_policy,
        "kv_connector_extra_config": {
            "backends": list(connector.backends),
            "bidirectional_kv_xfer": True,
            "kv_lease_duration": connector.lease_s,
            "kv_recompute_threshold": 0,
        },
    }


def flag(name: str, value: Any) -> tuple[str, ...]:
    """One argument of vLLM, as its parser wants it; None leaves it out."""
    option = name.replace("_", "-")
    match value:
        case None:
            return ()
        case True:
            return (f"--{option}",)
        case False:
            return (f"--no-{option}",)
        case str() | int() | float():
            return (f"--{option}", str(value))
        case Mapping():
            return (f"--{option}", json.dumps(value, separators=(",", ":")))
        case Sequence():
            return (f"--{option}", *map(str, value))
    raise TypeError(f"{name}: {type(value).__name__} is not an argument")


def argument(words: Sequence[str], name: str) -> str | None:
    """The first value of an argument in a command line that `command` made."""
    option = f"--{name.replace('_', '-')}"
    return words[words.index(option) + 1] if option in words else None


def _ranges(cpus: Cores) -> str:
    """As the kernel writes lists of CPUs: `0-3,8`."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
