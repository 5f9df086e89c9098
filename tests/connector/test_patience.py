import os
import time
from types import SimpleNamespace

import pytest

from kvflow.connector.patience import POLL_US, patient_progress, patient_queues, same_cores


class Config:
    """NIXL's, as its Python layer uses it."""

    pthrDelay: int
    useProgThread: bool


def test_agents_made_meanwhile_wait_and_later_ones_are_nixls_own() -> None:
    bindings = SimpleNamespace(nixlAgentConfig=Config)
    with patient_progress(bindings):
        config = bindings.nixlAgentConfig()
        config.pthrDelay = 0
        config.useProgThread = True
    assert isinstance(config, Config)
    assert (config.pthrDelay, config.useProgThread) == (POLL_US, True)
    assert bindings.nixlAgentConfig is Config


def test_a_longer_wait_of_nixls_own_stays() -> None:
    bindings = SimpleNamespace(nixlAgentConfig=Config)
    with patient_progress(bindings):
        config = bindings.nixlAgentConfig()
        config.pthrDelay = 5 * POLL_US
    assert config.pthrDelay == 5 * POLL_US


def test_nixl_gets_its_class_back_though_its_agent_fails() -> None:
    bindings = SimpleNamespace(nixlAgentConfig=Config)
    with pytest.raises(OSError, match="no network"), patient_progress(bindings):
        raise OSError("no network")
    assert bindings.nixlAgentConfig is Config


def test_readers_of_queues_use_no_processor_while_they_wait() -> None:
    module = SimpleNamespace(sched_yield=os.sched_yield)
    patient_queues(module)
    used, started = time.process_time(), time.monotonic()
    for _ in range(100):
        module.sched_yield()
    assert time.process_time() - used < (time.monotonic() - started) / 2


def test_the_thread_stays_on_the_cpus_that_it_was_given() -> None:
    given = os.sched_getaffinity(0)
    with same_cores():
        os.sched_setaffinity(0, {max(given)})
    assert os.sched_getaffinity(0) == given
