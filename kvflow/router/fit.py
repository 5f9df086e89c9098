"""One cost, learned from measurements that come one by one."""

from collections import deque
from itertools import combinations
from math import exp, log
from statistics import median

from kvflow.types import Cost

_FORGET = 0.98
"""About the last fifty measurements count."""
_FORGET_ON_DRIFT = 0.8
_DRIFT = 0.25
"""Measurements that are off by more than this on the average (of the logarithm) speak of a new speed."""
_DRIFT_NEWEST = 0.15
"""Weight of the newest in that average."""
_AFTER_RESTART = 3.0
"""Measurements that all before a restart count for."""
_ODD = 3.0
"""A measurement that is off by more than this factor is not believed at once."""
_WINDOW = 12
_BELIEVED = 5
"""So many odd ones among the last `_WINDOW` are a change; one or two are a compilation, or somebody else's load."""
_BELIEVED_EARLY = 3
_EARLY = 10
_PRIOR_POINTS = ((16, 0), (512, 0), (4096, 4096))
_PRIOR_WEIGHT = 1.0
_PRIOR_HALVES = 5.0
"""After so many measurements the prior, worth one of them at first, counts for half of that."""
_NO_SCALE = 0.5
_FEW_TOKENS = 64
_MOST_TOKENS = 100_000_000
_MOST_S = 3600.0
_LEAST_S = 1e-6
"""Less than that cannot be told from nothing."""

_DEPENDENT = 1e-10

_Sample = tuple[int, int, float]
_Sums = tuple[float, float, float, float, float, float, float, float, float]
"""Of products of (1, tokens, pairs) with each other, the upper triangle by rows, and with the seconds."""
_NOTHING: _Sums = (0.0,) * 9
_Window = deque[tuple[_Sample, float]]
"""Measurements with the factor that each was off by when it came; 1 for those that were learned."""


class Fit:
    """Least squares over relative errors, so that short prompts count as much as long ones; no coefficient is negative.

    The prior gives the shape where measurements do not, and its scale follows them: while all prompts are of one
    length, nothing else says how much of the time is fixed.
    """

    def __init__(self, prior: Cost, *, pairs: bool) -> None:
        """`pairs`: whether the cost grows with what tokens attend to, as that of computing does."""
        self._pairs = pairs
        self._prior = prior
        self._scale = 0.0
        """Logarithm of measurements ÷ prior."""
        self._scaling = _NO_SCALE
        """Of the measurements that say something about that, how much they count."""
        self._drift = 0.0
        """Average logarithm of measurements ÷ what was expected of them."""
        self._sums = _NOTHING
        self._weight = 0.0
        """Measurements in the sums, each by how much it still counts."""
        self._count = 0
        self._newest: _Sample = (0, 0, 0.0)
        self._recent: _Window = deque(maxlen=_WINDOW)
        self._long: _Window = deque(maxlen=_WINDOW)
        """Of more than a few tokens. The last tokens of prompts, most of what a decode node computes, would push the
        whole prompts that it computes now and then out of the other one before they are believed.
        """
        self.cost = prior

    def learn(self, tokens: int, context: int, seconds: float) -> bool:
        """False if the measurement changes nothing, for now or because it is nonsense. Never raises."""
        sample = _sensible(tokens, context, seconds)
        if sample is None:
            return False
        ratio = self._ratio(sample)
        if 1 / _ODD <= ratio <= _ODD:
            self._note(sample, 1.0)
            self._follow(log(ratio))
            self._take(sample, self.cost.seconds(sample[0], sample[1]))
        else:
            self._note(sample, ratio)
            changed = next(filter(self._has_changed, (self._recent, self._long)), None)
            if changed is None:
                return False
            self._begin_again(changed)
        self._solve()
        return True

    def lean_on(self, prior: Cost) -> None:
        """Another prior from the next measurement on."""
        self._prior = prior

    def restart(self) -> None:
        """What is measured may not be the same any more: what was learned counts for little from now on."""
        self._fade(min(1.0, _AFTER_RESTART / max(self._weight, _AFTER_RESTART)))
        self._recent.clear()
        self._long.clear()

    def _note(self, sample: _Sample, ratio: float) -> None:
        self._recent.append((sample, ratio))
        if sample[0] >= _FEW_TOKENS:
            self._long.append((sample, ratio))

    def _ratio(self, sample: _Sample) -> float:
        tokens, context, seconds = sample
        return seconds / max(self.cost.seconds(tokens, context), _LEAST_S)

    def _follow(self, off: float) -> None:
        """Forget as usual; where the speed has drifted, forget more and expect all else to have drifted with it."""
        self._drift += (off - self._drift) * _DRIFT_NEWEST
        if abs(self._drift) < _DRIFT:
            self._fade(_FORGET)
            return
        self._fade(_FORGET_ON_DRIFT)
        if self._weight > _EARLY:
            factor = exp(self._drift)
            *left, y, ty, py = self._sums
            self._sums = (*left, y * factor, ty * factor, py * factor)  # type: ignore[assignment]
            self._scale += self._drift
            self._drift = 0.0

    def _has_changed(self, window: _Window) -> bool:
        odd = sum(ratio != 1.0 for _, ratio in window)
        return odd >= (_BELIEVED_EARLY if self._weight < _EARLY else _BELIEVED)

    def _begin_again(self, changed: _Window) -> None:
        """From the last few alone, but for those that are odd even among the odd."""
        middle = median(ratio for _, ratio in changed if ratio != 1.0)
        short = [] if changed is self._recent else [m for m in self._recent if m[0][0] < _FEW_TOKENS]
        kept = [s for s, ratio in (*short, *changed) if ratio == 1.0 or middle / _ODD <= ratio <= middle * _ODD]
        if self._weight > _EARLY:  # what is faster or slower now has the shape that it had
            self._prior = self.cost
        self._fade(0.0)
        self._drift = 0.0
        self._recent.clear()
        self._long.clear()
        for sample in kept:
            self._take(sample, sample[2])

    def _take(self, sample: _Sample, unit: float) -> None:
        """Errors are relative to `unit` seconds."""
        tokens, context, seconds = sample
        self._newest = sample
        self._sums = self._with(self._sums, sample, unit, 1.0)
        self._weight += 1
        self._count += 1
        # A few tokens say what is fixed, and not how the rest compares with the prior.
        telling = (tokens / (tokens + _FEW_TOKENS)) ** 2
        self._scaling += telling
        off = log(seconds / max(self._prior.seconds(tokens, context), _LEAST_S))
        self._scale += (off - self._scale) * telling / self._scaling

    def _fade(self, factor: float) -> None:
        a, b, c, d, e, f, g, h, i = self._sums
        k = factor
        self._sums = (a * k, b * k, c * k, d * k, e * k, f * k, g * k, h * k, i * k)
        self._weight *= factor
        self._scaling = max(_NO_SCALE, self._scaling * factor)

    def _solve(self) -> None:
        sums, scale = self._sums, exp(self._scale)
        weight = _PRIOR_WEIGHT / (1 + self._weight / _PRIOR_HALVES) / len(_PRIOR_POINTS)
        for tokens, context in _PRIOR_POINTS:
            y = max(self._prior.seconds(tokens, context) * scale, _LEAST_S)
            # A prior that is wrong by much must not insist on it as strongly as it is wrong.
            unit = max(y, self.cost.seconds(tokens, context), self._newest[2] if self._newest[0] <= tokens else 0.0)
            sums = self._with(sums, (tokens, context, y), unit, weight)
        fixed, token, pair = _not_negative(sums)
        self.cost = Cost(fixed_s=fixed, token_s=token, pair_s=pair, samples=max(1, self._count))

    def _with(self, sums: _Sums, sample: _Sample, unit: float, weight: float) -> _Sums:
        tokens, context, y = sample
        w = weight / max(unit, _LEAST_S) ** 2
        p = tokens * (context + tokens / 2) if self._pairs else 0.0
        a, b, c, d, e, f, g, h, i = sums
        wt, wp, wy = w * tokens, w * p, w * y
        return (
            a + w,
            b + wt,
            c + wp,
            d + wt * tokens,
            e + wt * p,
            f + wp * p,
            g + wy,
            h + wy * tokens,
            i + wy * p,
        )


def _sensible(tokens: int, context: int, seconds: float) -> _Sample | None:
    if not (0 < tokens <= _MOST_TOKENS and 0 <= context <= _MOST_TOKENS):
        return None
    if not 0 <= seconds <= _MOST_S:
        return None
    return tokens, context, max(float(seconds), _LEAST_S)


def _not_negative(sums: _Sums) -> tuple[float, float, float]:
    """The least-squares solution without negative numbers.

    It is the best of those for the subsets of the unknowns, since the problem is convex, and there are three at most.
    """
    aa, ab, ac, bb, bc, cc, *right = sums
    scale = [x**-0.5 if x > 0 else 0.0 for x in (aa, bb, cc)]
    s, t, u = scale
    corr = ((1.0, ab * s * t, ac * s * u), (ab * s * t, 1.0, bc * t * u), (ac * s * u, bc * t * u, 1.0))
    h = [r * k for r, k in zip(right, scale, strict=True)]
    unknowns = [i for i in range(3) if scale[i]]
    best, gain = [0.0, 0.0, 0.0], 0.0
    for count in range(len(unknowns), 0, -1):
        for chosen in combinations(unknowns, count):
            found = _solution([[corr[i][j] for j in chosen] + [h[i]] for i in chosen])
            if found is None or min(found) < 0:
                continue
            better = sum(x * h[i] for x, i in zip(found, chosen, strict=True))
            if better > gain:
                best, gain = [0.0, 0.0, 0.0], better
                for x, i in zip(found, chosen, strict=True):
                    best[i] = x * scale[i]
        if gain and count == len(unknowns):
            break  # no bound matters
    return best[0], best[1], best[2]


def _solution(rows: list[list[float]]) -> list[float] | None:
    """By elimination, the right side last in each row; None where rows are as good as dependent. The diagonal is 1."""
    n = len(rows)
    for i in range(n):
        pivot = rows[i]
        if pivot[i] < _DEPENDENT:
            return None
        for k in range(i + 1, n):
            factor = rows[k][i] / pivot[i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], pivot, strict=True)]
    out = [0.0] * n
    for i in range(n - 1, -1, -1):
        out[i] = (rows[i][n] - sum(rows[i][j] * out[j] for j in range(i + 1, n))) / rows[i][i]
    return out
