"""What can be configured, and what each key means. YAML under `conf/` holds only what differs from these defaults.

Not frozen, because OmegaConf cannot compose frozen nodes; nobody changes one after `load` has returned it. Enums have
lower-case members because Hydra takes an enum by its member's name. Bounds stand where the key is declared and are
enforced by `kvflow.config.rules`, together with every rule that involves more than one key.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

EMBEDDED = "embedded"
"""The value of `model.path` that stands for the model that kvflow itself fetches and converts."""


def bounded(default: Any, low: float, high: float | None = None) -> Any:
    """A number from `low` to `high`, both included; None, where the type allows it, is not checked."""
    return field(default=default, metadata={"low": low, "high": high})


def positive(default: Any) -> Any:
    """A number above 0."""
    return field(default=default, metadata={"above": 0})


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Kind(StrEnum):
    """Where the nodes of a cluster run, and who starts them."""

    local = "local"
    """vLLM engines on this machine, started and stopped by kvflow."""
    remote = "remote"
    """vLLM engines on other hosts, started there by you with the command lines that `kvflow plan` prints."""
    external = "external"
    """Engines that already run, known by their URLs; a stock vLLM is served one-way."""
    simulated = "simulated"
    """Processes that behave like engines and need no model, started and stopped by kvflow."""


class OnLoadFailure(StrEnum):
    recompute = "recompute"
    fail = "fail"


class Format(StrEnum):
    table = "table"
    json = "json"


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    name: str = MISSING
    """What clients send as `model`."""
    path: str = MISSING
    """A directory with a Hugging Face model, a Hugging Face id, or `embedded` for the model that comes with kvflow.

    On remote clusters a directory is one of those hosts, and what stands for `embedded` comes from Hugging Face.
    """
    max_model_len: int = bounded(MISSING, 1)
    """Longest prompt plus answer, in tokens."""
    dtype: Dtype = Dtype.auto
    """Of weights and KV. `auto`: float32 on CPUs, what the checkpoint says on GPUs."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """vLLM arguments that belong to the model, in snake_case, such as `reasoning_parser`. Null takes one out again."""


@dataclass(kw_only=True, slots=True)
class Pool:
    """The nodes of one role. None is "as the cluster decides": see each key."""

    replicas: int | None = bounded(None, 1)
    """Number of nodes. None: one for each of `hosts` or `urls`."""
    hosts: list[str] = field(default_factory=list)
    """Remote clusters: the host of each node, by a name or address that the other hosts and the router can reach."""
    urls: list[str] = field(default_factory=list)
    """External clusters: base URL of each engine's API server."""
    port: int | None = bounded(None, 1, 65535)
    """Of the API of the first node on a host; further nodes on that host count up. None only on external clusters."""
    side_channel_port: int | None = bounded(None, 1, 65535)
    """Of the connector's handshakes, likewise."""
    prefix_caching: bool = True
    """The engines' own prefix cache."""
    kv_cache_gib: float | None = positive(None)
    """Memory for KV of one engine. None: 2 GiB on CPUs, on GPUs what is left there."""
    kv_blocks: int | None = bounded(None, 1)
    """Size of the KV cache in blocks, whatever memory there is. None: as many as fit."""
    max_num_seqs: int | None = bounded(None, 1)
    """Requests that run at once in one engine. None: vLLM's default."""
    tensor_parallel_size: int = bounded(1, 1)
    """GPUs, or on CPUs sets of cores, that one engine is spread over."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further vLLM arguments of this pool; wins over those of the model and the cluster."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of this pool; wins over those of the cluster and over kvflow's own."""


@dataclass(kw_only=True, slots=True)
class SimulatedConfig:
    """How fast the simulated engines are, in tokens per second; 0 is instantly. Their pools' `kv_blocks` counts too."""

    prefill_tokens_per_s: float = bounded(10_000.0, 0)
    decode_tokens_per_s: float = bounded(50.0, 0)
    """Of one request, however many run at once."""
    transfer_tokens_per_s: float = bounded(200_000.0, 0)
    """KV moving between two nodes, in either direction."""
    block_size: int = bounded(16, 1)
    """Tokens in a block."""


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    name: str = MISSING
    kind: Kind = MISSING
    device: Device = Device.auto
    """`auto`: on other hosts GPUs; on this machine GPUs if it has some that the installed vLLM can use, else CPUs."""
    listen: str = "127.0.0.1"
    """Address on which the engines' APIs listen. They ask nobody for a key: never one that the internet can reach."""
    prefill: Pool = field(default_factory=Pool)
    decode: Pool = field(default_factory=Pool)
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further vLLM arguments of all engines."""
    env: dict[str, str] = field(default_factory=dict)
    """Further environment variables of all engines."""
    log_dir: str | None = None
    """Folder for one log file per node that kvflow starts. None: `logs` in kvflow's cache folder."""
    start_timeout_s: float = positive(600.0)
    """How long a node may take to become ready."""
    simulated: SimulatedConfig = field(default_factory=SimulatedConfig)


@dataclass(kw_only=True, slots=True)
class ConnectorConfig:
    """What carries KV between the engines: vLLM's `KVTransferConfig`, as far as it is not kvflow's own business."""

    name: str = MISSING
    kv_connector: str = MISSING
    """Class of the connector, in `module_path`."""
    module_path: str = MISSING
    middleware: str = MISSING
    """ASGI middleware of the engines' API servers that adds the handle to streamed answers."""
    backends: list[str] = MISSING
    """NIXL's transports, such as UCX or LIBFABRIC."""
    kv_buffer_device: Device = Device.auto
    """Where KV lies while it is transferred. `auto`: where the engines run."""
    lease_s: int = bounded(30, 6)
    """How long a prefill node keeps KV for a decode node that gives no sign of life; signs come every sixth of it."""
    load_failure_policy: OnLoadFailure = OnLoadFailure.recompute
    """What an engine does when KV does not arrive: compute it itself, or fail the request."""


@dataclass(kw_only=True, slots=True)
class RouterConfig:
    host: str = "127.0.0.1"
    port: int = bounded(8000, 0, 65535)
    """0: any free one."""
    max_body_mb: float = positive(32.0)
    """Largest request body, in MB; a larger one is answered with 413."""
    silence_timeout_s: float = positive(600.0)
    """How long an engine may send nothing within one request, which includes all of a long prefill."""
    connect_timeout_s: float = positive(5.0)
    """To an engine."""
    probe_interval_s: float = positive(1.0)
    """Between two looks at whether a node is ready."""


@dataclass(kw_only=True, slots=True)
class ConversationsConfig:
    """Bounds of the router's memory of conversations; beyond them the oldest are forgotten."""

    max_count: int = bounded(100_000, 1)
    max_mb: float = positive(256.0)


@dataclass(kw_only=True, slots=True)
class TenantConfig:
    """One tenant. Its keys are in no configuration: see `kvflow.config.keys`."""

    policy: dict[str, Any] = field(default_factory=dict)
    """As `Config.policy`. Empty: the server's own."""
    max_turns: int | None = bounded(None, 1)
    """Turns under way at a time. None: no limit."""
    max_waiting: int = bounded(16, 0)
    """Turns that may wait for one of those to end; one more is refused with 429."""
    max_wait_s: float = bounded(5.0, 0, 600)
    """How long each of them waits before it is refused."""
    max_pinned_share: float | None = bounded(None, 0, 1)
    """Share of each decode node's blocks that what is kept for the tenant may take. None: as its policy says."""


@dataclass(kw_only=True, slots=True)
class AuthConfig:
    """How it is found out whose a request is."""

    keys_file: str | None = None
    """File with the tenants' keys. None: `KVFLOW_KEYS_FILE` names it, or `KVFLOW_KEYS` holds what would be in it."""
    anonymous: bool = False
    """Without tenants: serve everybody on an address that other machines reach, too."""
    trusted_proxies: list[str] = field(default_factory=list)
    """Addresses, or networks such as 10.0.0.0/24, of proxies whose `tenant_header` is believed."""
    tenant_header: str = "x-kvflow-tenant"
    """In which such a proxy names the tenant."""


@dataclass(kw_only=True, slots=True)
class AdminConfig:
    """What changes tenants while they are served. Off unless it has a key."""

    key_file: str | None = None
    """File with the admin key, or its hash. None: `KVFLOW_ADMIN_KEY` holds it."""
    port: int | None = bounded(None, 1, 65535)
    """None: the router's own."""
    host: str = "127.0.0.1"
    """Where `port` listens."""
    public: bool = False
    """On an address that other machines reach, too."""


@dataclass(kw_only=True, slots=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    connector: ConnectorConfig = field(default_factory=ConnectorConfig)
    policy: dict[str, Any] = MISSING
    """Open: a `_target_` class and its arguments, part by part. See `conf/policy/balanced.yaml`."""
    router: RouterConfig = field(default_factory=RouterConfig)
    conversations: ConversationsConfig = field(default_factory=ConversationsConfig)
    tenants: dict[str, TenantConfig] = field(default_factory=dict)
    """By name. None at all: everybody is one tenant and needs no key."""
    auth: AuthConfig = field(default_factory=AuthConfig)
    admin: AdminConfig = field(default_factory=AdminConfig)


@dataclass(kw_only=True, slots=True)
class PlanConfig(Config):
    format: Format = Format.table
    """`json`: alone on standard output."""
