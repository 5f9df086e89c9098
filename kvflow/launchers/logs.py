"""Log files of node processes."""

import os
import re
from pathlib import Path

_TAIL_BYTES = 1 << 16
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_PROGRESS = re.compile(r"\d+%\|")
"""As in the bars that tqdm draws."""


def open_log(file: Path) -> int:
    """A new log for a new life, open for appending; the previous one is kept as `<name>.1`. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists():
        file.replace(file.with_name(f"{file.name}.1"))
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def tail(file: Path, lines: int) -> list[str]:
    """The last lines that say something: no colours, no blank ones, no progress bars."""
    try:
        with file.open("rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = f.read().decode(errors="replace")
    except OSError:
        return []
    told = (_visible(line) for line in text.split("\n"))
    return [line for line in told if line.strip() and not _PROGRESS.search(line)][-lines:]


def _visible(line: str) -> str:
    """What a terminal shows in the end of a line that was overwritten."""
    return _ANSI.sub("", line).rstrip("\r").rpartition("\r")[2].rstrip()
