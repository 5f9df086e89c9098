"""Turns and views as they come up in a router's life, ordinary and not: what the conformance suite plays."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from kvflow.types import Blocks, Cost, Handle, NodeState, Role, Turn, View

RANDOM_CASES = 200
_NOW = 1000.0


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    """As the end of a sentence: "with no prefill node"."""
    turn: Turn
    view: View


def cases(seed: int = 0) -> Iterator[Case]:
    """The same for the same seed."""
    yield from _ordinary()
    yield from _nodes()
    yield from _extremes()
    random = Random(seed)
    for i in range(RANDOM_CASES):
        yield Case(f"in random case {i} of seed {seed}", _random_turn(random), _random_view(random))


def _ordinary() -> Iterator[Case]:
    view = _view(_prefill(0), _prefill(1), _decode(0), _decode(1))
    for name, turn in (
        ("on a first turn", _turn()),
        ("on a turn with a handle", _turn(handle=_handle())),
        ("on a turn that is almost all new", _turn(handle=_handle(tokens=20), new_tokens=1980)),
        ("on a turn with one new token", _turn(handle=_handle(tokens=1999), new_tokens=1)),
        ("on a turn that is cached", _turn(handle=_handle(), cached={"prefill-0": 1900, "prefill-1": 16})),
        ("with more cached than the prompt has", _turn(cached={"prefill-0": 10_000, "gone": 5})),
        ("on a turn for one node alone", _turn(splittable=False, handle=_handle())),
        ("on a turn that is bound", _turn(bound_to="decode-1", handle=_handle())),
        ("on a turn that is bound to a node that is gone", _turn(bound_to="decode-9")),
        ("where the client allows no keeping", _turn(handle=_handle(), max_retain_s=0.0)),
        ("where the client allows a second", _turn(max_retain_s=1.0)),
        ("where the client allows a year", _turn(max_retain_s=3e7)),
        ("with an expired handle", _turn(handle=_handle(deadline=_NOW))),
        ("with a handle of a restarted engine", _turn(handle=_handle(epoch="before"))),
        ("with a handle of a node that is gone", _turn(handle=_handle(node="decode-9"))),
        ("with an empty prompt", _turn(prompt_tokens=0)),
    ):
        yield Case(name, turn, view)


def _nodes() -> Iterator[Case]:
    ready = (_prefill(0), _prefill(1), _decode(0), _decode(1))
    held = _turn(handle=_handle())
    stock = {"bidirectional": False}
    for name, view in (
        ("with no node", _view()),
        ("with no prefill node", _view(_decode(0), _decode(1))),
        ("with no decode node", _view(_prefill(0))),
        ("with one node of each role", _view(_prefill(0), _decode(0))),
        ("with all nodes down", _view(*(replace(n, ready=False) for n in ready))),
        ("with the prefill nodes down", _view(_prefill(0, ready=False), _decode(0), _decode(1))),
        ("with the decode nodes down", _view(_prefill(0), _decode(0, ready=False), _decode(1, ready=False))),
        ("with the holder down", _view(_prefill(0), _decode(0, ready=False), _decode(1))),
        ("with one node of each role down", _view(_prefill(0, ready=False), *ready[1:3], _decode(1, ready=False))),
        ("with stock engines", _view(*(replace(n, bidirectional=False, epoch="") for n in ready))),
        ("with stock prefill nodes", _view(_prefill(0, **stock), _prefill(1, **stock), *ready[2:])),
        ("with a stock prefill node beside another", _view(_prefill(0, **stock), *ready[1:])),
        ("with a stock holder", _view(*ready[:2], _decode(0, **stock), _decode(1))),
        ("with a stock decode node beside the holder", _view(*ready[:3], _decode(1, **stock))),
        ("without prefix caches", _view(*(replace(n, prefix_caching=False) for n in ready))),
        ("with an overloaded holder", _view(*ready[:2], _decode(0, in_flight=500, queued_tokens=10**6), _decode(1))),
        ("with nodes that fail", _view(*(replace(n, failures=9, recent_failures=8.5) for n in ready))),
        ("with a holder that fails", _view(*ready[:2], _decode(0, failures=9, recent_failures=9.0), _decode(1))),
        ("with full decode nodes", _view(*ready[:2], *(replace(n, blocks=_full()) for n in ready[2:]))),
    ):
        for turn in (held, _turn(), _turn(splittable=False), _turn(bound_to="decode-0", handle=_handle())):
            yield Case(name, turn, view)


def _extremes() -> Iterator[Case]:
    """Estimates that are numbers, and nothing else can be said for them."""
    for name, cost in (
        ("where everything is free", Cost(fixed_s=0.0, token_s=0.0, samples=9)),
        ("where everything takes next to nothing", Cost(fixed_s=1e-300, token_s=1e-300, pair_s=1e-300, samples=1)),
        ("where everything takes for ever", Cost(fixed_s=1e300, token_s=1e300, pair_s=1e300, samples=10**9)),
    ):
        nodes = (replace(n, compute=cost, overhead=cost, free_at=1e12) for n in (_prefill(0), _decode(0)))
        pairs = {("prefill-0", "decode-0"): cost, ("decode-0", "prefill-0"): cost}
        view = replace(_view(*nodes), transfers=pairs)
        for turn in (
            _turn(),
            _turn(handle=_handle(), new_tokens=100),
            _turn(prompt_tokens=10**9, handle=_handle(tokens=10**9 - 1), new_tokens=1),
            _turn(prompt_tokens=1, new_tokens=1, handle=_handle(tokens=1)),
        ):
            yield Case(name, turn, view)


def _random_turn(random: Random) -> Turn:
    prompt = random.choice((1, 15, 64, 500, 4000, 100_000))
    held = random.randrange(0, prompt + 1)
    known = random.random() < 0.7
    handle = _handle(
        node=f"decode-{random.randrange(5)}",
        epoch=random.choice(("e", "e", "e", "before")),
        tokens=max(1, held + random.choice((0, 0, 7))),
        deadline=_NOW + random.choice((-1.0, 0.0, 5.0, 400.0)),
        pin=f"pin-{random.getrandbits(64):x}",
    )
    return _turn(
        tenant=random.choice(("acme", "default")),
        prompt_tokens=prompt,
        splittable=random.random() < 0.9,
        handle=handle if known else None,
        new_tokens=prompt - held if known else prompt,
        bound_to=random.choice((None, None, None, None, f"decode-{random.randrange(5)}")),
        max_retain_s=random.choice((None, None, 0.0, 30.0, 1e5)),
        cached={f"prefill-{i}": random.randrange(prompt + 1) for i in range(random.randrange(4))},
    )


def _random_view(random: Random) -> View:
    prefill = [_random_node(random, Role.PREFILL, i) for i in range(random.choice((1, 2, 4)))]
    decode = [_random_node(random, Role.DECODE, i) for i in range(random.choice((1, 2, 4)))]
    known = [(a.name, b.name) for a in prefill for b in decode] + [(b.name, a.name) for a in prefill for b in decode]
    pairs = random.sample(known, random.randrange(len(known) + 1))
    return replace(_view(*prefill, *decode), transfers={pair: _random_cost(random, 1e-5) for pair in pairs})


def _random_node(random: Random, role: Role, number: int) -> NodeState:
    pinned = random.randrange(1000)
    in_flight = random.choice((0, 0, 1, 5, 40))
    return NodeState(
        name=f"{role}-{number}",
        role=role,
        ready=random.random() < 0.85,
        bidirectional=random.random() < 0.85,
        epoch="e",
        in_flight=in_flight,
        queued_tokens=in_flight * random.randrange(4000),
        failures=random.choice((0, 0, 0, 1, 3)),
        blocks=random.choice((None, Blocks(free=1000 - pinned, pinned=pinned, total=1000, reserve=100))),
        block_size=random.choice((0, 16, 128)),
        prefix_caching=random.random() < 0.8,
        recent_failures=random.choice((0.0, 0.0, 0.3, 4.0)),
        compute=_random_cost(random, 1e-3, pairs=1e-9),
        overhead=_random_cost(random, 1e-6),
        free_at=_NOW + random.uniform(-5.0, 5.0),
    )


def _random_cost(random: Random, token_s: float, pairs: float = 0.0) -> Cost:
    return Cost(
        fixed_s=random.uniform(0.0, 0.05),
        token_s=token_s * 10 ** random.uniform(-2.0, 1.0),
        pair_s=pairs * random.random(),
        samples=random.choice((0, 1, 5, 50)),
    )


def _turn(**fields: Any) -> Turn:
    handle: Handle | None = fields.get("handle")
    prompt = fields.get("prompt_tokens", 2000)
    new = max(0, prompt - handle.tokens) if handle else prompt
    return Turn(**{"tenant": "acme", "model": "m", "prompt_tokens": prompt, "new_tokens": new, **fields})


def _handle(**fields: Any) -> Handle:
    ordinary: dict[str, Any] = {"node": "decode-0", "epoch": "e", "tokens": 1800, "deadline": _NOW + 300, "pin": "pin"}
    return Handle(**{**ordinary, "blocks": 113, "kept_at": _NOW - 60, "params": {}, "size": 500, **fields})


def _prefill(number: int, **fields: Any) -> NodeState:
    return NodeState(name=f"prefill-{number}", role=Role.PREFILL, **{"epoch": "e", "block_size": 16, **fields})


def _decode(number: int, **fields: Any) -> NodeState:
    return NodeState(name=f"decode-{number}", role=Role.DECODE, **{"epoch": "e", "block_size": 16, **fields})


def _full() -> Blocks:
    return Blocks(free=0, pinned=1000, total=1000, reserve=100)


def _view(*nodes: NodeState) -> View:
    prefill = tuple(n for n in nodes if n.role is Role.PREFILL)
    return View(now=_NOW, prefill=prefill, decode=tuple(n for n in nodes if n.role is Role.DECODE))
