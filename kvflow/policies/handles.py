"""What a handle is good for at the moment of planning."""

from kvflow.types import Handle, NodeState, Reason, Turn, View


def obstacle(handle: Handle, view: View) -> Reason | None:
    """Why nobody could pull through `handle`, whatever the policy."""
    node = next((n for n in view.decode if n.name == handle.node), None)
    if node is None or not node.ready or node.epoch != handle.epoch:
        return Reason.NODE_GONE
    if view.now >= handle.deadline:
        return Reason.EXPIRED
    return None if node.bidirectional else Reason.ONE_WAY


def holds(node: NodeState, turn: Turn) -> bool:
    """Whether `node` is the decode node, in the same life, that keeps the turn's conversation."""
    return turn.handle is not None and (node.name, node.epoch) == (turn.handle.node, turn.handle.epoch)


def found(node: NodeState, turn: Turn, view: View) -> int:
    """Tokens of the prompt that `node`, a decode node, finds in its own prefix cache because it keeps them.

    Whole blocks only, where a handle may end inside one.
    """
    handle = turn.handle
    if handle is None or not holds(node, turn) or not node.prefix_caching or view.now >= handle.deadline:
        return 0
    tokens = max(0, min(handle.tokens, turn.prompt_tokens - turn.new_tokens))
    return tokens - tokens % node.block_size if node.block_size > 0 else tokens
