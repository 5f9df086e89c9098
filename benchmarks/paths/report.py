"""Medians by cell, and how the policy that chooses compares with the best fixed path: for people and for scripts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.paths.grid import FIXED, Cell, Contender
from benchmarks.paths.run import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cell; times in seconds."""

    cell: Cell
    median_s: dict[Contender, float]
    paths: dict[str, int]
    """Those that the adaptive policy took, and how often."""

    @property
    def best(self) -> Contender:
        return min(FIXED, key=self.median_s.__getitem__)

    @property
    def to_best(self) -> float:
        """1 is as fast as the best fixed path; below is faster."""
        return self.median_s[Contender.ADAPTIVE] / self.median_s[self.best]

    @property
    def to_off(self) -> float:
        return self.median_s[Contender.ADAPTIVE] / self.median_s[Contender.OFF]

    def to_json(self) -> dict[str, Any]:
        cell = {"history": self.cell.history, "new": self.cell.new, "load": self.cell.load}
        ratios = {"best": self.best, "to_best": round(self.to_best, 4), "to_off": round(self.to_off, 4)}
        return {**cell, "median_s": {c: round(s, 4) for c, s in self.median_s.items()}, **ratios, "paths": self.paths}


def rows(samples: Sequence[Sample]) -> list[Row]:
    """Without the warm-up."""
    counted = [s for s in samples if s.round >= 0]
    return [_row(cell, [s for s in counted if s.cell == cell]) for cell in dict.fromkeys(s.cell for s in counted)]


def _row(cell: Cell, samples: Sequence[Sample]) -> Row:
    times = {c: median(s.answer.first_s for s in samples if s.contender is c) for c in Contender}
    taken = Counter(s.answer.path for s in samples if s.contender is Contender.ADAPTIVE)
    return Row(cell=cell, median_s=times, paths=dict(taken))


def differing(samples: Sequence[Sample]) -> int:
    return sum(s.differs for s in samples)


def show(found: Sequence[Row], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, title="Seconds to the first token, medians", title_justify="left")
    table.collapse_padding = True
    for heading in ("history", "new", "load", *Contender, "took", "to best", "to off"):
        table.add_column(heading, justify="left" if heading in ("load", "took") else "right", no_wrap=True)
    for row in found:
        table.add_row(*_cells(row))
    console.print(table)


def markdown(found: Sequence[Row]) -> str:
    """The same table for a page of documentation."""
    headings = ["history", "new", "load", *(f"`{c}`" for c in Contender), "took", "to best", "to `off`"]
    lines = [headings, ["---"] * len(headings), *(list(_cells(row)) for row in found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def samples_json(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    return [
        {
            "history": s.cell.history,
            "new": s.cell.new,
            "load": s.cell.load,
            "contender": s.contender,
            "round": s.round,
            "first_s": round(s.answer.first_s, 4),
            "path": s.answer.path,
            "pulled": s.answer.pulled,
            "differs": s.differs,
        }
        for s in samples
    ]


def _cells(row: Row) -> Iterator[str]:
    yield from (str(row.cell.history), str(row.cell.new), row.cell.load)
    yield from (f"{row.median_s[c]:.2f}" for c in Contender)
    yield ", ".join(f"{path} {n}" if len(row.paths) > 1 else path for path, n in row.paths.items())
    yield from (f"{row.to_best:.2f}", f"{row.to_off:.2f}")
