"""Refuse a policy's values before anything starts.

Configuration reaches the constructors untyped, so types are checked too.
"""

import math

from kvflow.errors import ConfigError


def number(key: str, value: object, *, low: float = 0.0, high: float = math.inf) -> None:
    """Demand a finite number from `low` to `high`, both included."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{key} must be a number, got {value!r}")
    if not low <= value <= high:
        limits = f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise ConfigError(f"{key} must be {limits}, got {value!r}")


def whole(key: str, value: object, *, low: int = 0) -> None:
    """Demand a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key} must be a whole number, got {value!r}")
    number(key, value, low=low)


def flag(key: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, got {value!r}")


def kind(key: str, value: object, wanted: type) -> None:
    """Demand an object of a class, or with the methods of a runtime-checkable protocol."""
    if isinstance(value, type) or not isinstance(value, wanted):
        raise ConfigError(f"{key} must be a {wanted.__name__}, got {type(value).__name__}")
