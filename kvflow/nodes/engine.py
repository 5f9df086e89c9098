"""An engine that kvflow starts on this machine."""

import asyncio
import signal
from collections.abc import Mapping
from urllib.parse import urlsplit

from kvflow.launchers import logs
from kvflow.launchers.local import LocalLauncher, LocalProcess
from kvflow.launchers.ports import check_free
from kvflow.nodes.base import NodeSpec

LOG_LINES = 20
"""Shown of an engine that died."""


class EngineNode:
    """`spec.command` as a process of this machine.

    `ports` are what it listens on, by the configuration key that sets them, such as `cluster.prefill.port`.
    """

    def __init__(self, spec: NodeSpec, launcher: LocalLauncher, ports: Mapping[str, int]) -> None:
        self._spec, self._launcher, self._ports = spec, launcher, ports
        self._process: LocalProcess | None = None

    @property
    def spec(self) -> NodeSpec:
        return self._spec

    async def start(self) -> None:
        host = urlsplit(self.spec.url).hostname or "127.0.0.1"
        for key, port in self._ports.items():
            check_free(host, port, who=self.spec.name, key=key)
        self._process = self._launcher.start(self.spec.name, self.spec.command, dict(self.spec.env))

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()

    async def died(self) -> str:
        """Of the life that runs when this is called; a life that `stop` ended has not died."""
        process = self._process
        if process is not None:
            status = await process.wait()
            if self._process is process:
                return _obituary(self.spec.name, status, process)
        return await asyncio.Future()


def _obituary(name: str, status: int, process: LocalProcess) -> str:
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
    last = "".join(f"\n  {line}" for line in logs.tail(process.log, LOG_LINES))
    return f"{name} {how}; the end of its log {process.log}:{last or ' nothing'}"
