"""From how long a leg took, and what the engine says of it, to measurements that can be learned from."""

from collections.abc import Callable
from dataclasses import dataclass

from kvflow.connector.wire import DecodeReport, PrefillReport
from kvflow.router.estimates import Estimates

_MOST_S = 86_400.0
_CLOCKS_S = 2e-3
"""Two processes' accounts of one leg may differ by so much."""


@dataclass(slots=True, kw_only=True)
class TimedLeg:
    """One leg while it is under way, on the router's clock."""

    node: str
    began: float
    wait_s: float
    """What the node was expected to spend on others before it."""
    now: Callable[[], float]
    on_computed: Callable[[], None]
    """Called once, when the node is done with the prompt or with the leg."""
    seconds: float | None = None
    """Until the first byte of the answer; None while there is none, and for answers that come as a whole."""
    _computing: bool = True

    def answered(self) -> None:
        """The first byte of a streamed answer is here, or all of one that has one token."""
        if self.seconds is None:
            self.seconds = max(0.0, self.now() - self.began)
        self.computed()

    def computed(self) -> None:
        if self._computing:
            self._computing = False
            self.on_computed()


def learn_from_prefill(
    estimates: Estimates, leg: TimedLeg, source: str | None, prompt_tokens: int, report: PrefillReport | None
) -> None:
    """`source` is the node that it was to pull from. A stock engine says nothing: its time is all for computing."""
    if report is None:
        if leg.seconds is not None:
            estimates.computed(leg.node, prompt_tokens, 0, max(0.0, leg.seconds - leg.wait_s))
        return
    had = report.local_tokens + report.pulled_tokens
    if report.compute_s is not None:
        computed = max(1, report.prompt_tokens - had)  # of a full hit, the last token once more
        estimates.computed(leg.node, computed, max(0, report.prompt_tokens - computed), report.compute_s)
    if source is not None and report.pulled_tokens and report.load_s is not None:
        estimates.moved(source, leg.node, report.pulled_tokens, report.load_s)
    _learn_overhead(estimates, leg, report.prompt_tokens, report)


def learn_from_decode(estimates: Estimates, leg: TimedLeg, prefill: str | None, report: DecodeReport) -> None:
    """`prefill` is the node of the leg before it, None on a direct turn. An engine that does not measure teaches
    nothing.
    """
    prompt, local, pulled = report.prompt_tokens, report.local_tokens, report.pulled_tokens
    if prompt is None or local is None or pulled is None:
        return
    if prefill is not None and pulled and report.load_s is not None:
        estimates.moved(prefill, leg.node, pulled, report.load_s)
    if report.compute_s is not None:
        computed = max(1, prompt - local - pulled)  # behind what was moved, the last token
        estimates.computed(leg.node, computed, max(0, prompt - computed), report.compute_s)
    _learn_overhead(estimates, leg, prompt, report)


def _learn_overhead(
    estimates: Estimates, leg: TimedLeg, prompt_tokens: int, report: PrefillReport | DecodeReport
) -> None:
    """What the router saw of the leg beyond what the engine's scheduler did."""
    inside = (report.queue_s, report.load_s, report.compute_s)
    known = [s for s in inside if s is not None and s <= _MOST_S]  # a number from the wire may be too large to add
    if leg.seconds is None or len(known) < len(inside):
        return
    beyond = leg.seconds - sum(known)
    if beyond > -_CLOCKS_S:  # some answers begin before their first token exists
        estimates.took(leg.node, prompt_tokens, max(0.0, beyond))
