"""Node processes on this machine."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvflow.errors import StartError
from kvflow.launchers import lifeline, logs
from kvflow.launchers.spawn import Tied, spawn

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLauncher:
    """Starts processes, each with a log file `<name>.log` in `log_dir`."""

    log_dir: Path
    term_s: float = 20.0
    """Seconds that `stop` gives a process to end by itself after SIGTERM, before all of its session gets SIGKILL."""
    rest_s: float = 3.0
    """Seconds that what is left of a session gets to clean up once its leader is gone."""

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> "LocalProcess":
        """Start `command`, in a running event loop, with `env` on top of kvflow's environment. Raises `StartError`."""
        log = self.log_dir / f"{name}.log"
        try:
            output = logs.open_log(log)
        except OSError as e:
            raise StartError(f"{name} cannot be started: cannot write its log {log}: {e.strerror}.") from None
        try:
            tied = spawn(command, env, output)
        except OSError as e:
            raise StartError(f"{name} cannot be started: cannot run {command[0]}: {e.strerror}.") from None
        finally:
            os.close(output)
        return LocalProcess(tied, log, term_s=self.term_s, rest_s=self.rest_s)


class LocalProcess:
    """A started process and everything that it starts: the session that it leads."""

    def __init__(self, tied: Tied, log: Path, *, term_s: float, rest_s: float) -> None:
        self._tied, self._term_s, self._rest_s = tied, term_s, rest_s
        self.log = log
        self.pid = tied.process.pid
        self._exit = asyncio.Event()
        self._pidfd = os.pidfd_open(self.pid)
        self._life = asyncio.create_task(self._live(), name=f"life of process {self.pid}")

    async def wait(self) -> int:
        """Wait until nothing of the session is left; the exit status, negative for a signal, is the process's own."""
        return await asyncio.shield(self._life)

    async def stop(self) -> None:
        """SIGTERM to the process, which shuts its own children down; SIGKILL to the session if that takes too long."""
        if not self._exit.is_set():
            self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._term_s):
                await self._exit.wait()
        except TimeoutError:
            _log.warning("process %d is still there %g s after SIGTERM: killing it", self.pid, self._term_s)
            lifeline.signal_session(self.pid, signal.SIGKILL)
        await self.wait()

    async def _live(self) -> int:
        """The leader is reaped last: until then the kernel gives its number, the session's id, to nobody else."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, self._exit.set)
        try:
            await self._exit.wait()
        finally:
            loop.remove_reader(self._pidfd)
        await self._end_session()
        os.close(self._tied.lifeline)
        os.close(self._pidfd)
        return self._tied.process.wait()

    async def _end_session(self) -> None:
        lifeline.signal_session(self.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._rest_s):
                await _until(lambda: not lifeline.members(self.pid))
        await _until(lambda: not lifeline.signal_session(self.pid, signal.SIGKILL))

    def _signal(self, number: signal.Signals) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return


async def _until(condition: Callable[[], bool]) -> None:
    """The kernel tells nobody when a session has become empty."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(lifeline.POLL_S)
