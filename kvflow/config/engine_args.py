"""Which of vLLM's arguments may stand under a key that is called `engine_args`."""

import re

_RESERVED = {
    "model": "model.path",
    "served_model_name": "model.name",
    "max_model_len": "model.max_model_len",
    "dtype": "model.dtype",
    "host": "cluster.listen",
    "port": "cluster.<role>.port",
    "enable_prefix_caching": "cluster.<role>.prefix_caching",
    "max_num_seqs": "cluster.<role>.max_num_seqs",
    "num_gpu_blocks_override": "cluster.<role>.kv_blocks",
    "kv_cache_memory_bytes": "cluster.<role>.kv_cache_gib",
    "tensor_parallel_size": "cluster.<role>.tensor_parallel_size",
    "kv_transfer_config": "connector",
    "middleware": "connector.middleware",
}
"""vLLM arguments that kvflow sets itself, and the key that decides them."""


def problem(parent: str, name: str) -> str | None:
    """Why `name` cannot stand under `parent`, such as `cluster.prefill.engine_args`; None if it can."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        return f"{parent}.{name}: write vLLM's arguments in snake_case."
    owner = _RESERVED.get(name)
    if owner is None:
        return None
    pool = re.match(r"cluster\.(prefill|decode)\.", parent)
    if pool:
        owner = owner.replace("<role>", pool[1])
    return f"{parent}.{name}: kvflow sets this itself, from {owner}."
