"""What to do with each turn: which path, which nodes, and what to keep. Pure functions over `Turn` and `View`."""

from kvflow.policies.adaptive import Adaptive
from kvflow.policies.explain import Explanation
from kvflow.policies.forecast import Forecast, forecast
from kvflow.policies.guard import Decision, decide, explained, fault
from kvflow.policies.policy import Policy
from kvflow.policies.retention import Fixed, Keep, Retention
from kvflow.policies.reuse import Choice, Option, Reuse, Threshold
from kvflow.policies.routing import (
    Best,
    FewestFailures,
    Filter,
    HoldsConversation,
    HoldsPrefix,
    LeastLoaded,
    LeastPinned,
    LeastWorked,
    NotFailing,
    Picker,
    Ready,
    Route,
    Routing,
    Scorer,
    Soonest,
    Weighted,
)

__all__ = [
    "Adaptive",
    "Best",
    "Choice",
    "Decision",
    "Explanation",
    "FewestFailures",
    "Filter",
    "Fixed",
    "Forecast",
    "HoldsConversation",
    "HoldsPrefix",
    "Keep",
    "LeastLoaded",
    "LeastPinned",
    "LeastWorked",
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
    "Soonest",
    "Threshold",
    "Weighted",
    "decide",
    "explained",
    "fault",
    "forecast",
]
