"""Dividing a machine among engines."""

import os

import pytest

from kvflow.launchers.machine import Machine, this_machine


def machine(cores: int, threads: int = 1) -> Machine:
    """Logical CPUs numbered as the kernel does: first one of every core, then the others."""
    return Machine(cores=tuple(tuple(c + t * cores for t in range(threads)) for c in range(cores)))


def test_engines_get_disjoint_cores() -> None:
    assert machine(2).shares(2) == ((0,), (1,))
    assert machine(7).shares(2) == ((0, 1, 2), (3, 4, 5))


def test_a_core_stays_free_of_compute_threads_where_there_are_several() -> None:
    assert machine(8).shares(2) == ((0, 1, 2), (4, 5, 6))


def test_two_threads_of_a_core_are_not_used_while_there_are_cores_enough() -> None:
    assert machine(4, threads=2).shares(2) == ((0, 1), (2, 3))


def test_the_threads_of_a_core_are_used_where_cores_are_fewer_than_engines() -> None:
    assert machine(1, threads=2).shares(2) == ((0,), (1,))


def test_more_engines_than_cpus_share_them() -> None:
    assert machine(2).shares(3) == ((0,), (1,), (0,))


def test_this_machine_has_the_cpus_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, GPU-77")
    here = this_machine()
    assert sorted(cpu for core in here.cores for cpu in core) == sorted(os.sched_getaffinity(0))
    assert here.gpus == ("1", "GPU-77")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert this_machine().gpus == ()
