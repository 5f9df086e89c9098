"""What is refused although every value has the right type: bounds, and rules between keys. One sentence each."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from kvflow.config import engine_args, tenancy
from kvflow.config.addresses import addresses, pool_of
from kvflow.config.schema import EMBEDDED, ClusterConfig, Config, Kind, Pool
from kvflow.errors import ConfigError
from kvflow.types import Role

PLACEHOLDER = ".invalid"
"""The top-level domain that never exists (RFC 6761)."""

_EXAMPLES = {"hosts": "10.0.0.1", "urls": "http://10.0.0.1:8000"}


def check(config: Config) -> None:
    """Raise `ConfigError` for the first broken rule."""
    problems = chain(
        _bounds(config, ""),
        _model(config),
        *(_pool(config.cluster, role) for role in Role),
        _ports(config),
        _engine_args(config),
        _connector(config),
        _simulated(config),
        tenancy.check(config),
    )
    for problem in problems:
        raise ConfigError(problem)


def check_servable(config: Config) -> None:
    """Raise `ConfigError` for what may be planned but not served: hosts that nobody has named yet, keys not there."""
    for role in Role:
        unnamed = [h for h in pool_of(config.cluster, role).hosts if h.endswith(PLACEHOLDER)]
        if unnamed:
            key = f"cluster.{role}.hosts"
            raise ConfigError(f"{key}: {unnamed[0]} stands for a host of yours; name it, as in {key}=[10.0.0.1].")
    for problem in tenancy.check_secrets(config):
        raise ConfigError(problem)


def _bounds(node: Any, prefix: str) -> Iterator[str]:
    for f in fields(node):
        key, value = f"{prefix}{f.name}", getattr(node, f.name)
        if is_dataclass(value):
            yield from _bounds(value, f"{key}.")
        elif isinstance(value, dict):
            for name, entry in value.items():
                if is_dataclass(entry):
                    yield from _bounds(entry, f"{key}.{name}.")
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
    """Only where engines start on this machine is the path one of this machine."""
    path = config.model.path
    if path == EMBEDDED or config.cluster.kind is not Kind.local:
        return
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            yield f"model.path: {path} holds no model (there is no config.json in it)."
    elif directory.exists():
        yield f"model.path: {path} is a file; give the directory that holds the model."
    elif not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path):
        yield f"model.path: {path} is neither an existing directory, nor a Hugging Face id, nor '{EMBEDDED}'."


def _pool(cluster: ClusterConfig, role: Role) -> Iterator[str]:
    pool, key = pool_of(cluster, role), f"cluster.{role}"
    wanted = {Kind.remote: "hosts", Kind.external: "urls"}.get(cluster.kind)
    for name, kind in (("hosts", Kind.remote), ("urls", Kind.external)):
        if getattr(pool, name) and name != wanted:
            yield f"{key}.{name}: only clusters of kind {kind} take any; this one is {cluster.kind}."
    if wanted:
        yield from _named(pool, wanted, key)
    elif pool.replicas is None:
        yield f"{key}.replicas: a cluster of kind {cluster.kind} needs a number."
    if cluster.kind is not Kind.external:
        for name in ("port", "side_channel_port"):
            if getattr(pool, name) is None:
                yield f"{key}.{name}: a cluster of kind {cluster.kind} needs one."


def _named(pool: Pool, name: str, key: str) -> Iterator[str]:
    """Rules of pools whose nodes are listed one by one."""
    given: list[str] = getattr(pool, name)
    if not given:
        yield f"{key}.{name}: give at least one, as in {key}.{name}=[{_EXAMPLES[name]}]."
    if pool.replicas is not None and pool.replicas != len(given):
        yield f"{key}.replicas is {pool.replicas}, but {key}.{name} names {len(given)}; leave replicas out."
    form = {"hosts": r"[\w.:-]+", "urls": r"https?://[^/\s]+/?"}[name]
    for item in given:
        if not re.fullmatch(form, item):
            yield f"{key}.{name}: {item} is not of the form {_EXAMPLES[name]}."
    if name == "urls" and len({u.rstrip("/") for u in given}) != len(given):
        yield f"{key}.urls: names an engine twice."


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
    if config.router.port:
        yield "router.port", "", config.router.port
    if config.admin.port:
        yield "admin.port", "", config.admin.port
    remote = config.cluster.kind is Kind.remote
    for a in addresses(config.cluster):
        host = a.host if remote else ""
        yield f"cluster.{a.role}.port", host, a.port
        if config.cluster.kind is not Kind.simulated:
            yield f"cluster.{a.role}.side_channel_port", host, a.side_channel_port


def _engine_args(config: Config) -> Iterator[str]:
    cluster = config.cluster
    places = {
        "model": config.model.engine_args,
        "cluster": cluster.engine_args,
        "cluster.prefill": cluster.prefill.engine_args,
        "cluster.decode": cluster.decode.engine_args,
    }
    for place, args in places.items():
        for name in args:
            if found := engine_args.problem(f"{place}.engine_args", name):
                yield found


def _connector(config: Config) -> Iterator[str]:
    if not config.connector.backends:
        yield "connector.backends: give at least one, as in connector.backends=[UCX]."


def _simulated(config: Config) -> Iterator[str]:
    if config.cluster.kind is not Kind.simulated:
        return
    for role in Role:
        blocks, size = pool_of(config.cluster, role).kv_blocks, config.cluster.simulated.block_size
        if blocks is None:
            yield f"cluster.{role}.kv_blocks: a cluster of kind simulated needs a number."
        elif blocks * size < config.model.max_model_len:
            yield (
                f"cluster.{role}.kv_blocks: {blocks} blocks of {size} tokens hold no request "
                f"of model.max_model_len={config.model.max_model_len}."
            )
