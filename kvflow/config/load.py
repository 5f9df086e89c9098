"""From what Hydra composed to typed values: the first thing in each verb."""

import os
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvflow.config import rules
from kvflow.config.refusal import refusing
from kvflow.config.schema import Config
from kvflow.errors import ConfigError

TARGETS = "kvflow.policies."
"""Where classes named in configuration may come from; `$KVFLOW_POLICY_MODULES` adds modules of the user's own."""


def load(cfg: DictConfig) -> Config:
    """A `Config`, or the subclass that `cfg` was composed with. Raises `ConfigError`."""
    schema = OmegaConf.get_type(cfg)
    if not (isinstance(schema, type) and issubclass(schema, Config)):
        schema = Config
    with refusing():
        # Typed anew: keys that were added with + come past the types of a composed configuration.
        plain = OmegaConf.to_container(cfg, resolve=False)
        typed = OmegaConf.merge(OmegaConf.structured(schema), plain)
        check_targets(OmegaConf.to_container(typed, resolve=True))
        config = OmegaConf.to_object(typed)
    assert isinstance(config, Config)
    rules.check(config)
    return config


def check_targets(node: Any, key: str = "") -> None:
    """Raise `ConfigError` for the first class within `node`, which stands under `key`, that is not allowed."""
    allowed = (TARGETS, *(f"{m.strip()}." for m in os.environ.get("KVFLOW_POLICY_MODULES", "").split(",") if m.strip()))
    for place, target in _targets(node, key):
        if not (isinstance(target, str) and target.startswith(allowed)):
            raise ConfigError(
                f"{place}: {target!r} is not allowed; classes come from {', '.join(a.rstrip('.') for a in allowed)}, "
                "and from the modules named in KVFLOW_POLICY_MODULES."
            )


def _targets(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for k, v in node.items():
            path = f"{key}.{k}" if key else str(k)
            if k == "_target_":
                yield path, v
            yield from _targets(v, path)
    elif isinstance(node, list):
        for i, v in enumerate(node):
            yield from _targets(v, f"{key}.{i}")
