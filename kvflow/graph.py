"""From a configuration to what it makes: nodes of two pools, and a policy. Building starts and fetches nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from kvflow import embedded
from kvflow.config import EMBEDDED, Config, Kind, RouterConfig
from kvflow.config.addresses import addresses, pool_of
from kvflow.errors import ConfigError
from kvflow.launchers.machine import Machine, this_machine
from kvflow.nodes import simulated
from kvflow.nodes.base import NodeSpec
from kvflow.nodes.command import command, environment
from kvflow.placement import engines
from kvflow.policies import Policy
from kvflow.router import Settings
from kvflow.tenants import Tenants
from kvflow.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """What runs, before it does. Nobody changes `config` any more."""

    config: Config
    prefill: tuple[NodeSpec, ...]
    decode: tuple[NodeSpec, ...]
    policy: Policy

    @property
    def specs(self) -> tuple[NodeSpec, ...]:
        return (*self.prefill, *self.decode)

    @property
    def model(self) -> str:
        """What clients send as `model`."""
        return self.config.model.name

    @property
    def router(self) -> RouterConfig:
        return self.config.router

    @property
    def settings(self) -> Settings:
        router, conversations = self.config.router, self.config.conversations
        return Settings(
            max_body_bytes=int(router.max_body_mb * 1e6),
            connect_timeout_s=router.connect_timeout_s,
            silence_timeout_s=router.silence_timeout_s,
            probe_interval_s=router.probe_interval_s,
            max_conversations=conversations.max_count,
            max_conversation_bytes=int(conversations.max_mb * 1e6),
        )

    @property
    def tenants(self) -> Tenants:
        return Tenants.single(self.policy)

    @property
    def start_timeout_s(self) -> float:
        return self.config.cluster.start_timeout_s

    @property
    def log_dir(self) -> Path:
        own = self.config.cluster.log_dir
        return Path(own).expanduser() if own else embedded.cache_dir() / "logs"

    @property
    def starts_nodes(self) -> bool:
        """Whether the nodes are kvflow's own to start and stop; it waits for the others."""
        return self.config.cluster.kind in (Kind.local, Kind.simulated)

    @property
    def simulates_nodes(self) -> bool:
        return self.config.cluster.kind is Kind.simulated

    def simulated(self, role: Role) -> simulated.Settings:
        """What the nodes of a role are like, where they are simulated."""
        config, pool = self.config, pool_of(self.config.cluster, role)
        rates = config.cluster.simulated
        default = simulated.Settings()
        return simulated.Settings(
            model=config.model.name,
            block_size=rates.block_size,
            max_model_len=config.model.max_model_len,
            prefix_caching=pool.prefix_caching,
            lease_s=config.connector.lease_s,
            speed=simulated.Speed(
                prefill=rates.prefill_tokens_per_s,
                decode=rates.decode_tokens_per_s,
                transfer=rates.transfer_tokens_per_s,
            ),
            blocks=pool.kv_blocks or default.blocks,
            max_running=pool.max_num_seqs or default.max_running,
        )

    @property
    def needs_embedded_model(self) -> bool:
        """Whether the model that `kvflow.embedded` prepares must be there before the nodes start."""
        return self.config.cluster.kind is Kind.local and self.config.model.path == EMBEDDED


def build(config: Config, machine: Machine | None = None) -> Graph:
    """`machine` is where the nodes of a local cluster run: this one, unless told otherwise. Raises `ConfigError`."""
    specs = tuple(_specs(config, machine or this_machine()))
    return Graph(
        config=config,
        prefill=tuple(s for s in specs if s.role is Role.PREFILL),
        decode=tuple(s for s in specs if s.role is Role.DECODE),
        policy=_policy(config.policy),
    )


def _policy(node: dict[str, Any]) -> Policy:
    """Hydra wraps what a constructor raises; the constructors' own sentences are better."""
    try:
        policy = instantiate(node, _convert_="all")
    except InstantiationException as e:
        if isinstance(e.__cause__, ConfigError):
            raise e.__cause__ from None
        raise ConfigError(f"policy: {' '.join(str(e).split())}") from None
    if not isinstance(policy, Policy):
        raise ConfigError(f"policy._target_ must make a kvflow Policy, got {type(policy).__name__}")
    return policy


def _specs(config: Config, machine: Machine) -> Iterator[NodeSpec]:
    match config.cluster.kind:
        case Kind.external:
            for role in Role:
                for i, url in enumerate(pool_of(config.cluster, role).urls):
                    yield NodeSpec(name=f"{role}-{i}", role=role, url=url.rstrip("/"))
        case Kind.simulated:
            for a in addresses(config.cluster):
                yield NodeSpec(name=a.name, role=a.role, url=a.url)
        case Kind.local | Kind.remote:
            for a, engine in engines(config, machine):
                yield NodeSpec(name=a.name, role=a.role, url=a.url, command=command(engine), env=environment(engine))
