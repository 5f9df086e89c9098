"""From cases to figures: start what is to be measured, play the corpus, judge every turn."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.reuse.client import Client, block_size, session
from benchmarks.reuse.corpus import Conversation, Kind, corpus, interleaved
from benchmarks.reuse.play import Player, References
from benchmarks.reuse.report import Run, judge
from benchmarks.serving import Serving, serve

SIMULATED = (
    "cluster=simulated",
    *(f"cluster.simulated.{what}_tokens_per_s=0" for what in ("prefill", "decode", "transfer")),
    *(f"cluster.{role}.kv_blocks=65536" for role in ("prefill", "decode")),
)
"""As fast as they can, with room for a million tokens."""
SIMULATED_BODY = {"ignore_eos": True}
"""A simulated model would end every answer after a dozen words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line says; its own help explains the fields."""

    seed: int
    each: int
    kinds: Sequence[Kind]
    open_at_once: int
    users: int
    simulated: bool
    overrides: Sequence[str] = ()
    url: str | None = None
    block_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    policy: str
    prefix_caching: bool | None = None
    """None for nodes that run already, with whatever they have."""

    @property
    def name(self) -> str:
        return f"{self.policy}, no caches" if self.prefix_caching is False else self.policy


async def run_all(settings: Settings, cases: Sequence[Case], told: Console) -> list[Run]:
    conversations = corpus(settings.seed, each=settings.each, kinds=settings.kinds)
    references, runs = References(), []
    with _progress(told) as progress:
        for case in cases:
            with _nodes(settings, case) as serving:
                runs.append(await _run(settings, case, serving, conversations, references, progress))
    return runs


async def _run(
    settings: Settings,
    case: Case,
    serving: Serving,
    conversations: Sequence[Conversation],
    references: References,
    progress: Progress,
) -> Run:
    order = interleaved(conversations, settings.seed, open_at_once=settings.open_at_once)
    task = progress.add_task(case.name, total=2 * len(order))
    if not progress.console.is_terminal:  # where a bar would be shown at its end only
        progress.console.print(f"{case.name}: {len(order)} turns, then their cold references", highlight=False)
    extra = SIMULATED_BODY if settings.simulated else {}

    def step() -> None:
        progress.advance(task)

    async with session() as http:
        size = settings.block_size or await block_size(http, serving.alone or serving.url)
        player = Player(Client(http, serving.url), conversations, block_size=size, extra=extra, told=step)
        turns = await player.play(order, settings.users)
        wrong = await references.wrong_tokens(turns, Client(http, serving.alone or serving.url), step)
    return Run(name=case.name, judged=judge(turns, wrong))


@contextmanager
def _nodes(settings: Settings, case: Case) -> Iterator[Serving]:
    if settings.url is not None:
        yield Serving(url=settings.url)
        return
    caching = str(case.prefix_caching).lower()
    words = [*(SIMULATED if settings.simulated else ()), f"policy={case.policy}"]
    words += [f"cluster.{role}.prefix_caching={caching}" for role in ("prefill", "decode")]
    with serve([*words, *settings.overrides]) as serving:
        yield serving


def _progress(told: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=told)
