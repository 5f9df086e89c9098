"""`kvflow serve` as a process of its own on free ports, as a user starts it, stopped whatever happens."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from kvflow.errors import StartError

READY_S = 900.0
STOP_S = 60.0
_PORTS = ("router.port", *(f"cluster.{r}.{k}" for r in ("prefill", "decode") for k in ("port", "side_channel_port")))
_APART = 64
"""Between the first ports of two pools, whose nodes count up from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    url: str
    """Of the router."""
    alone: str | None = None
    """Of an engine that can be asked past the router."""


@contextmanager
def serve(overrides: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Serving]:
    """Start `kvflow serve` with `overrides`, `env` added to its environment, and wait until it is ready.

    Raises `StartError` with the end of its log.
    """
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    words = [*(f"{key}={port}" for key, port in ports.items()), *overrides]
    with tempfile.TemporaryDirectory(prefix="kvflow-benchmark-") as folder:
        log = Path(folder) / "kvflow.log"
        words.insert(0, f"cluster.log_dir={folder}")
        with (
            log.open("wb") as out,
            _running([sys.executable, "-m", "kvflow", "serve", *words], out.fileno(), env or {}) as process,
        ):
            serving = Serving(url=_url(ports["router.port"]), alone=_url(ports["cluster.decode.port"]))
            _wait(serving.url, process, log)
            yield serving


@contextmanager
def _running(command: Sequence[str], out: int, env: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **env})
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its engines have guards that end them then
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while not _ready(url):
        if process.poll() is not None or time.monotonic() > deadline:
            raise StartError(f"kvflow serve did not become ready:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _free_ports(count: int) -> list[int]:
    """From below the range that systems take for outgoing connections, so that no such one gets them meanwhile."""
    random, found = SystemRandom(), list[int]()
    with ExitStack() as held:
        while len(found) < count:
            port = random.randrange(20_000, 32_000)
            if all(abs(port - other) >= _APART for other in found):
                try:
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
                except OSError:
                    continue
                found.append(port)
    return found
