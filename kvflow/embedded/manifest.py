"""The list of a prepared model's files and their sizes.

It is written last: a folder with a manifest was finished once, and the sizes tell whether it still is whole.
"""

import json
from pathlib import Path

NAME = "kvflow-manifest.json"


def write(folder: Path) -> None:
    (folder / NAME).write_text(json.dumps(_sizes(folder), indent=1, sort_keys=True))


def is_complete(folder: Path) -> bool:
    try:
        wanted = json.loads((folder / NAME).read_bytes())
        found = _sizes(folder)
    except (OSError, ValueError):
        return False
    return isinstance(wanted, dict) and bool(wanted) and wanted.items() <= found.items()


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file() and path.name != NAME}
