"""Conversations as data: what each request of them says, with the answers to earlier requests left open."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

Message = dict[str, Any]

_WORDS = """
about account after again agree almost along amount answer around because before begin between both bring build change
chapter clear close common company consider country course decide describe different during early either energy enough
example expect explain family figure follow found garden general great group happen history house however idea important
include interest island kitchen language large later learn letter level light listen little local machine market matter
measure member mention method middle minute moment money morning mountain never nothing number offer often order paper
people perhaps picture place plan point possible present problem process public question quick reach ready reason record
region remember report result return river school second section several short simple small something special start
station story street strong subject summer support system table teach thing thought through together travel under until
usual value village visit voice water weather whether window winter without wonder word world write yesterday young
""".split()  # noqa: SIM905 - a list literal would have a line for each

_SYSTEM_PROMPTS = 4
"""Conversations share that many, as those of one service do."""
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Use this to {name} something.", "parameters": {}}}
    for name in ("search", "read", "calculate")
]


class Kind(StrEnum):
    """What a client does with the history. Every conversation also grows."""

    GROWING = "growing"
    """Each request repeats the history and adds to it."""
    STRIPPED = "stripped"
    """Answers come back without their first half, as reasoning models want it."""
    BRANCHING = "branching"
    """Some requests go on from an earlier answer, and the conversation then from where it was."""
    EDITED = "edited"
    """An earlier message of the user is changed; what came after it is dropped, or sent again all the same."""
    REGENERATED = "regenerated"
    """The same request again, once or twice, before the conversation goes on."""
    TRUNCATED = "truncated"
    """The oldest turns are dropped, behind the system prompt."""
    TOOLS = "tools"
    """Each answer calls one to three tools, whose results are of mixed sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The place of the answer to request number `turn` of the same conversation."""

    turn: int
    stripped: bool = False
    """Without its first half."""
    calls: tuple[str, ...] = ()
    """Ids of the tool calls that the client adds to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`messages` alternate between what is known and what a model will have answered."""

    messages: tuple[Message | Answered, ...]
    max_tokens: int
    tools: bool = False

    def body(self, answers: Sequence[str]) -> dict[str, Any]:
        """Of the HTTP request, given the text of the conversation's answers so far. Greedy."""
        messages = [_fill(m, answers) if isinstance(m, Answered) else m for m in self.messages]
        body = {"messages": messages, "max_tokens": self.max_tokens, "temperature": 0}
        # "none": engines refuse to choose without a parser for the model's way of calling, but show the tools to it.
        return {**body, "tools": TOOLS, "tool_choice": "none"} if self.tools else body


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    kind: Kind
    requests: tuple[Request, ...]


def corpus(seed: int, *, each: int, kinds: Sequence[Kind] = tuple(Kind)) -> list[Conversation]:
    """`each` conversations of every kind, of 4 to 9 requests. Equal arguments give equal ones."""
    systems = _system_prompts(seed)
    made = []
    for kind in kinds:
        for number in range(each):
            random = Random(f"{seed}/{kind}/{number}")
            made.append(_conversation(kind, _Writer(random, random.choice(systems)), random))
    return made


def interleaved(conversations: Sequence[Conversation], seed: int, *, open_at_once: int) -> list[tuple[int, int]]:
    """Conversation and request number of every request, in the order in which they are sent.

    Requests of one conversation stay in their order; a new conversation begins when one of those open has ended.
    """
    random = Random(f"{seed}/order")
    waiting = list(range(len(conversations)))
    random.shuffle(waiting)
    going: dict[int, int] = {}
    order = []
    while waiting or going:
        while waiting and len(going) < open_at_once:
            going[waiting.pop()] = 0
        one = random.choice(list(going))
        order.append((one, going[one]))
        going[one] += 1
        if going[one] == len(conversations[one].requests):
            del going[one]
    return order


class _Writer:
    """Writes the requests of one conversation, one after the other."""

    def __init__(self, random: Random, system: Message) -> None:
        self._random = random
        self.history: list[Message | Answered] = [system]
        self.requests: list[Request] = []

    def ask(self, *, stripped: bool = False, tools: bool = False) -> None:
        """Send the history with a new message of the user; the answer becomes part of the history."""
        self.history.append(self.user())
        self.send(stripped=stripped, tools=tools)

    def send(self, *, stripped: bool = False, tools: bool = False, calls: tuple[str, ...] = ()) -> None:
        answer = Answered(turn=len(self.requests), stripped=stripped, calls=calls)
        max_tokens = self._random.randint(16, 160)
        self.requests.append(Request(messages=tuple(self.history), max_tokens=max_tokens, tools=tools))
        self.history.append(answer)

    def again(self) -> None:
        self.requests.append(self.requests[-1])

    def user(self) -> Message:
        """Mostly a few sentences, now and then a document."""
        long = self._random.random() < 0.15
        return {"role": "user", "content": _text(self._random, *((200, 500) if long else (8, 80)))}

    def result(self, call: str) -> Message:
        low, high = self._random.choice([(2, 10), (20, 80), (150, 400)])
        return {"role": "tool", "tool_call_id": call, "content": _text(self._random, low, high)}

    def users(self) -> list[int]:
        """Where in the history the user speaks."""
        return [i for i, m in enumerate(self.history) if not isinstance(m, Answered) and m["role"] == "user"]


def _conversation(kind: Kind, writer: _Writer, random: Random) -> Conversation:
    _WRITERS[kind](writer, random)
    return Conversation(kind=kind, requests=tuple(writer.requests))


def _growing(w: _Writer, random: Random) -> None:
    for _ in range(random.randint(4, 8)):
        w.ask()


def _stripped(w: _Writer, random: Random) -> None:
    for _ in range(random.randint(4, 8)):
        w.ask(stripped=True)


def _branching(w: _Writer, random: Random) -> None:
    for _ in range(random.randint(2, 4)):
        w.ask()
    for _ in range(random.randint(1, 2)):
        trunk = list(w.history)
        del w.history[random.choice(w.users()[1:]) :]
        for _ in range(random.randint(1, 2)):
            w.ask()
        if random.random() < 0.7:
            w.history = trunk
            w.ask()


def _edited(w: _Writer, random: Random) -> None:
    for _ in range(random.randint(2, 4)):
        w.ask()
    for _ in range(random.randint(1, 2)):
        place = random.choice(w.users())
        w.history[place] = w.user()
        if random.random() < 0.5:
            del w.history[place + 1 :]
            w.send()
        w.ask()


def _regenerated(w: _Writer, random: Random) -> None:
    for _ in range(random.randint(2, 4)):
        w.ask()
        for _ in range(random.randint(0, 2)):
            w.again()


def _truncated(w: _Writer, random: Random) -> None:
    for _ in range(random.randint(3, 4)):
        w.ask()
    for _ in range(random.randint(1, 2)):
        del w.history[1 : random.choice(w.users()[1:])]
        for _ in range(2):
            w.ask()


def _tools(w: _Writer, random: Random) -> None:
    for user in range(random.randint(1, 2)):
        w.history.append(w.user())
        for step in range(random.randint(1, 3)):
            calls = tuple(f"call-{user}-{step}-{i}" for i in range(random.randint(1, 3)))
            w.send(tools=True, calls=calls)
            w.history += [w.result(call) for call in calls]
        w.send(tools=True)


_WRITERS: dict[Kind, Callable[[_Writer, Random], None]] = {
    Kind.GROWING: _growing,
    Kind.STRIPPED: _stripped,
    Kind.BRANCHING: _branching,
    Kind.EDITED: _edited,
    Kind.REGENERATED: _regenerated,
    Kind.TRUNCATED: _truncated,
    Kind.TOOLS: _tools,
}


def _system_prompts(seed: int) -> list[Message]:
    random = Random(f"{seed}/system")
    return [{"role": "system", "content": _text(random, 40, 250)} for _ in range(_SYSTEM_PROMPTS)]


def _text(random: Random, low: int, high: int) -> str:
    return "".join(_sentences(random, random.randint(low, high))).strip()


def _sentences(random: Random, words: int) -> Iterator[str]:
    while words > 0:
        count = min(words, random.randint(5, 14))
        yield " ".join(random.choices(_WORDS, k=count)).capitalize() + ". "
        words -= count


def _fill(place: Answered, answers: Sequence[str]) -> Message:
    text = answers[place.turn]
    if place.stripped:
        words = text.split(" ")
        text = " ".join(words[len(words) // 2 :])
    message: Message = {"role": "assistant", "content": text}
    if place.calls:
        message["tool_calls"] = [_call(i, call) for i, call in enumerate(place.calls)]
    return message


def _call(index: int, call: str) -> dict[str, Any]:
    name = TOOLS[index % len(TOOLS)]["function"]
    assert isinstance(name, dict)
    return {"id": call, "type": "function", "function": {"name": name["name"], "arguments": '{"about": "it"}'}}
