"""What is refused although every value has the right type: bounds, and rules between keys. One sentence each."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from kvflow.config.schema import EMBEDDED, ClusterConfig, Config, Kind, Pool
from kvflow.errors import ConfigError

ROLES = ("prefill", "decode")

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


def check(config: Config) -> None:
    """Raise `ConfigError` for the first broken rule."""
    problems = chain(
        _bounds(config, ""),
        _model(config),
        *(_pool(config.cluster, role) for role in ROLES),
        _ports(config),
        _arguments(config),
        _connector(config),
    )
    for problem in problems:
        raise ConfigError(problem)


def _bounds(node: Any, prefix: str) -> Iterator[str]:
    for f in fields(node):
        key, value = f"{prefix}{f.name}", getattr(node, f.name)
        if is_dataclass(value):
            yield from _bounds(value, f"{key}.")
        elif f.metadata and value is not None:
            yield from _bound(key, value, **f.metadata)


def _bound(
    key: str, value: float, low: float | None = None, high: float | None = None, above: float | None = None
) -> Iterator[str]:
    if above is not None and not value > above:
        yield f"{key} must be above {above:g}, got {value:g}."
    elif low is not None and high is not None and not low <= value <= high:
        yield f"{key} must be from {low:g} to {high:g}, got {value:g}."
    elif low is not None and not value >= low:
        yield f"{key} must be at least {low:g}, got {value:g}."


def _model(config: Config) -> Iterator[str]:
    path = config.model.path
    if path == EMBEDDED:
        return
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            yield f"model.path: {path} holds no model (there is no config.json in it)."
    elif directory.exists():
        yield f"model.path: {path} is a file; give the directory that holds the model."
    elif not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path):
        yield f"model.path: {path} is neither an existing directory, nor a Hugging Face id, nor '{EMBEDDED}'."


def _pool(cluster: ClusterConfig, role: str) -> Iterator[str]:
    pool: Pool = getattr(cluster, role)
    key = f"cluster.{role}"
    yield from _addresses(cluster, pool, key)
    if cluster.kind is not Kind.external:
        for name in ("port", "side_channel_port"):
            if getattr(pool, name) is None:
                yield f"{key}.{name}: a cluster of kind {cluster.kind} needs one."


def _addresses(cluster: ClusterConfig, pool: Pool, key: str) -> Iterator[str]:
    wanted = {Kind.remote: "hosts", Kind.external: "urls"}.get(cluster.kind)
    for name in ("hosts", "urls"):
        given = getattr(pool, name)
        if name != wanted:
            if given:
                yield f"{key}.{name}: only for clusters of kind {'remote' if name == 'hosts' else 'external'}."
            continue
        if not given:
            yield f"{key}.{name}: give at least one, as in {key}.{name}=[{_example(name)}]."
        if pool.replicas is not None and pool.replicas != len(given):
            yield f"{key}.replicas is {pool.replicas}, but {key}.{name} names {len(given)}; leave replicas out."
        if len(set(given)) != len(given) and name == "urls":
            yield f"{key}.urls: each engine once, please; got {', '.join(given)}."
    if wanted is None and pool.replicas is None:
        yield f"{key}.replicas: a cluster of kind {cluster.kind} needs a number."
    for url in pool.urls:
        if not re.fullmatch(r"https?://[^/\s]+/?", url):
            yield f"{key}.urls: {url} is not a base URL such as {_example('urls')}."


def _example(name: str) -> str:
    return {"hosts": "10.0.0.1", "urls": "http://10.0.0.1:8000"}[name]


def _ports(config: Config) -> Iterator[str]:
    """No two things may listen on the same port of the same host."""
    taken: dict[tuple[str, int], str] = {}
    for key, host, port in _listeners(config):
        if port > 65535:
            yield f"{key}: counts up to {port}, and ports end at 65535."
        elif other := taken.get((host, port)):
            yield f"{key}: port {port} is already taken by {other}."
        taken[host, port] = key


def _listeners(config: Config) -> Iterator[tuple[str, str, int]]:
    here = "this machine"
    if config.router.port:
        yield "router.port", here, config.router.port
    if config.cluster.kind is Kind.external:
        return
    count: defaultdict[tuple[str, str], int] = defaultdict(int)
    for role in ROLES:
        pool: Pool = getattr(config.cluster, role)
        for host in pool.hosts or [here] * (pool.replicas or 0):
            nth = count[role, host]
            count[role, host] += 1
            yield f"cluster.{role}.port", host, (pool.port or 0) + nth
            yield f"cluster.{role}.side_channel_port", host, (pool.side_channel_port or 0) + nth


def _arguments(config: Config) -> Iterator[str]:
    cluster = config.cluster
    places = {
        "model": config.model.engine_args,
        "cluster": cluster.engine_args,
        "cluster.prefill": cluster.prefill.engine_args,
        "cluster.decode": cluster.decode.engine_args,
    }
    for place, args in places.items():
        for name in args:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                yield f"{place}.engine_args.{name}: write vLLM's arguments in snake_case."
            elif owner := _RESERVED.get(name):
                yield f"{place}.engine_args.{name}: kvflow sets this itself, from {owner}."


def _connector(config: Config) -> Iterator[str]:
    if not config.connector.backends:
        yield "connector.backends: give at least one, as in connector.backends=[UCX]."
