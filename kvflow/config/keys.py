"""Where keys come from: files and the environment, never the configuration, which is printed and logged."""

import os
from pathlib import Path

from kvflow.config.schema import Config
from kvflow.errors import ConfigError

FILE_VARIABLE = "KVFLOW_KEYS_FILE"
VARIABLE = "KVFLOW_KEYS"
ADMIN_VARIABLE = "KVFLOW_ADMIN_KEY"


def tenants_source(config: Config) -> str:
    """Where the keys of tenants come from, in words; empty if there are none."""
    file, key = _file(config)
    return f"{key} ({file})" if file else VARIABLE if _variable(VARIABLE) else ""


def tenants_text(config: Config) -> str:
    """What the file or the variable holds. Raises `ConfigError`."""
    file, key = _file(config)
    if file and _variable(VARIABLE):
        raise ConfigError(f"{VARIABLE}: keys come from {key} ({file}) already; unset one of the two.")
    return _read(key, file) if file else _variable(VARIABLE)


def admin_source(config: Config) -> str:
    """Where the admin key comes from, in words; empty if there is none."""
    if config.admin.key_file:
        return f"admin.key_file ({config.admin.key_file})"
    return ADMIN_VARIABLE if _variable(ADMIN_VARIABLE) else ""


def admin_line(config: Config) -> str:
    """The key or its hash; empty if there is none. Raises `ConfigError`."""
    file = config.admin.key_file
    if not file:
        return _variable(ADMIN_VARIABLE)
    lines = [line.strip() for line in _read("admin.key_file", file).splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if len(found) != 1:
        raise ConfigError(f"admin.key_file: {file} must hold one line with a key or its hash, and holds {len(found)}.")
    return found[0]


def _file(config: Config) -> tuple[str, str]:
    """The file with tenants' keys, and what names it."""
    if config.auth.keys_file:
        return config.auth.keys_file, "auth.keys_file"
    return _variable(FILE_VARIABLE), FILE_VARIABLE


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()


def _read(key: str, file: str) -> str:
    try:
        return Path(file).expanduser().read_text()
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else "it is no text"
        raise ConfigError(f"{key}: cannot read {file}: {why.lower()}.") from None
