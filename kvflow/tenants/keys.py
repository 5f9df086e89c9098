"""API keys of tenants, of which only hashes are kept.

A key has at least 128 bits that nobody can guess, so one round of SHA-256 is enough: slow hashes protect what people
make up. Nothing here ever shows a key, or what might be one.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256

from kvflow.errors import ConfigError

PREFIX = "kvf_"
"""Of keys that kvflow makes, so that they are recognised where they should not be."""
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_NAME = 8
"""Characters of a hash that name a key in logs."""


def new_key() -> str:
    """One that nobody has seen, of 256 bits."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """What stands for `key` in a file."""
    return f"sha256:{sha256(key.encode()).hexdigest()}"


def is_hash(text: str) -> bool:
    return _HASH.fullmatch(text) is not None


def name_of(hashed: str) -> str:
    """What a key is called in logs."""
    return hashed.removeprefix("sha256:")[:_NAME]


@dataclass(frozen=True, slots=True)
class Keys:
    """Which tenant each key is of. A tenant may have several, so that one can be replaced by the next."""

    _tenants: Mapping[str, str]
    """By hash."""

    @classmethod
    def parse(cls, text: str, tenants: Iterable[str], source: str = "keys") -> "Keys":
        """One key a line or between commas, `tenant sha256:…`; from `#` on a line is a comment.

        Raises `ConfigError`, which names `source` and the line: no hash, a tenant that is not one of `tenants`, one key
        for two tenants.
        """
        known, found = set(tenants), dict[str, str]()
        for place, entry in _entries(text, source):
            tenant, hashed = _entry(place, entry)
            if tenant not in known:
                names = ", ".join(sorted(known)) or "none"
                raise ConfigError(f"{place}: there is no tenant {_shown(tenant)}; there are {names}.")
            if found.setdefault(hashed, tenant) != tenant:
                raise ConfigError(f"{place}: {tenant} has the same key as {found[hashed]}.")
        return cls(found)

    def tenant_of(self, key: str) -> str | None:
        return self.tenant_of_hash(hash_of(key))

    def tenant_of_hash(self, hashed: str) -> str | None:
        return self._tenants.get(hashed)

    def __len__(self) -> int:
        return len(self._tenants)


def _entries(text: str, source: str) -> Iterator[tuple[str, str]]:
    """Where each entry stands, and the entry."""
    for number, line in enumerate(text.splitlines(), start=1):
        for part in line.partition("#")[0].split(","):
            if entry := part.strip():
                yield f"{source}, line {number}", entry


def _shown(name: str) -> str:
    """A tenant's name, unless it may be a key that stands in its place."""
    return f"{name[:4]}…" if len(name) > 32 or name.startswith(PREFIX) else repr(name)


def _entry(place: str, entry: str) -> tuple[str, str]:
    words = entry.split()
    if len(words) != 2:
        raise ConfigError(f"{place}: write a tenant's name and the hash of its key, as in acme sha256:0123….")
    tenant, hashed = words
    if not is_hash(hashed):
        raise ConfigError(
            f"{place}: what follows the name is no hash; write sha256: and 64 lower-case hexadecimal digits "
            "(`kvflow key` makes a key and its hash)."
        )
    return tenant, hashed
