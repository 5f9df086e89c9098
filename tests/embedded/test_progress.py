import io
from collections.abc import Iterator

import pytest

from kvflow.embedded import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def seconds() -> Iterator[float]:
    return iter(float(s) for s in range(100))


def test_lines_where_nobody_looks(seconds: Iterator[float]) -> None:
    out = io.StringIO()
    with Console(out, clock=lambda: next(seconds)) as progress:
        progress("Fetching")
        for fraction in (0.0, 0.1, 0.3, 0.4, 0.8, 0.9, 1.0):
            progress("Fetching", fraction)
        progress("Converting")
    assert out.getvalue().splitlines() == [
        "Fetching ...",
        "Fetching: 25%",
        "Fetching: 75%",
        "Fetching: done in 1.0 s",
        "Converting ...",
        "Converting: done in 1.0 s",
    ]


def test_a_step_that_fails_is_not_called_done() -> None:
    out = io.StringIO()

    def fail() -> None:
        with Console(out) as progress:
            progress("Fetching")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert out.getvalue() == "Fetching ...\n"


def test_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    with Console(out) as progress:
        progress("Fetching", 0.5)
        progress("Converting")
    last = out.getvalue().rpartition("Fetching")[2]
    assert "100%" in last.partition("Converting")[0]
    assert "100%" in last.partition("Converting")[2]


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()], ids=["lines", "bars"])
def test_no_step_no_output(out: io.StringIO) -> None:
    with Console(out):
        pass
    assert out.getvalue() == ""
