"""Where a turn runs: filters → weighted scorers → picker, for each role."""

from kvflow.policies.routing.base import Filter, Picker, Scorer
from kvflow.policies.routing.filters import NotFailing, Ready
from kvflow.policies.routing.pickers import Best
from kvflow.policies.routing.route import Route, Routing, Weighted
from kvflow.policies.routing.scorers import HoldsConversation, LeastLoaded, LeastPinned

__all__ = [
    "Best",
    "Filter",
    "HoldsConversation",
    "LeastLoaded",
    "LeastPinned",
    "NotFailing",
    "Picker",
    "Ready",
    "Route",
    "Routing",
    "Scorer",
    "Weighted",
]
