"""What a leg of a plan is expected to compute on its node, for the queue that others are told of."""

from dataclasses import dataclass

from kvflow.types import Path, Plan, Turn, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    tokens: int
    """Of the prompt: on prefill nodes those to be computed, on decode nodes all."""
    seconds: float = 0.0
    """That the node is taken up by them."""


def prefill_work(view: View, plan: Plan, turn: Turn) -> Work:
    """`turn.new_tokens` counts only where the plan pulls."""
    node = view.node(plan.prefill or "")
    if node is None:
        return Work(tokens=turn.prompt_tokens)
    if plan.path is Path.PULL:
        held = max(0, turn.prompt_tokens - turn.new_tokens)
        moving = view.transfer(turn.handle.node, node.name).seconds(held) if turn.handle else 0.0
    else:
        held, moving = min(turn.prompt_tokens, turn.cached.get(node.name, 0)), 0.0
    new = max(1, turn.prompt_tokens - held)
    return Work(tokens=new, seconds=moving + node.compute.seconds(new, held))


def decode_work(view: View, plan: Plan, turn: Turn) -> Work:
    """A decode node that reads what a prefill node computed has next to nothing to compute."""
    node = view.node(plan.decode)
    if node is None or plan.path is not Path.DIRECT:
        return Work(tokens=turn.prompt_tokens)
    held = max(0, turn.prompt_tokens - turn.new_tokens) if turn.handle else 0
    return Work(tokens=turn.prompt_tokens, seconds=node.compute.seconds(max(1, turn.prompt_tokens - held), held))
