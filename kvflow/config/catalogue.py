"""All options of the group `policy`, shipped and the user's own, each as it would be with `policy=<name>`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from kvflow.config.compose import compose, conf_dir, user_dirs
from kvflow.config.load import check_targets
from kvflow.config.refusal import refusing
from kvflow.config.schema import Config
from kvflow.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOption:
    name: str
    node: dict[str, Any] | None = None
    """As `Config.policy`; None where it does not compose."""
    problem: str | None = None
    """Why not, in one sentence."""


def policy_options(config: Config, dirs: Sequence[Path] = ()) -> tuple[PolicyOption, ...]:
    """By name. `dirs` are looked at after the shipped directory and the user's. References lead into `config`.

    Raises `ConfigError` where there is something wrong that is none of one option's.
    """
    everywhere = (conf_dir(), *user_dirs(), *dirs)
    names = sorted({file.stem for d in everywhere for file in (d / "policy").glob("*.yaml")})
    root = OmegaConf.structured(config)
    return tuple(_option(name, part, root) for name, part in _composed(names, dirs).items())


def _composed(names: Sequence[str], dirs: Sequence[Path]) -> dict[str, DictConfig | ConfigError]:
    """Composing all at once takes hardly longer than composing one, and fails where one does."""
    try:
        together = compose("catalogue", [f"+policy@p{i}={name}" for i, name in enumerate(names)], dirs)
        return {name: together[f"p{i}"] for i, name in enumerate(names)}
    except ConfigError as e:
        if len(names) == 1:
            return {names[0]: e}
    return {n: part for name in names for n, part in _composed([name], dirs).items()}


def _option(name: str, composed: DictConfig | ConfigError, root: DictConfig) -> PolicyOption:
    try:
        if isinstance(composed, ConfigError):
            raise composed
        with refusing():
            # In the place of the server's own, where its references are at home.
            root.policy = OmegaConf.to_container(composed, resolve=False)
            node: Any = OmegaConf.to_container(root.policy, resolve=True)
        check_targets(node, "policy")
        if not isinstance(node, dict) or "_target_" not in node:
            raise ConfigError("policy._target_ is missing; extend an option that has it, as in defaults: [balanced].")
    except ConfigError as e:
        return PolicyOption(name=name, problem=str(e))
    # It is known by the name under which it can be chosen.
    return PolicyOption(name=name, node={**node, "name": name})
