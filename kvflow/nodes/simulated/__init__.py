"""Engines that are not there: vLLM with kvflow's connector as it is seen over HTTP, in one process, without a model.

The hard parts are real: KV lies in a bounded pool of blocks, answers depend on every KV value that is read, turns are
pinned until they are read once or their time is up, and the connector's decisions are made by the connector's own code.
"""

from kvflow.nodes.simulated.app import App, Received
from kvflow.nodes.simulated.clock import Clock, ManualClock, RealClock
from kvflow.nodes.simulated.engine import Engine, Occupancy
from kvflow.nodes.simulated.fabric import Fabric
from kvflow.nodes.simulated.faults import Faults
from kvflow.nodes.simulated.node import SimulatedNode
from kvflow.nodes.simulated.settings import Settings, Speed

__all__ = [
    "App",
    "Clock",
    "Engine",
    "Fabric",
    "Faults",
    "ManualClock",
    "Occupancy",
    "RealClock",
    "Received",
    "Settings",
    "SimulatedNode",
    "Speed",
]
