"""How an engine without a GPU waits: asleep, so that its cores are free for those who compute.

vLLM and NIXL wait in busy loops, which is right where the computing is done elsewhere. On a CPU engine the loops run on
the cores that compute, and on a small machine they keep the other processes of a turn from running at all. Measured
with a prefill and a decode engine on 2 cores, SmolLM2-135M: an idle engine took 96 % of a core and takes 3 %; prefill
went from 90 to 270 tokens/s; a prefill leg right after a decode leg from 1.07 s to 0.19 s.

Neither library has a setting for it, so what they look up in a module is replaced there, in the engine's own processes.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

POLL_US = 1000
"""Microseconds that NIXL's progress thread may wait for an event; events wake it up before."""
NAP_S = 0.0002
"""Seconds between two looks at a message queue; about a hundredth of a decoding step."""


@contextmanager
def patient_progress(bindings: Any) -> Iterator[None]:
    """Let the NIXL agents that are created meanwhile sleep between events.

    `bindings` is `nixl._api.nixlBind`. NIXL's Python layer always sets the delay of the agent's progress thread to 0.
    """
    original = bindings.nixlAgentConfig

    class Patient(original):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, max(value, POLL_US) if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Patient
    try:
        yield
    finally:
        bindings.nixlAgentConfig = original


@contextmanager
def same_cores() -> Iterator[None]:
    """Leave the thread on the CPUs that it was given.

    vLLM moves the thread that makes the connector's worker to the machine's last CPU, to keep transfers away from
    computing. But that thread computes, and with one core an engine it is all that does: several engines on a machine
    then compute on that one CPU, whatever they were given, and one that is busy starves the others. Measured with two
    engines on 2 cores: a prefill leg of 54 tokens took 8 s while the decode engine was answering, and 0.4 s while not.
    """
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def patient_queues(shm_broadcast: Any) -> None:
    """Let the readers of vLLM's queues between processes sleep where they yield.

    `shm_broadcast` is vLLM's module of that name. A reader loops for a second after each message before it waits for a
    signal; to yield does not help, because a yielding process stays ready to run.
    """
    shm_broadcast.sched_yield = _nap


def _nap() -> None:
    time.sleep(NAP_S)
