"""Errors of Hydra and OmegaConf, said in one sentence that names the key and what it takes."""

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import Mark, MarkedYAMLError, YAMLError  # type: ignore[import-untyped]

from kvflow.config import engine_args
from kvflow.errors import ConfigError


@contextmanager
def refusing() -> Iterator[None]:
    """Raise `ConfigError` for whatever Hydra and OmegaConf raise. Some of Hydra's refusals are bare ValueErrors."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as e:
        raise ConfigError(sentence(e)) from e
    except RecursionError:
        raise ConfigError("an option contains itself; what its defaults name must have another name.") from None
    except OSError as e:
        raise ConfigError(
            f"{e.filename or 'a file'}: cannot be read: {(e.strerror or type(e).__name__).lower()}."
        ) from None


def sentence(error: Exception) -> str:
    match error:
        case MissingConfigException():
            return _missing_config(error)
        case OverrideParseException():
            return f"{error.override}: not an override; write key=value or group=option."
        case ConfigKeyError() | ConfigAttributeError():
            return _unknown_key(error)
        case MarkedYAMLError(problem=str(problem), problem_mark=Mark() as mark):
            return f"{mark.name}, line {mark.line + 1}: this is no YAML: {problem}."
        case MissingMandatoryValue():
            return _missing_value(error)
        case InterpolationResolutionError():
            return f"{error.full_key}: {_first_line(error)}."
        case ValidationError() if "not a subclass of TenantConfig" in str(error):
            return _no_tenant(error.full_key or "")
        case ValidationError():
            return f"{error.full_key}: {_wrong_value(_first_line(error))}."
    if isinstance(error.__cause__, OmegaConfBaseException):
        return sentence(error.__cause__)
    return _reworded(re.sub(r"\s*\n\s*", " ", str(error)).strip()) or type(error).__name__


def _missing_config(error: MissingConfigException) -> str:
    missing = error.missing_cfg_file or "?"
    if error.options is None:
        return f"{missing}: there is no such configuration."
    group, _, option = missing.rpartition("/")
    known = ", ".join(error.options)
    return f"{group}={option}: no such option; {group} is one of {known}.{_guess(option, error.options)}"


def _unknown_key(error: ConfigKeyError | ConfigAttributeError) -> str:
    parent, _, key = (error.full_key or str(error.key)).rpartition(".")
    node = error.parent_node
    known = [str(k) for k in node if k not in ("hydra", "_target_")] if isinstance(node, DictConfig) else []
    if parent and _is_open(parent):
        return _addable(parent, key)
    if parent == "tenants":
        return _no_tenant(key)
    if re.fullmatch(r"tenants\.[^.]+\.policy", parent) and not known:
        return f"{error.full_key}: the tenant has the server's own policy so far; write +policy@{parent}=... first."
    takes = f"{parent or 'the configuration'} has {', '.join(known) or 'no keys'}"
    return f"{error.full_key}: no such key; {takes}.{_guess(key, known)}"


def _is_open(key: str) -> bool:
    """Whether a key takes entries that no schema knows."""
    return key.rpartition(".")[2] in ("engine_args", "env")


def _addable(parent: str, key: str) -> str:
    why_not = engine_args.problem(parent, key) if parent.endswith("engine_args") else None
    return why_not or f"{parent}.{key}: not set so far; to add it, write +{parent}.{key}=..."


def _no_tenant(name: str) -> str:
    add = f"add it in a file of the group tenants, or with +policy@tenants.{name}.policy=balanced"
    return f"tenants.{name}: there is no such tenant so far; {add}."


def _missing_value(error: MissingMandatoryValue) -> str:
    key = error.full_key or ""
    return f"{key}: a value is missing."


def _wrong_value(message: str) -> str:
    """OmegaConf's complaints without the names of its types."""
    rules = (
        (r"Value '(.*)' of type '\w+' could not be converted to Integer", r"'\1' is not a whole number"),
        (r"Value '(.*)' of type '\w+' could not be converted to Float", r"'\1' is not a number"),
        (r"Value '(.*)' is not a valid bool \(type \w+\)", r"'\1' is neither true nor false"),
        (r"Invalid value '(.*)', expected one of \[(.*)\]", r"'\1' is not one of \2"),
        (r"Invalid type assigned: \w+ is not a subclass of \w+\. value: (.*)", r"has keys of its own, and \1 is none"),
        (r"Invalid value assigned: \w+ is not a ListConfig, list or tuple", "takes a list, as in [a,b]"),
        (r"field '.*' is not Optional", "takes no null"),
    )
    return _by_rule(message, rules)


def _reworded(message: str) -> str:
    """Hydra's complaints about an override, without the words of its insides."""
    rules = (
        (
            # Only groups, and keys that take neither lists nor texts, have no dot in their names.
            r"Ambiguous value for argument '(\w+@[^=]*|[^=.]*)=(.*?)' 1\. .*",
            r"\1: one option, please, not \2; kvflow takes one configuration at a time and cannot sweep over several.",
        ),
        (
            r"Ambiguous value for argument '([^=]*)=(.*?)' 1\. .*",
            r"""\1: one value, please, not \2; a list is written \1=[\2], a text with commas '\1="\2"'.""",
        ),
        (
            r"Multiple values for (\S*)\. .* '(?:override )?([^:]*): (.*)'",
            r"\1 has a choice already; write \2=\3.",
        ),
        (r"Could not override '(\w+@.*?)'\. .*", r"\1: no option is chosen there so far; write +\1=..."),
        (r"Could not override '(.*?)'\. .*", r"\1: there is no such group."),
        (
            r"Could not append to config\. An item is already at '(.*?)'\. .*",
            r"\1 has a value; write it without +.",
        ),
        (r"Additional config directory '(.*)' not found", r"--config-dir: there is no directory \1."),
        (
            r"In '.*': ConfigKeyError raised while composing config: .* full_key: (\S+) reference_type=TenantConfig .*",
            r"\1: no such key of a tenant; its policy goes to tenants.<name>.policy.",
        ),
        (r"Could not delete from config\. '(.*)' does not exist\.", r"\1: no such key."),
        (
            r"Config group override must be a string or a list\. Got (\w+)",
            r"A group takes the name of an option.",
        ),
        (r"\w+ \(DictConfig\) does not support deletion full_key: (\S+) .*", r"\1: this key cannot be taken out."),
    )
    return _by_rule(message, rules)


def _by_rule(message: str, rules: tuple[tuple[str, str], ...]) -> str:
    """`message`, rewritten by the first rule whose pattern is all of it."""
    for pattern, words in rules:
        if re.fullmatch(pattern, message):
            return re.sub(pattern, words, message)
    return message


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _guess(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {close[0]}?" if close else ""
