"""Where a turn runs: filters → weighted scorers → picker, for each role."""

from kvflow.policies.routing.base import Filter, Picker, Scorer
from kvflow.policies.routing.filters import NotFailing, Ready
from kvflow.policies.routing.pickers import Best
from kvflow.policies.routing.route import Rated, Route, Routing, Weighted
from kvflow.policies.routing.scorers import (
    FewestFailures,
    HoldsConversation,
    HoldsPrefix,
    LeastLoaded,
    LeastPinned,
    LeastWorked,
)
from kvflow.policies.routing.soonest import Soonest

__all__ = [
    "Best",
    "FewestFailures",
    "Filter",
    "HoldsConversation",
    "HoldsPrefix",
    "LeastLoaded",
    "LeastPinned",
    "LeastWorked",
    "NotFailing",
    "Picker",
    "Rated",
    "Ready",
    "Route",
    "Routing",
    "Scorer",
    "Soonest",
    "Weighted",
]
