"""The policies that tenants can be given, by name, and those that are not fit for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvflow.policies.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    policies: Mapping[str, Policy]
    broken: Mapping[str, str] = field(default_factory=dict)
    """Why each of the others cannot be had, in one sentence."""
