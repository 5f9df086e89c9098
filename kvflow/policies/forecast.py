"""When the first token of a turn would come, for each way in which it could be served, and what that costs others.

It stands on the estimates of the view. A transfer that nobody has measured is taken to cost what it costs between the
same two nodes the other way; an estimate that is no finite number from 0 on counts as the guess.
"""

from dataclasses import asdict, dataclass
from math import inf

from kvflow.policies.handles import found
from kvflow.policies.reuse import Option
from kvflow.types import COMPUTE_GUESS, OVERHEAD_GUESS, TRANSFER_GUESS, Cost, NodeState, Turn, View

LONGEST_WAIT_S = 1e6
"""No wait is thought to be longer, so that sums stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds, predicted. The parts do not overlap; together they are `first_token_s`."""

    wait_s: float = 0.0
    """Until the nodes have computed the prompts before this one."""
    overhead_s: float = 0.0
    """HTTP, templates and tokenising, on each node that has a leg."""
    pull_s: float = 0.0
    """From the decode node that keeps the conversation to the prefill node."""
    compute_s: float = 0.0
    """Of the prompt, and of the step that makes the first token."""
    transfer_s: float = 0.0
    """From the prefill node to the decode node."""
    disturbs_s: float = 0.0
    """By which the answers under way on the decode node are delayed, summed over them; no part of `first_token_s`."""

    @property
    def first_token_s(self) -> float:
        return self.wait_s + self.overhead_s + self.pull_s + self.compute_s + self.transfer_s

    def to_json(self) -> dict[str, float]:
        return {"first_token_s": self.first_token_s, **asdict(self)}


def forecast(option: Option, turn: Turn, view: View) -> Forecast:
    """What `option` is predicted to take for `turn`. Every number is finite and at least 0."""
    if option.prefill is None:
        return _direct(option, turn, view)
    return _split(option, option.prefill, turn, view)


def transfer_of(source: str, target: str, view: View) -> Cost:
    """Of moving KV from one node to another."""
    there = view.transfer(source, target)
    if there.samples:
        return there
    back = view.transfer(target, source)
    return back if back.samples else there


def wait_s(node: NodeState, view: View) -> float:
    return min(view.wait_s(node), LONGEST_WAIT_S)


def overhead_s(node: NodeState, turn: Turn) -> float:
    return _seconds(node.overhead, OVERHEAD_GUESS, turn.prompt_tokens)


def compute_s(node: NodeState, tokens: int, turn: Turn) -> float:
    """Of the last `tokens` of the prompt; at least one has to be computed to know what follows it."""
    tokens = max(1, tokens)
    return _seconds(node.compute, COMPUTE_GUESS, tokens, max(0, turn.prompt_tokens - tokens))


def transfer_s(source: str, target: str, tokens: int, view: View) -> float:
    return _seconds(transfer_of(source, target, view), TRANSFER_GUESS, tokens)


def _direct(option: Option, turn: Turn, view: View) -> Forecast:
    node = option.decode
    computing = compute_s(node, option.computed_tokens, turn)
    return Forecast(
        wait_s=wait_s(node, view),
        overhead_s=overhead_s(node, turn),
        compute_s=computing,
        # A step that computes a prompt also makes the next token of every answer under way, which waits for its end.
        disturbs_s=max(0, node.in_flight) * computing,
    )


def _split(option: Option, prefill: NodeState, turn: Turn, view: View) -> Forecast:
    decode, handle = option.decode, turn.handle
    wait = wait_s(prefill, view)
    overhead = overhead_s(prefill, turn) + overhead_s(decode, turn)
    pull = transfer_s(handle.node, prefill.name, option.pulled_tokens, view) if handle else 0.0
    compute = compute_s(prefill, option.computed_tokens, turn)
    # The decode node asks for what its own prefix cache lacks.
    moved = turn.prompt_tokens - found(decode, turn, view)
    transfer = transfer_s(prefill.name, decode.name, moved, view)
    # Meanwhile the decode node gets on with the prompts that it is computing itself.
    rest = max(0.0, wait_s(decode, view) - (wait + overhead + pull + compute + transfer))
    return Forecast(
        wait_s=wait + rest,
        overhead_s=overhead,
        pull_s=pull,
        compute_s=compute + compute_s(decode, 1, turn),
        transfer_s=transfer,
    )


def _seconds(cost: Cost, guess: Cost, tokens: int, context: int = 0) -> float:
    seconds = cost.seconds(tokens, context)
    return seconds if 0.0 <= seconds < inf else guess.seconds(tokens, context)
