"""Running a step of the preparation in a process of its own, which does not outlive kvflow."""

import errno
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from kvflow.launchers import lifeline
from kvflow.launchers.spawn import Tied, spawn

LAST_LINES = 20
TICK_S = 0.25


class ChildError(Exception):
    """The process failed. `output` is the end of what it wrote."""

    def __init__(self, output: list[str]) -> None:
        super().__init__(output[-1] if output else "it said nothing")
        self.output = output


def run(module: str, *arguments: str, env: Mapping[str, str], heard: Callable[[str], None]) -> None:
    """Run `python -m module` to its end.

    Every line of its output is passed to `heard`, and an empty one every `TICK_S` seconds. Raises `ChildError`, or
    OSError where the disk was full.
    """
    last: deque[str] = deque(maxlen=LAST_LINES)
    command = (sys.executable, "-m", "kvflow.launchers.tied", module, *arguments)
    with _running(command, env) as process:
        for line in _lines(process):
            if line:
                last.append(line)
            heard(line)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if process.returncode != 0:
        raise _failure(list(last))


def _failure(output: list[str]) -> Exception:
    disk_full = os.strerror(errno.ENOSPC)
    if any(disk_full in line for line in output):
        return OSError(errno.ENOSPC, disk_full)
    return ChildError(output)


@contextmanager
def _running(command: tuple[str, ...], env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    tied = spawn(command, env, subprocess.PIPE)
    try:
        yield tied.process
    finally:
        _end(tied)


def _end(tied: Tied) -> None:
    """The leader is reaped last: until then nobody else can be given the session's id."""
    os.close(tied.lifeline)
    while lifeline.signal_session(tied.process.pid, signal.SIGKILL):
        time.sleep(lifeline.POLL_S)
    tied.process.wait()
    if tied.process.stdout:
        tied.process.stdout.close()


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Lines as they come; a carriage return ends one too. Empty ones are ticks."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            yield ""
            if not selector.select(TICK_S):
                continue
            chunk = os.read(process.stdout.fileno(), 65536)
            *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            yield from (line.decode(errors="replace").strip() for line in (lines if chunk else [rest]))
            if not chunk:
                return
