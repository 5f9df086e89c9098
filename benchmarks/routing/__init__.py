"""How evenly routing spreads turns over many nodes, and how much it keeps together.

    python -m benchmarks.routing
    python -m benchmarks.routing --policy balanced --load 32,96 --json out.json

A model of the pools, without HTTP and engines, on a simulated clock: the policies, and the router's memory of prefixes,
are the real ones. The same seed always gives the same figures. A prefill node computes one prompt after the other and
has a prefix cache; a decode node answers many at a time, more slowly the more they are, and keeps conversations as the
plan says. Conversations are drawn by Zipf's law, and groups of them begin with the same system prompt.

**Load** of a prefill node is the seconds that it computes or pulls; of a decode node, the sum over its legs of their
seconds. Max / mean is over the nodes of the role. **Kept together**: of turns whose conversation is held, the share
that its node answers. **Prefix hits**: of all prompt tokens, those that the prefill node had cached. **Reused**: those
that nobody computed again.
"""
