"""From a grid to samples: start kvflow, warm up, play every cell in every round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.paths.client import Answer, Client, session
from benchmarks.paths.grid import OVERRIDES, Cell, Contender, Message, history, question, rotated
from benchmarks.paths.load import loaded
from benchmarks.serving import serve
from kvflow.tenants.keys import hash_of, new_key

LOAD = "load"
ANSWER_TOKENS = 8
NODES = ("cluster.prefill.prefix_caching=false",)
"""As where many prefill nodes share the work: the one that gets the turn has not seen the conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    rounds: int
    warm_up: int
    seed: int
    overrides: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    cell: Cell
    contender: Contender
    round: int
    """Below 0 in the warm-up."""
    answer: Answer
    differs: bool = False
    """Its text is not that of the cold turn of the same round."""


@dataclass(slots=True)
class _Played:
    """What all contenders have in common of one history: the same messages, each with its own first answer."""

    opening: list[Message]
    answers: dict[Contender, str] = field(default_factory=dict)

    def after(self, contender: Contender, asked: Message) -> list[Message]:
        return [*self.opening, {"role": "assistant", "content": self.answers[contender]}, asked]


Told = Callable[[str], object]


async def run(settings: Settings, grid: Sequence[Cell], told: Told) -> list[Sample]:
    """`told` is called before each turn that counts or warms up. Raises `KvflowError`."""
    names = [*Contender, LOAD]
    keys = {name: new_key() for name in names}
    words = [*NODES, *(w for c in Contender for w in OVERRIDES[c]), f"+policy@tenants.{LOAD}.policy=off"]
    env = {"KVFLOW_KEYS": "\n".join(f"{name} {hash_of(key)}" for name, key in keys.items())}
    with serve([*words, *settings.overrides], env) as serving:
        async with session() as http:
            clients = {name: Client(http, serving.url, key) for name, key in keys.items()}
            return await _Run(settings, clients, told).play(grid)


class _Run:
    def __init__(self, settings: Settings, clients: dict[str, Client], told: Told) -> None:
        self._settings = settings
        self._clients = clients
        self._told = told
        self._turn = 0

    async def play(self, grid: Sequence[Cell]) -> list[Sample]:
        samples: list[Sample] = []
        for length in sorted({c.history for c in grid}):
            played = await self._open(length)
            for number in range(-self._settings.warm_up, self._settings.rounds):
                for cell in (c for c in grid if c.history == length):
                    samples += await self._cell(cell, played, number)
        return samples

    async def _open(self, length: int) -> _Played:
        """First turns, cold for everybody."""
        played = _Played(history(length, self._settings.seed))
        for contender in Contender:
            self._told(f"history of {length}: {contender}")
            answer = await self._clients[contender].ask(played.opening, tokens=ANSWER_TOKENS)
            played.answers[contender] = answer.text
        return played

    async def _cell(self, cell: Cell, played: _Played, number: int) -> list[Sample]:
        """One turn of each contender, from the same point of the conversation, with the same new words."""
        self._turn += 1
        asked = question(cell.new, (self._settings.seed, self._turn))
        answers: dict[Contender, Answer] = {}
        for contender in rotated(list(Contender), self._turn):
            self._told(f"history {cell.history}, new {cell.new}, {cell.load}: {contender}")
            async with loaded(cell.load, self._clients[LOAD], (self._turn, contender)):
                turn = self._clients[contender].ask(played.after(contender, asked), tokens=ANSWER_TOKENS)
                answers[contender] = await turn
        right = answers[Contender.OFF].text
        return [
            Sample(cell=cell, contender=c, round=number, answer=a, differs=a.text != right) for c, a in answers.items()
        ]
