"""Plays a skewed mix of conversations against the model, on a simulated clock."""

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.routing.model import (
    BLOCK,
    COMPUTE,
    DECODE_BLOCKS,
    MAX_TOKENS,
    SLOW_AT,
    TOKEN_S,
    TRANSFER,
    Conversation,
    Node,
    conversations,
    view,
    zipf,
)
from kvflow.policies import Policy
from kvflow.router.find import Prefix
from kvflow.router.prefixes import Prefixes
from kvflow.types import Handle, Path, Plan, Role, Turn, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    prefill: int = 4
    decode: int = 8
    load: int = 32
    """Turns under way at a time."""
    turns: int = 4000
    conversations: int = 300
    groups: int = 12
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Result:
    nodes: dict[str, Node]
    held: int = 0
    """Turns whose conversation was held by a decode node."""
    together: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    computed_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)

    def imbalance(self, role: Role) -> float:
        """Max / mean load."""
        loads = [n.load_s for n in self.nodes.values() if n.role is role]
        return max(loads) / (sum(loads) / len(loads)) if any(loads) else 1.0

    def quantile(self, q: float) -> float:
        return sorted(self.ttft_s)[min(len(self.ttft_s) - 1, int(q * len(self.ttft_s)))]

    def to_json(self) -> dict[str, float]:
        return {
            "prefill": self.imbalance(Role.PREFILL),
            "decode": self.imbalance(Role.DECODE),
            "together": self.together / max(1, self.held),
            "prefix_hits": self.prefix_tokens / self.prompt_tokens,
            "reused": 1 - self.computed_tokens / self.prompt_tokens,
            "ttft_p50_s": self.quantile(0.5),
            "ttft_p99_s": self.quantile(0.99),
        }


def play(policy: Policy, mix: Mix) -> Result:
    return _Play(policy, mix).run()


class _Play:
    def __init__(self, policy: Policy, mix: Mix) -> None:
        names = [(f"prefill-{i}", Role.PREFILL) for i in range(mix.prefill)]
        names += [(f"decode-{i}", Role.DECODE) for i in range(mix.decode)]
        self._nodes = {name: Node(name, role) for name, role in names}
        self._policy = policy
        self._mix = mix
        self._rng = random.Random(mix.seed)
        self._conversations = conversations(self._rng, mix.conversations, mix.groups)
        self._weights = zipf(mix.conversations)
        self._prefixes = Prefixes()
        self._result = Result(nodes=self._nodes)
        self._now = 0.0
        self._left = mix.turns

    def run(self) -> Result:
        # Who waits until when; the number keeps equals in order.
        waiting = [(0.01 * i, i, self._user()) for i in range(self._mix.load)]
        while waiting:
            self._now, i, user = heapq.heappop(waiting)
            until = next(user, None)
            if until is not None:
                heapq.heappush(waiting, (until, i, user))
        return self._result

    def _user(self) -> Iterator[float]:
        """Yields the times until which it waits."""
        while self._left > 0:
            self._left -= 1
            conversation = self._draw()
            conversation.busy = True
            yield from self._turn(conversation)
            conversation.busy = False

    def _draw(self) -> Conversation:
        while True:
            conversation = self._rng.choices(self._conversations, self._weights)[0]
            if not conversation.busy:
                return conversation

    def _turn(self, c: Conversation) -> Iterator[float]:
        if c.tokens() > MAX_TOKENS:
            self._give_back(c)
            c.restart()
        arrived, new = self._now, round(self._rng.lognormvariate(5.5, 0.8))
        answer = max(8, round(self._rng.lognormvariate(4.6, 0.7)))
        c.ends.append(c.tokens() + new)
        world = view(self._now, self._nodes)
        turn = self._described(c, new, world)
        plan = self._policy.plan(turn, world)
        self._count(turn, plan)
        computing = 0.0
        if plan.prefill is not None:
            yield from self._prefill(self._nodes[plan.prefill], c, turn, plan)
            computing = TRANSFER.seconds(turn.prompt_tokens)
        else:
            self._result.computed_tokens += new
            computing = COMPUTE.seconds(new)
        self._give_back(c)
        self._result.ttft_s.append(self._now + computing - arrived)
        yield from self._decode(self._nodes[plan.decode], c, turn, answer, computing)
        c.ends.append(c.tokens() + answer)
        self._keep(c, plan)

    def _described(self, c: Conversation, new: int, world: View) -> Turn:
        found = self._prefixes.find(_prefixes(c), world.prefill)
        return Turn(
            tenant="t",
            model="m",
            prompt_tokens=c.tokens(),
            handle=c.handle,
            new_tokens=new if c.handle else c.tokens(),
            cached=dict(found),
        )

    def _count(self, turn: Turn, plan: Plan) -> None:
        self._result.prompt_tokens += turn.prompt_tokens
        if turn.handle is not None:
            self._result.held += 1
            self._result.together += turn.handle.node == plan.decode

    def _prefill(self, node: Node, c: Conversation, turn: Turn, plan: Plan) -> Iterator[float]:
        had = min(node.cached(c.names()), turn.prompt_tokens)
        pulled = 0
        if plan.path is Path.PULL and turn.handle is not None:
            pulled = turn.handle.tokens - had
            pulled = pulled if pulled >= max(1, plan.min_pull_tokens) else 0
        computed = turn.prompt_tokens - had - pulled
        seconds = TRANSFER.seconds(pulled) + COMPUTE.seconds(computed)
        node.begin(turn.prompt_tokens)
        node.free_at = max(self._now, node.free_at) + seconds
        node.work(seconds, self._now)
        self._result.prefix_tokens += had
        self._result.computed_tokens += computed
        yield node.free_at
        node.end(turn.prompt_tokens)
        node.fill(c.names())
        self._prefixes.computed(_prefixes(c), node.state())

    def _decode(self, node: Node, c: Conversation, turn: Turn, answer: int, before: float) -> Iterator[float]:
        node.begin(c.tokens())
        seconds = before + answer * TOKEN_S * (1 + node.in_flight / SLOW_AT)
        node.load_s += seconds
        yield self._now + seconds
        node.worked = node.worked.plus(seconds, self._now)
        node.end(turn.prompt_tokens)

    def _keep(self, c: Conversation, plan: Plan) -> None:
        node, blocks = self._nodes[plan.decode], -(-c.tokens() // BLOCK)
        if plan.retain_s <= 0 or node.pinned + blocks > plan.max_pinned_share * DECODE_BLOCKS:
            return
        node.pinned += blocks
        c.handle = Handle(
            node=node.name,
            epoch="e",
            tokens=c.tokens() - 1,
            deadline=self._now + plan.retain_s,
            pin="p",
            blocks=blocks,
            kept_at=self._now,
            params={},
            size=0,
        )

    def _give_back(self, c: Conversation) -> None:
        if c.handle is not None:
            self._nodes[c.handle.node].pinned -= c.handle.blocks
            c.handle = None


def _prefixes(c: Conversation) -> list[Prefix]:
    return [Prefix(name.encode(), tokens, kept=True) for name, tokens in c.names()]
