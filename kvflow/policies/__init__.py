"""What to do with each turn: which path, which nodes, and what to keep. Pure functions over `Turn` and `View`."""

from kvflow.policies.policy import Policy
from kvflow.policies.retention import Fixed, Keep, Retention
from kvflow.policies.reuse import Choice, Option, Reuse, Threshold
from kvflow.policies.routing import (
    Best,
    Filter,
    HoldsConversation,
    LeastLoaded,
    LeastPinned,
    NotFailing,
    Picker,
    Ready,
    Route,
    Routing,
    Scorer,
    Weighted,
)

__all__ = [
    "Best",
    "Choice",
    "Filter",
    "Fixed",
    "HoldsConversation",
    "Keep",
    "LeastLoaded",
    "LeastPinned",
    "NotFailing",
    "Option",
    "Picker",
    "Policy",
    "Ready",
    "Retention",
    "Reuse",
    "Route",
    "Routing",
    "Scorer",
    "Threshold",
    "Weighted",
]
