"""Looking at processes, for the tests of what starts and ends them."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 30.0


def engine(*options: str) -> tuple[str, ...]:
    return (sys.executable, str(Path(__file__).with_name("engine_program.py")), *options)


def pids(log: Path) -> list[int]:
    """Of the engine program and its children, once it is up."""
    wait_until(lambda: log.exists() and "up" in log.read_text().split("\n"), f"{log} to say up")
    return [int(line.removeprefix("pid ")) for line in log.read_text().split("\n") if line.startswith("pid ")]


def alive(pid: int) -> bool:
    """A zombie is not: nobody may be there to reap it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "\nState:\tZ" not in status and "\nState:\tX" not in status


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.01)


def wait_gone(*pids: int) -> None:
    wait_until(lambda: not any(map(alive, pids)), f"{pids} to end")
