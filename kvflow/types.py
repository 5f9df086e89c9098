"""The values that the parts of kvflow exchange. Everything here is immutable and imports nothing of ours."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Path(StrEnum):
    """How a turn is served."""

    COLD = "cold"
    """A prefill node computes the prompt, a decode node pulls its KV and answers."""
    PULL = "pull"
    """As `COLD`, but the prefill node first pulls what the decode node still holds of the conversation."""
    DIRECT = "direct"
    """One decode node does everything."""


class Reason(StrEnum):
    """Why a turn reused no more than it did: the value of the response header `x-kvflow-reason`."""

    NO_HANDLE = "no-handle"
    """Nothing is kept for this conversation: its first turn, or the handle is in use by another turn."""
    BELOW_THRESHOLD = "below-threshold"
    """Less could be pulled than the policy wants to pull."""
    DIVERGED = "diverged"
    """The prompt is not, or not all the way, what the decode node holds."""
    LOCAL_CACHE = "local-cache"
    """The prefill node's own prefix cache already had it."""
    EXPIRED = "expired"
    """The handle's time was up."""
    NODE_GONE = "node-gone"
    """The engine that held the KV has gone or restarted."""
    TRANSFER_FAILED = "transfer-failed"
    """The pull was tried and broke; the prefill node computed the tokens instead."""
    RETRIED = "retried"
    """A node failed under the turn, which was then served from the start without the handle."""
    POLICY = "policy"
    """The policy does not reuse."""
    UNSPLITTABLE = "unsplittable"
    """The request cannot be served by two nodes (several choices, prompt log-probabilities, ...)."""
    ONE_WAY = "one-way"
    """An engine without kvflow's connector takes part: nothing can be pulled back from or to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """How many seconds something takes with a number of tokens."""

    fixed_s: float
    """Of each, however short."""
    token_s: float
    """For each token."""
    pair_s: float = 0.0
    """For each pair of a token and one that it attends to; 0 where nothing is computed."""
    samples: int = 0
    """Measurements that it stands on; 0 is a guess."""

    def seconds(self, tokens: int, context: int = 0) -> float:
        """Of `tokens` that come after `context` others; of none, nothing."""
        if tokens <= 0:
            return 0.0
        return self.fixed_s + tokens * (self.token_s + self.pair_s * (context + tokens / 2))


COMPUTE_GUESS = Cost(fixed_s=0.0, token_s=200e-6)
TRANSFER_GUESS = Cost(fixed_s=12.5e-3, token_s=5e-6)
"""Before anything is measured. With these two a transfer pays from 64 tokens on, the published feature's threshold."""
OVERHEAD_GUESS = Cost(fixed_s=2e-3, token_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Occupancy of one engine's KV block pool, in blocks."""

    free: int
    pinned: int
    total: int
    reserve: int = 0
    """What one request of the full length needs; kept turns never take it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """Where a decode node keeps the KV of a conversation's last turn.

    `params` is the engine's own `kv_transfer_params`, forwarded untouched; it stays inside kvflow. `deadline` is on the
    router's monotonic clock, in seconds.
    """

    node: str
    epoch: str
    tokens: int
    deadline: float
    pin: str
    """The engine's name for what it keeps: releasing it frees the blocks."""
    blocks: int
    """Blocks that the engine keeps for it."""
    kept_at: float
    """When the turn ended, on the clock of `deadline`."""
    params: Mapping[str, Any] = field(repr=False)
    size: int
    """Bytes that keeping this handle costs the router, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a policy may know about a request."""

    tenant: str
    model: str
    prompt_tokens: int
    """Estimated from the length of the text; the router does not tokenise."""
    splittable: bool = True
    """False: the request can only be answered by one node on its own."""
    handle: Handle | None = None
    new_tokens: int = 0
    """Of the prompt, those that come after what `handle` covers; estimated like `prompt_tokens`."""
    bound_to: str | None = None
    """The decode node that alone can answer, because it holds a response that the request refers to."""
    max_retain_s: float | None = None
    """The client's own limit on `Plan.retain_s`; None where it set none."""
    cached: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the prompt's beginning that prefill nodes are believed to have in their prefix caches, by node."""


@dataclass(frozen=True, slots=True)
class Worked:
    """Seconds of work, as of a moment, each counting for half as much a minute later."""

    seconds: float = 0.0
    moment: float = 0.0
    """On the clock of `View.now`."""

    HALF_LIFE_S: ClassVar[float] = 60.0

    def now(self, now: float) -> float:
        """What is left of it."""
        return self.seconds * 0.5 ** (max(0.0, now - self.moment) / self.HALF_LIFE_S) if self.seconds else 0.0

    def plus(self, seconds: float, now: float) -> "Worked":
        return Worked(self.now(now) + seconds, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """What the router knows about a node at one moment."""

    name: str
    role: Role
    ready: bool = True
    bidirectional: bool = True
    """Runs kvflow's connector; False for a stock engine, which is served one-way."""
    epoch: str = ""
    in_flight: int = 0
    """Legs that this router has under way on the node."""
    queued_tokens: int = 0
    """Estimated prompt tokens of those legs."""
    failures: int = 0
    """Legs that failed in a row."""
    blocks: Blocks | None = None
    """As last reported by the engine; None before the first report."""
    block_size: int = 0
    """Tokens in a block; 0 before the engine has said so."""
    prefix_caching: bool = True
    """The engine finds what it has computed or kept, on its own."""
    recent_failures: float = 0.0
    """Legs that failed, each counting for less the longer ago it was."""
    worked: Worked = Worked()
    """Of late: of prefill nodes what their prompts were expected to take, of decode nodes how long legs were."""
    compute: Cost = COMPUTE_GUESS
    """Of prompt tokens on this node, as measured."""
    overhead: Cost = OVERHEAD_GUESS
    """Of all else that a leg does before its first token, by tokens of the prompt: HTTP, templates, tokenising."""
    free_at: float = 0.0
    """When the prompts under way on the node will have been computed, on the clock of `View.now`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The world as a policy sees it when it plans one turn. `now` is on the clock of `Handle.deadline`."""

    now: float
    prefill: tuple[NodeState, ...]
    decode: tuple[NodeState, ...]
    transfers: Mapping[tuple[str, str], Cost] = field(default_factory=dict)
    """What moving KV costs, as measured, by the names of the nodes that it leaves and reaches."""

    def transfer(self, source: str, target: str) -> Cost:
        return self.transfers.get((source, target), TRANSFER_GUESS)

    def wait_s(self, node: NodeState) -> float:
        """Seconds until `node` could begin with one more prompt."""
        return max(0.0, node.free_at - self.now)

    def node(self, name: str) -> NodeState | None:
        return next((n for n in (*self.prefill, *self.decode) if n.name == name), None)

    def without(self, name: str) -> "View":
        """All but the node of that name, unless that empties its pool."""

        def rest(nodes: tuple[NodeState, ...]) -> tuple[NodeState, ...]:
            return tuple(n for n in nodes if n.name != name) or nodes

        return replace(self, prefill=rest(self.prefill), decode=rest(self.decode))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a policy decided for one turn. Complete: no other code asks which policy made it."""

    path: Path
    decode: str
    prefill: str | None = None
    """None on `Path.DIRECT`."""
    min_pull_tokens: int = 0
    """Pull only if at least so many tokens are verified and not in the prefill node's own cache."""
    retain_s: float = 0.0
    """Seconds the decode node keeps the KV after the turn; 0 keeps nothing."""
    max_pinned_share: float = 0.0
    """Share of the decode node's block pool, 0 to 1, beyond which the turn is not kept."""
    reason: Reason | None = None
    """Why the path is not `PULL`; None on `PULL`."""
