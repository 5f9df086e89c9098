"""Where configuration comes from, and composing it without a command line."""

import os
from collections.abc import Sequence
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from kvflow.config.refusal import refusing
from kvflow.config.schema import Config, PlanConfig
from kvflow.errors import ConfigError

VERSION_BASE = "1.3"


def conf_dir() -> Path:
    """The shipped configuration: packed into the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    packed = package / "conf"
    return packed if packed.is_dir() else package.parent / "conf"


def user_dirs() -> tuple[Path, ...]:
    """Folders of `$KVFLOW_CONFIG_PATH`, separated as in `$PATH`. Raises `ConfigError` where one does not exist."""
    dirs = tuple(
        Path(d).expanduser().resolve() for d in os.environ.get("KVFLOW_CONFIG_PATH", "").split(os.pathsep) if d
    )
    for d in dirs:
        if not d.is_dir():
            raise ConfigError(f"KVFLOW_CONFIG_PATH: there is no directory {d}.")
    return dirs


class UserDirs(SearchPathPlugin):
    """Puts the user's folders behind the shipped one, where Hydra, which takes the first file of a name, finds names
    that we do not ship and no others. `--config-dir` comes after them."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for d in user_dirs():
            search_path.append(provider="KVFLOW_CONFIG_PATH", path=f"file://{d}")


def register() -> None:
    """Tell Hydra of the schema and the user's folders. Twice does no harm."""
    store = ConfigStore.instance()
    store.store(name="schema_serve", node=Config, provider="kvflow")
    store.store(name="schema_plan", node=PlanConfig, provider="kvflow")
    store.store(name="catalogue", node={}, provider="kvflow")
    Plugins.instance().register(UserDirs)


def compose(verb: str, overrides: Sequence[str] = (), dirs: Sequence[Path] = ()) -> DictConfig:
    """What `kvflow <verb> <overrides>` would compose, with options from `dirs` too. Raises `ConfigError`."""
    register()
    if dirs:
        overrides = [*overrides, f"hydra.searchpath=[{','.join(map(_quoted, dirs))}]"]
    with refusing(), initialize_config_dir(version_base=VERSION_BASE, config_dir=str(conf_dir())):
        return hydra_compose(verb, list(overrides))


def _quoted(directory: Path) -> str:
    text = f"file://{directory}".replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
