"""Words of the verbs that take plain `key=value` and compose no configuration.

Not Hydra's to read: `policy=` is a group there, whose options are those of this machine, and here it is the name of a
policy that a running server has.
"""

from collections.abc import Mapping, Sequence

from kvflow.errors import ConfigError

HELP = ("--help", "-h", "help")


def plain(verb: str, words: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """`known` says what each key takes. Raises `ConfigError`."""
    found = dict[str, str]()
    for word in words:
        key, equals, value = word.partition("=")
        if key not in known:
            what = ", ".join(f"{k}=" for k in known)
            raise ConfigError(f"{key}: kvflow {verb} takes {what} (kvflow {verb} --help says more).")
        if not (equals and value):
            raise ConfigError(f"{key}: give it {known[key]}, as in {key}=...")
        if key in found:
            raise ConfigError(f"{key}: was given twice.")
        found[key] = value
    return found
