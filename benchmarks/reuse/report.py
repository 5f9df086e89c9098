"""Figures of a run: for people as tables, for scripts as JSON."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.reuse.play import Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A turn, and how many tokens of its answer were wrong."""

    turn: Turn
    wrong: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """Of some turns. All but `turns` are tokens."""

    turns: int
    prompt: int
    reusable: int
    reused: int
    pulled: int
    missed: int
    """Of those reusable, turn by turn."""
    wrong: int

    @property
    def share(self) -> float:
        """Reused ÷ reusable; 1 where nothing was reusable."""
        return self.reused / self.reusable if self.reusable else 1.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "share": round(self.share, 6)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    name: str
    judged: Sequence[Judged]

    @property
    def total(self) -> Sum:
        return sum_of(self.judged)

    def by_kind(self) -> dict[str, Sum]:
        return _grouped(self.judged, lambda j: j.turn.kind.value)

    def by_path(self) -> dict[str, Sum]:
        return _grouped(self.judged, lambda j: f"{j.turn.answer.path} {j.turn.answer.reason}".strip())

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "total": self.total.to_json(),
            "kinds": {name: s.to_json() for name, s in self.by_kind().items()},
            "paths": {name: s.to_json() for name, s in self.by_path().items()},
            "turns": [_turn_json(j) for j in self.judged],
        }


def judge(turns: Sequence[Turn], wrong: Sequence[int]) -> list[Judged]:
    return [Judged(turn=t, wrong=w) for t, w in zip(turns, wrong, strict=True)]


def sum_of(judged: Iterable[Judged]) -> Sum:
    some = list(judged)
    return Sum(
        turns=len(some),
        prompt=sum(len(j.turn.answer.prompt) for j in some),
        reusable=sum(j.turn.reusable for j in some),
        reused=sum(j.turn.reused for j in some),
        pulled=sum(j.turn.answer.pulled for j in some),
        missed=sum(max(0, j.turn.reusable - j.turn.reused) for j in some),
        wrong=sum(j.wrong for j in some),
    )


def show(runs: Sequence[Run], console: Console) -> None:
    for run in runs:
        console.print(_table(run.name, "kind", (*run.by_kind().items(), ("all", run.total)), last_is_total=True))
        console.print(_table("", "path and reason", run.by_path().items()))
    if len(runs) > 1:
        console.print(_table("all runs", "policy", ((run.name, run.total) for run in runs)))


def _table(title: str, first: str, rows: Iterable[tuple[str, Sum]], *, last_is_total: bool = False) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.collapse_padding = True
    table.add_column(first, no_wrap=True)
    for heading in ("turns", "reusable", "reused", "pulled", "missed", "share", "wrong"):
        table.add_column(heading, justify="right", no_wrap=True)
    listed = list(rows)
    for number, (name, s) in enumerate(listed, start=1):
        table.add_row(name, *_cells(s), end_section=last_is_total and number == len(listed) - 1)
    return table


def _cells(s: Sum) -> Iterator[str]:
    yield from (f"{n:,}" for n in (s.turns, s.reusable, s.reused, s.pulled, s.missed))
    yield f"{s.share:.4f}"
    yield f"{s.wrong:,}" if not s.wrong else f"[bold red]{s.wrong:,}[/]"


def _grouped(judged: Sequence[Judged], name: Callable[[Judged], str]) -> dict[str, Sum]:
    names = dict.fromkeys(sorted(map(name, judged)))
    return {group: sum_of(j for j in judged if name(j) == group) for group in names}


def _turn_json(j: Judged) -> dict[str, Any]:
    turn, answer = j.turn, j.turn.answer
    return {
        "conversation": turn.conversation,
        "request": turn.request,
        "kind": turn.kind,
        "prompt": len(answer.prompt),
        "answer": len(answer.tokens),
        "reusable": turn.reusable,
        "reused": turn.reused,
        "pulled": answer.pulled,
        "path": answer.path,
        "reason": answer.reason or None,
        "wrong": j.wrong,
    }
