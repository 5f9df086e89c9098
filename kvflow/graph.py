"""From a configuration to what it makes: two pools of nodes, tenants, policies. Building starts and fetches nothing."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from kvflow import embedded
from kvflow.config import EMBEDDED, Config, Kind, RouterConfig, TenantConfig, keys, policy_options
from kvflow.config.addresses import addresses, pool_of
from kvflow.errors import ConfigError
from kvflow.launchers.machine import Machine, this_machine
from kvflow.nodes import simulated
from kvflow.nodes.base import NodeSpec
from kvflow.nodes.command import command, environment
from kvflow.placement import engines
from kvflow.policies import Policy
from kvflow.router import Settings
from kvflow.router.admin import AdminKey, Control
from kvflow.router.changes import Fresh
from kvflow.tenants import Identity, Keys, Limits, Tenant, Tenants
from kvflow.tenants.catalogue import Catalogue
from kvflow.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """What runs, before it does. Nobody changes `config` any more."""

    config: Config
    prefill: tuple[NodeSpec, ...]
    decode: tuple[NodeSpec, ...]
    policy: Policy
    """Of everybody, and of tenants that have none of their own."""
    tenants: tuple[Tenant, ...] = ()
    """As they begin. None: everybody is one tenant."""
    dirs: tuple[Path, ...] = ()
    """Where options come from besides the shipped ones and those of `$KVFLOW_CONFIG_PATH`."""

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

    def open(self) -> tuple[Tenants, Control]:
        """Who is served, and who may change that: keys are read, and all policies composed. Raises `ConfigError`."""
        line, source = keys.admin_line(self.config), keys.admin_source(self.config)
        key = AdminKey.parse(line, source) if line else None
        fresh = self.read(key)
        control = Control(
            catalogue=fresh.catalogue,
            read=partial(self.read, key),
            key=key,
            apart=self.config.admin.port is not None,
        )
        if fresh.identity is None:
            return Tenants.single(self.policy, fresh.catalogue.policies), control
        return Tenants(self.tenants, fresh.catalogue.policies, fresh.identity), control

    def read(self, admin: AdminKey | None = None) -> Fresh:
        """Keys and policies as files and the environment have them now; `admin` may be nobody's key among them.

        Raises `ConfigError`.
        """
        catalogue = _catalogue(self.config, self.dirs)
        if not self.tenants:
            return Fresh(catalogue=catalogue)
        auth, text = self.config.auth, keys.tenants_text(self.config)
        source = keys.tenants_source(self.config)
        known = Keys.parse(text, self.config.tenants, source)
        if not known and not auth.trusted_proxies:
            # A file that is being written is empty for a moment, and would shut everybody out.
            raise ConfigError(f"{source}: holds no key, so that nobody could be served.")
        if admin is not None and (tenant := known.tenant_of_hash(admin.hashed)):
            raise ConfigError(f"{source}: tenant {tenant} has the admin key; give it one of its own.")
        return Fresh(catalogue=catalogue, identity=Identity(known, auth.trusted_proxies, auth.tenant_header))

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


def build(config: Config, machine: Machine | None = None, dirs: tuple[Path, ...] = ()) -> Graph:
    """`machine` is where the nodes of a local cluster run: this one, unless told otherwise. Raises `ConfigError`."""
    specs = tuple(_specs(config, machine or this_machine()))
    policy = _policy(config.policy)
    return Graph(
        config=config,
        prefill=tuple(s for s in specs if s.role is Role.PREFILL),
        decode=tuple(s for s in specs if s.role is Role.DECODE),
        policy=policy,
        tenants=tuple(_tenant(name, tenant, policy) for name, tenant in config.tenants.items()),
        dirs=dirs,
    )


def _tenant(name: str, config: TenantConfig, policy: Policy) -> Tenant:
    limits = Limits(
        max_turns=config.max_turns,
        max_waiting=config.max_waiting,
        max_wait_s=config.max_wait_s,
        max_pinned_share=config.max_pinned_share,
    )
    own = _policy(config.policy, f"tenants.{name}.policy") if config.policy else policy
    return Tenant(name=name, policy=own, limits=limits)


def _catalogue(config: Config, dirs: tuple[Path, ...]) -> Catalogue:
    policies, broken = dict[str, Policy](), dict[str, str]()
    for option in policy_options(config, dirs):
        try:
            if option.node is None:
                raise ConfigError(option.problem or "it does not compose.")
            policies[option.name] = _policy(option.node)
        except ConfigError as e:
            broken[option.name] = str(e)
    return Catalogue(policies=policies, broken=broken)


def _policy(node: Mapping[str, Any], key: str = "policy") -> Policy:
    """Hydra wraps what a constructor raises; the constructors' own sentences are better, and begin with `policy`."""
    try:
        policy = instantiate(node, _convert_="all")
    except InstantiationException as e:
        if isinstance(e.__cause__, ConfigError):
            raise ConfigError(re.sub(r"^policy\b", key, str(e.__cause__))) from None
        raise ConfigError(f"{key}: {' '.join(str(e).split())}") from None
    if not isinstance(policy, Policy):
        raise ConfigError(f"{key}._target_ must make a kvflow Policy, got {type(policy).__name__}")
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
