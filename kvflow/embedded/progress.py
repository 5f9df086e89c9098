"""Showing how far the preparation of the model is."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class Progress(Protocol):
    """Is called when a step begins and, where that is known, whenever a further fraction of it, 0 to 1, is done."""

    def __call__(self, step: str, fraction: float | None = None) -> None: ...


def silent(step: str, fraction: float | None = None) -> None:
    """For callers who show nothing."""


class Console:
    """A bar for each step on a terminal; elsewhere a line when a step begins, at each quarter, and when it is done.

    `with Console() as progress: prepare(progress)`. Shows nothing at all when no step begins.
    """

    def __init__(self, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        file = file or sys.stderr
        self._show: _Bars | _Lines = _Bars(file) if file.isatty() else _Lines(file, clock)

    def __call__(self, step: str, fraction: float | None = None) -> None:
        self._show.update(step, fraction)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _e: BaseException | None, _tb: TracebackType | None) -> None:
        self._show.close(done=kind is None)


class _Lines:
    def __init__(self, file: TextIO, clock: Callable[[], float]) -> None:
        self._file, self._clock = file, clock
        self._step: str | None = None
        self._since = 0.0
        self._quarters = 0

    def update(self, step: str, fraction: float | None) -> None:
        if step != self._step:
            self.close(done=True)
            self._step, self._since, self._quarters = step, self._clock(), 0
            self._print(f"{step} ...")
        if fraction is not None:
            self._quarter(step, int(fraction * 4))

    def close(self, *, done: bool) -> None:
        if self._step is not None and done:
            self._print(f"{self._step}: done in {self._clock() - self._since:.1f} s")
        self._step = None

    def _quarter(self, step: str, quarters: int) -> None:
        if self._quarters < quarters < 4:
            self._quarters = quarters
            self._print(f"{step}: {quarters * 25}%")

    def _print(self, line: str) -> None:
        print(line, file=self._file, flush=True)


class _Bars:
    def __init__(self, file: TextIO) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
        self._bars = Bars(*columns, TimeElapsedColumn(), console=RichConsole(file=file))
        self._step: str | None = None
        self._task: TaskID | None = None

    def update(self, step: str, fraction: float | None) -> None:
        if step != self._step:
            self._finish()
            self._bars.start()
            self._step, self._task = step, self._bars.add_task(step, total=None)
        if fraction is not None and self._task is not None:
            self._bars.update(self._task, total=1.0, completed=min(fraction, 1.0))

    def close(self, *, done: bool) -> None:
        if done:
            self._finish()
        self._bars.stop()

    def _finish(self) -> None:
        if self._task is not None:
            self._bars.update(self._task, total=1.0, completed=1.0)
