"""The way with the soonest first token, by what was measured on these nodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil, inf, sqrt

from kvflow.policies import check
from kvflow.policies.forecast import forecast, transfer_of
from kvflow.policies.reuse import Choice, Option
from kvflow.types import Cost, Path, Reason, Turn, View

_TRIED_SHARE = 0.02
"""Of the time to first token that trying out one other way may cost on average, with nothing measured of it."""
_FAMILIAR = 10
"""Measurements after which a way is tried half as often."""
_TIMES = 10.0
"""A way that is predicted to take more than so many times as long is not tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """Take the option with the lowest predicted time to first token, plus a price for delaying other answers.

    A decode node that computes a prompt delays the next token of each answer that it is giving. Its reader waits in the
    middle of a text, which is felt less than waiting for its beginning, but each of them does: the seconds, summed over
    the answers, count `stream_delay_weight` times as much as seconds until this turn's own first token.

    The other two keys bound what the estimates decide: nothing below `min_pull_tokens` is pulled, and only turns with
    fewer than `direct_below_tokens` to compute are left to the node that holds them; None is no bound.

    A way that is never taken is never measured, and one bad measurement could rule it out for ever. So a turn now and
    then goes a way that is not predicted to be the soonest: one in 50 if it is as soon, one in 100 if it takes twice
    as long, and fewer the more it has been measured. On average that costs at most 2 % of the predicted time for each
    of the two ways that can be tried, whatever they are predicted to take. The turn's handle decides, by a hash of its
    name: there is no state, and the same turn is always planned alike. `cold` is never tried: every other turn
    measures what it consists of.
    """

    enabled: bool = True
    min_pull_tokens: int = 0
    direct_below_tokens: int | None = None
    stream_delay_weight: float = 0.1

    def __post_init__(self) -> None:
        check.flag("policy.reuse.enabled", self.enabled)
        check.whole("policy.reuse.min_pull_tokens", self.min_pull_tokens)
        if self.direct_below_tokens is not None:
            check.whole("policy.reuse.direct_below_tokens", self.direct_below_tokens)
        check.number("policy.reuse.stream_delay_weight", self.stream_delay_weight)

    def choose(self, turn: Turn, options: Sequence[Option], view: View) -> Choice:
        allowed = [o for o in options if self._allows(o, turn)] or list(options)
        best = tried = allowed[0]
        if len(allowed) > 1:
            prices = [self._price(o, turn, view) for o in allowed]
            # Of equals the last: where a prefill node is believed to have it all, a pull helps if it does not.
            least, place = min((price, -i) for i, price in enumerate(prices))
            best = allowed[-place]
            tried = _tried(turn, allowed, prices, least, view) or best
        if tried.path is Path.PULL:
            return self._pull(turn, tried, options, view, trying=tried is not best)
        possible = any(o.path is Path.PULL for o in options)
        below = tried.path is Path.COLD and possible
        return Choice(option=tried, reason=Reason.BELOW_THRESHOLD if below else None)

    def describe(self) -> str:
        if not self.enabled:
            return "Reuse: never; every turn is computed from its first token."
        words = (
            "Reuse: the way with the soonest first token by what was measured, where a second by which other answers "
            f"are delayed counts as {self.stream_delay_weight:g} s"
        )
        if self.min_pull_tokens:
            words += f"; nothing below {self.min_pull_tokens} tokens is pulled"
        if self.direct_below_tokens is not None:
            words += (
                f"; only turns with fewer than {self.direct_below_tokens} tokens to compute go to their node directly"
            )
        return f"{words}."

    def _allows(self, option: Option, turn: Turn) -> bool:
        if option.path is Path.DIRECT:
            return self.direct_below_tokens is None or option.computed_tokens < self.direct_below_tokens
        return option.path is Path.COLD or (turn.handle is not None and turn.handle.tokens >= self.min_pull_tokens)

    def _price(self, option: Option, turn: Turn, view: View) -> float:
        predicted = forecast(option, turn, view)
        return predicted.first_token_s + self.stream_delay_weight * predicted.disturbs_s

    def _pull(self, turn: Turn, pull: Option, options: Sequence[Option], view: View, *, trying: bool) -> Choice:
        """With the number of tokens from which it pays, for the engine, which knows how many it really lacks."""
        assert turn.handle is not None
        assert pull.prefill is not None
        pays = 1.0 if trying else break_even(_transfer(turn, pull, view), pull.prefill.compute)
        cold = next((o for o in options if o.path is Path.COLD), None)
        if pays > turn.handle.tokens and not pull.pulled_tokens and cold is not None:
            return Choice(option=cold, reason=Reason.BELOW_THRESHOLD)
        # What was chosen for what it saves is not to be held up by a rounding of the same estimates.
        least = min(pays, pull.pulled_tokens or turn.handle.tokens)
        return Choice(option=pull, min_pull_tokens=max(1, self.min_pull_tokens, ceil(least)))


def break_even(transfer: Cost, compute: Cost) -> float:
    """Tokens from which moving them is quicker than computing them, were they the first ones; infinite if never.

    Where fixed + n x (a token's transfer - its compute) = pairs among n x a pair's compute.
    """
    saved = compute.token_s - transfer.token_s
    root = sqrt(max(0.0, saved * saved + 2 * compute.pair_s * transfer.fixed_s))
    if not saved + root > 0:
        return inf
    return max(0.0, 2 * transfer.fixed_s / (saved + root))


def _tried(turn: Turn, options: Sequence[Option], prices: Sequence[float], least: float, view: View) -> Option | None:
    """An option that this turn is to try out although it is not predicted to be the best, if it is one of the few."""
    draw = _draw(turn)
    for option, price in zip(options, prices, strict=True):
        if option.path is Path.COLD or not least < price <= _TIMES * least:
            continue
        measured = option.decode.compute if option.prefill is None else _transfer(turn, option, view)
        draw -= _TRIED_SHARE * least / price / (1 + max(0, measured.samples) / _FAMILIAR)
        if draw < 0:
            return option
    return None


def _draw(turn: Turn) -> float:
    """From 0 to 1, evenly spread over handles."""
    if turn.handle is None:
        return 1.0
    return int.from_bytes(blake2b(turn.handle.pin.encode(), digest_size=8).digest()) / 2**64


def _transfer(turn: Turn, pull: Option, view: View) -> Cost:
    assert turn.handle is not None
    assert pull.prefill is not None
    return transfer_of(turn.handle.node, pull.prefill.name, view)
