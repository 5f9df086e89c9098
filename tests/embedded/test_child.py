import errno
from pathlib import Path

import pytest

from kvflow.embedded import child
from tests.launchers.processes import alive, wait_until


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Modules written into `tmp_path` can be run."""
    return {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}


def ignore(_line: str) -> None:
    pass


def test_lines_are_heard_as_they_come(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "speaker.py").write_text(
        "import sys\nprint('out', sys.argv[1:])\nprint('err', file=sys.stderr)\nprint('1%\\r2%\\n\\nend', end='')"
    )
    heard: list[str] = []
    child.run("speaker", "a", "b", env=env | {"PYTHONUNBUFFERED": "1"}, heard=heard.append)
    assert [line for line in heard if line] == ["out ['a', 'b']", "err", "1%", "2%", "end"]


def test_a_child_that_answers_is_heard_before_it_ends(tmp_path: Path, env: dict[str, str]) -> None:
    """It ends only once it was heard."""
    seen = tmp_path / "seen"
    (tmp_path / "waiter.py").write_text(
        f"import os, time\nprint('hello', flush=True)\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.01)"
    )
    child.run("waiter", env=env, heard=lambda line: seen.touch() if line == "hello" else None)


def test_a_failure_tells_the_end_of_the_output(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "failure.py").write_text("for i in range(100): print(i)\nraise SystemExit('no such thing')")
    with pytest.raises(child.ChildError, match=r"^no such thing$") as failed:
        child.run("failure", env=env, heard=ignore)
    assert len(failed.value.output) == child.LAST_LINES


def test_a_silent_failure(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "silent.py").write_text("raise SystemExit(1)")
    with pytest.raises(child.ChildError, match="it said nothing"):
        child.run("silent", env=env, heard=ignore)


def test_a_full_disk_is_told_apart(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "full.py").write_text("import errno, os\nraise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))")
    with pytest.raises(OSError, match="No space left") as failed:
        child.run("full", env=env, heard=ignore)
    assert failed.value.errno == errno.ENOSPC


def test_an_interrupt_ends_the_child(tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "sleeper.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(1000)")
    pids: list[int] = []

    def interrupt(line: str) -> None:
        if line:
            pids.append(int(line))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.run("sleeper", env=env, heard=interrupt)
    wait_until(lambda: not alive(pids[0]), "the child to end")
