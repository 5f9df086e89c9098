"""Which part of a machine each engine gets: the step from a configuration to engines that are completely decided."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvflow import embedded
from kvflow.config import EMBEDDED, Config, ConnectorConfig, Device, Dtype, Kind
from kvflow.config.addresses import LOOPBACK, Address, addresses, pool_of
from kvflow.errors import ConfigError
from kvflow.launchers.machine import Cores, Machine
from kvflow.nodes.command import Connector, Engine

CPU_KV_CACHE_GIB = 2.0
"""What an engine on CPUs gets unless told otherwise: left to itself, vLLM takes most of the machine's memory."""
GPU_MEMORY_SHARE = 0.9
"""Of a GPU that several engines share, all of them together."""


def engines(config: Config, machine: Machine) -> tuple[tuple[Address, Engine], ...]:
    """Those of a local cluster, on `machine`, or of a remote one. Raises `ConfigError`."""
    places = tuple(addresses(config.cluster))
    device = _device(config, machine)
    gpus, share = _gpus(config, places, device, machine)
    cpus = _cpus(config, places, device, machine)
    return tuple((a, _engine(config, a, device, g, share, c)) for a, g, c in zip(places, gpus, cpus, strict=True))


def _device(config: Config, machine: Machine) -> Device:
    wanted = config.cluster.device
    if config.cluster.kind is Kind.remote:
        return Device.cuda if wanted is Device.auto else wanted
    usable = bool(machine.gpus) and not machine.vllm_for_cpus
    if wanted is Device.cuda and not usable:
        why = "the installed vLLM is the build for CPUs" if machine.gpus else "this machine shows no NVIDIA GPU"
        raise ConfigError(f"cluster.device=cuda: {why}; take cpu or auto.")
    if wanted is Device.auto:
        return Device.cuda if usable else Device.cpu
    return wanted


def _gpus(
    config: Config, places: Sequence[Address], device: Device, machine: Machine
) -> tuple[list[tuple[str, ...]], float | None]:
    """Each engine's GPUs, and the share of their memory that it may take where it has to share them."""
    sizes = [pool_of(config.cluster, a.role).tensor_parallel_size for a in places]
    if device is not Device.cuda:
        return [()] * len(places), None
    if config.cluster.kind is Kind.remote:
        return list(_remote_gpus(places, sizes)), None
    have = machine.gpus
    for a, size in zip(places, sizes, strict=True):
        if size > len(have):
            key = f"cluster.{a.role}.tensor_parallel_size"
            raise ConfigError(f"{key} is {size}, and this machine has {len(have)} GPU{'s' * (len(have) > 1)}.")
    given, start = [], 0
    for size in sizes:
        given.append(tuple(have[(start + i) % len(have)] for i in range(size)))
        start += size
    crowd = max(Counter(g for gpus in given for g in gpus).values())
    return given, None if crowd == 1 else round(GPU_MEMORY_SHARE / crowd, 2)


def _remote_gpus(places: Sequence[Address], sizes: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """An engine that is alone on its host takes what it finds there; several stand side by side."""
    engines_on = Counter(a.host for a in places)
    start: Counter[str] = Counter()
    for a, size in zip(places, sizes, strict=True):
        first = start[a.host]
        start[a.host] += size
        yield () if engines_on[a.host] == 1 else tuple(str(g) for g in range(first, first + size))


def _cpus(config: Config, places: Sequence[Address], device: Device, machine: Machine) -> list[tuple[Cores, ...]]:
    """Each engine's CPUs, rank by rank. On other hosts vLLM chooses."""
    if device is not Device.cpu or config.cluster.kind is Kind.remote:
        return [()] * len(places)
    ranks = [pool_of(config.cluster, a.role).tensor_parallel_size for a in places]
    shares = iter(machine.shares(sum(ranks)))
    return [tuple(next(shares) for _ in range(n)) for n in ranks]


def _engine(
    config: Config, a: Address, device: Device, gpus: tuple[str, ...], gpu_share: float | None, cpus: tuple[Cores, ...]
) -> Engine:
    cluster, model, pool = config.cluster, config.model, pool_of(config.cluster, a.role)
    on_cpu, remote = device is Device.cpu, cluster.kind is Kind.remote
    gib = pool.kv_cache_gib or (CPU_KV_CACHE_GIB if on_cpu else None)
    path, offline = _elsewhere(model.path) if remote else _here(model.path)
    return Engine(
        role=a.role,
        python="python3" if remote else sys.executable,
        model=path,
        served_name=model.name,
        max_model_len=model.max_model_len,
        dtype=Dtype.float32 if model.dtype is Dtype.auto and on_cpu else model.dtype,
        listen=cluster.listen,
        port=a.port,
        side_channel_host=a.host if remote else LOOPBACK,
        side_channel_port=a.side_channel_port,
        connector=_connector(config.connector, device),
        offline=offline,
        prefix_caching=pool.prefix_caching,
        tensor_parallel_size=pool.tensor_parallel_size,
        max_num_seqs=pool.max_num_seqs,
        kv_cache_bytes=None if gib is None else int(gib * 2**30),
        kv_blocks=pool.kv_blocks,
        gpu_memory_share=gpu_share,
        gpus=gpus,
        cpus=cpus,
        args={**model.engine_args, **cluster.engine_args, **pool.engine_args},
        env={**cluster.env, **pool.env},
    )


def _elsewhere(path: str) -> tuple[str, bool]:
    """As `_here`, for other hosts: what this machine has on its disk, the embedded model too, they do not have."""
    return embedded.HUGGING_FACE_ID if path == EMBEDDED else path, False


def _here(path: str) -> tuple[str, bool]:
    """What vLLM is given, and whether all of it is on the disk."""
    if path == EMBEDDED:
        return str(embedded.model_dir()), True
    directory = Path(path).expanduser()
    return (str(directory.absolute()), True) if directory.is_dir() else (path, False)


def _connector(config: ConnectorConfig, device: Device) -> Connector:
    return Connector(
        name=config.kv_connector,
        module_path=config.module_path,
        middleware=config.middleware,
        backends=tuple(config.backends),
        buffer_device=device if config.kv_buffer_device is Device.auto else config.kv_buffer_device,
        lease_s=config.lease_s,
        load_failure_policy=config.load_failure_policy,
    )
