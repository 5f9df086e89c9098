"""Whether the installed vLLM is one whose internals the connector was written for.

The connector subclasses and overrides what vLLM does not promise to keep, and some changes there would not fail but
give wrong tokens. So everything it relies on is listed here, and compared before an engine starts.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvflow.errors import VersionError

SUPPORTED = ("0.32",)
"""Releases, without the patch number."""

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_PULL = f"{_V1}.nixl.pull_scheduler:NixlPullConnectorScheduler"
_CONNECTOR = f"{_V1}.nixl.connector:NixlPullConnector"


@dataclass(frozen=True, slots=True)
class Hook:
    """A callable, named `module:attribute.attribute`, its parameters, and the names that its body must use."""

    path: str
    parameters: tuple[str, ...]
    names: frozenset[str] = frozenset()


HOOKS = (
    Hook(
        f"{_PULL}.__init__",
        ("self", "vllm_config", "engine_id", "kv_cache_config"),
    ),
    Hook(
        f"{_V1}.nixl.base_scheduler:NixlBaseConnectorScheduler.__init__",
        ("self", "vllm_config", "engine_id", "kv_cache_config"),
        frozenset(
            {
                "_reqs_in_batch",
                "_reqs_need_send",
                "_reqs_not_processed",
                "block_size",
                "is_bidirectional_kv_xfer_enabled",
                "use_host_buffer",
            }
        ),
    ),
    Hook(f"{_PULL}.on_new_request", ("self", "request"), frozenset({"_truncate_request_for_prefill"})),
    Hook(f"{_PULL}.get_num_new_matched_tokens", ("self", "request", "num_computed_tokens")),
    Hook(
        f"{_PULL}.update_state_after_alloc",
        ("self", "request", "blocks", "num_external_tokens"),
        frozenset({"_reqs_need_recv", "_reqs_in_batch", "use_host_buffer", "is_bidirectional_kv_xfer_enabled"}),
    ),
    # When a request was given its blocks, and when again after its transfer or a preemption.
    Hook(
        "vllm.v1.core.sched.scheduler:Scheduler.schedule",
        ("self", "throttle_prefills"),
        frozenset({"get_num_new_matched_tokens", "update_state_after_alloc"}),
    ),
    Hook("vllm.v1.request:Request.num_output_tokens.fget", ("self",), frozenset({"_output_token_ids"})),
    Hook(
        "vllm.v1.metrics.stats:PrefillStats.finalize",
        ("self", "num_cached_tokens"),
        frozenset({"num_cached_tokens", "num_prompt_tokens"}),
    ),
    Hook(
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
        frozenset({"take_prefill_stats", "finalize"}),
    ),
    Hook(
        f"{_PULL}.request_finished",
        ("self", "request", "block_ids"),
        frozenset({"_reqs_need_send", "_reqs_not_processed", "_stop_heartbeat"}),
    ),
    Hook(f"{_PULL}.update_connector_output", ("self", "connector_output")),
    Hook(f"{_PULL}.build_connector_meta", ("self", "scheduler_output"), frozenset({"reqs_to_send", "reqs_in_batch"})),
    Hook(f"{_PULL}._stop_heartbeat", ("self", "req_id")),
    Hook(f"{_CONNECTOR}.__init__", ("self", "vllm_config", "role", "kv_cache_config")),
    Hook(f"{_CONNECTOR}.bind_gpu_block_pool", ("self", "gpu_block_pool")),
    Hook(f"{_CONNECTOR}.build_prom_metrics", ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues")),
    Hook(
        f"{_V1}.nixl.pull_worker:NixlPullConnectorWorker._nixl_handshake",
        (
            "self",
            "host",
            "port",
            "remote_tp_size",
            "expected_engine_id",
            "remote_dcp_size",
            "remote_pp_size",
            "notif_agents_only",
        ),
    ),
    Hook(
        f"{_V1}.nixl.pull_worker:NixlPullConnectorWorker.start_load_kv",
        ("self", "metadata"),
        frozenset({"_reqs_to_process", "_reqs_to_send", "reqs_not_processed", "reqs_in_batch", "scheduler_clock"}),
    ),
    Hook(
        f"{_V1}.nixl.pull_worker:NixlPullConnectorWorker._get_new_notifs",
        ("self",),
        frozenset(
            {
                "_reqs_to_process",
                "_reqs_to_send",
                "consumer_notification_counts_by_req",
                "expected_consumer_notifications_by_req",
            }
        ),
    ),
    Hook(
        f"{_V1}.nixl.base_worker:NixlBaseConnectorWorker.get_transfer_results",
        ("self",),
        frozenset({"_get_new_notifs", "KVConnectorTransferResults"}),
    ),
    Hook(
        "vllm.v1.request:Request.__init__",
        (
            "self",
            "request_id",
            "prompt_token_ids",
            "sampling_params",
            "pooling_params",
            "client_index",
            "arrival_time",
            "prompt_embeds",
            "prompt_is_token_ids",
            "mm_features",
            "lora_request",
            "cache_salt",
            "priority",
            "trace_headers",
            "block_hasher",
            "resumable",
            "session_id",
            "reasoning_ended",
            "reasoning_parser_kwargs",
            "abort_immediately",
            "kv_hints",
        ),
        frozenset(
            {
                "abort_immediately",
                "kv_transfer_params",
                "num_in_flight_tokens",
                "num_computed_tokens",
                "skip_reading_prefix_cache",
            }
        ),
    ),
    # What vLLM's own prefix cache tells apart is what a fingerprint must tell apart.
    Hook(
        "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
        ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
        frozenset(
            {
                "_gen_lora_extra_hash_keys",
                "_gen_mm_extra_hash_keys",
                "_gen_prompt_embeds_extra_hash_keys",
                "cache_salt",
            }
        ),
    ),
    Hook("vllm.v1.core.block_pool:BlockPool.get_num_free_blocks", ("self",)),
    Hook("vllm.entrypoints.launchers.launcher:create_server_socket", ("addr", "reuse_port")),
    Hook("vllm.v1.core.block_pool:BlockPool.touch", ("self", "blocks"), frozenset({"ref_cnt", "free_block_queue"})),
    Hook("vllm.v1.core.block_pool:BlockPool.free_blocks", ("self", "ordered_blocks"), frozenset({"ref_cnt"})),
    Hook(
        "vllm.config.parallel:ParallelConfig.local_engines_only.fget",
        ("self",),
        frozenset({"data_parallel_external_lb", "data_parallel_hybrid_lb"}),
    ),
    Hook(
        "vllm.v1.engine.async_llm:AsyncLLM.notify_kv_transfer_request_rejected",
        ("self", "request_id", "kv_transfer_params", "data_parallel_rank"),
        frozenset({"EngineCoreRequest", "add_request_async"}),
    ),
    Hook(
        "vllm.v1.core.sched.scheduler:Scheduler.__init__",
        (
            "self",
            "vllm_config",
            "kv_cache_config",
            "structured_output_manager",
            "block_size",
            "hash_block_size",
            "mm_registry",
            "include_finished_set",
            "log_stats",
        ),
        frozenset({"create_connector", "defer_block_free", "is_kv_consumer", "max_concurrent_batches"}),
    ),
    Hook(
        "vllm.v1.core.sched.scheduler:Scheduler._free_request_blocks",
        ("self", "request"),
        frozenset({"_request_blocks_can_be_freed", "deferred_frees", "pop_blocks_for_free"}),
    ),
    Hook(
        "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished",
        ("self", "kv_connector_output"),
        frozenset({"update_connector_output", "finished_sending"}),
    ),
)


def check(
    version: str | None = None, find: Callable[[str], Any] | None = None, hooks: tuple[Hook, ...] = HOOKS
) -> None:
    """Raises `VersionError`. `find` turns a hook's path into the object; the installed vLLM's where not given."""
    version = installed() if version is None else version
    if version not in SUPPORTED and not version.startswith(tuple(f"{s}." for s in SUPPORTED)):
        raise VersionError(f"kvflow's connector needs vLLM {_supported()}, and {version} is installed.")
    for hook in hooks:
        if fault := _fault(hook, find or find_installed):
            raise VersionError(
                f"kvflow's connector needs an unchanged vLLM {_supported()}, but in this {version} {hook.path} {fault}."
            )


def installed() -> str:
    """Raises `VersionError` where vLLM is missing. The package may come from a distribution of another name."""
    try:
        module = importlib.import_module("vllm.version")
    except ImportError:
        raise VersionError(
            f"vLLM is not installed; kvflow's connector needs version {_supported()} (kvflow[cpu] or kvflow[gpu])."
        ) from None
    return str(module.__version__)


def find_installed(path: str) -> Any:
    """Raises `ImportError` or `AttributeError`."""
    module, _, names = path.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def _fault(hook: Hook, find: Callable[[str], Any]) -> str | None:
    try:
        found = find(hook.path)
        parameters = tuple(inspect.signature(found).parameters)
    except (ImportError, AttributeError, TypeError, ValueError):
        return "is missing"
    if parameters != hook.parameters:
        return f"takes ({', '.join(parameters)}) instead of ({', '.join(hook.parameters)})"
    missing = hook.names - _names(found)
    return f"no longer uses {', '.join(sorted(missing))}" if missing else None


def _names(found: Any) -> set[str]:
    """Attributes, globals and nested functions' names that a function's code refers to."""
    code = inspect.unwrap(found).__code__
    constants = (c for c in code.co_consts if inspect.iscode(c))
    return {*code.co_names, *(n for c in constants for n in c.co_names)}


def _supported() -> str:
    return " or ".join(f"{s}.x" for s in SUPPORTED)
