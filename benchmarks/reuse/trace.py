"""A trace: who takes which turn when. For runs where memory and time decide what is still kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTurn:
    """Lengths are in tokens. `at` is in seconds from the beginning of the trace."""

    conversation: int
    number: int
    """Of the turn in its conversation, from 0."""
    at: float
    new: int
    """Of the prompt, what the user has just said."""
    prompt: int
    """The whole history, and `new`."""
    answer: int

    @property
    def held(self) -> int:
        """Tokens whose KV exists when the turn has ended; the last one of an answer has none."""
        return self.prompt + self.answer - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the turns of a trace are like. Ranges are inclusive."""

    turns: tuple[int, int] = (2, 5)
    """Of one conversation."""
    first: tuple[int, int] = (60, 140)
    """Tokens of the first prompt."""
    new: tuple[int, int] = (10, 40)
    """Tokens that each later turn adds before its answer."""
    answer: tuple[int, int] = (8, 24)
    think_s: tuple[float, float] = (1.0, 30.0)
    """Between the turns of a conversation, mostly; short times are frequent. Keep it well below the TTL."""
    pause_s: tuple[float, float] = (75.0, 90.0)
    """The others. Keep it well above the TTL: what is between the two is up to chance."""
    pausing: float = 0.08
    """Share of conversations that pause once."""


def trace(seed: int, *, conversations: int = 100, span_s: float = 90.0, shape: Shape | None = None) -> list[TraceTurn]:
    """Turns in the order of `at`. Conversations begin within `span_s` seconds; the last turn may be as much later as
    its conversation thinks. The seed decides everything.
    """
    shape = shape or Shape()
    random = Random(f"{seed}/trace")
    pausing = set(random.sample(range(conversations), round(shape.pausing * conversations)))
    made: list[TraceTurn] = []
    for number in range(conversations):
        pauses = number in pausing
        # Those that pause begin early, so that nobody has to wait for them at the end.
        begin = random.uniform(0, span_s / 4 if pauses else span_s)
        made += _conversation(number, begin, random, shape, pauses=pauses)
    return sorted(made, key=lambda t: (t.at, t.conversation))


def _conversation(number: int, at: float, random: Random, shape: Shape, *, pauses: bool) -> list[TraceTurn]:
    count = random.randint(*shape.turns)
    pause = random.randint(1, count - 1) if pauses and count > 1 else 0
    made, history = list[TraceTurn](), 0
    for turn in range(count):
        if turn:
            at += random.uniform(*shape.pause_s) if pause == turn else _mostly_short(random, *shape.think_s)
        new = random.randint(*(shape.new if turn else shape.first))
        answer = random.randint(*shape.answer)
        prompt = history + new
        made.append(TraceTurn(conversation=number, number=turn, at=at, new=new, prompt=prompt, answer=answer))
        history = prompt + answer
    return made


def _mostly_short(random: Random, low: float, high: float) -> float:
    """Every doubling is as likely as every other, as with people and their tools."""
    return math.exp(random.uniform(math.log(low), math.log(high)))


def returning(turns: Sequence[TraceTurn]) -> int:
    """Turns that have a turn before them, and so could be hits."""
    return sum(turn.number > 0 for turn in turns)
