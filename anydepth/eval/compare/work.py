"""Work and lengths of two arms on the same questions: means a question, ratio and difference, with paired intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from statistics import NormalDist, fmean, stdev
from typing import Any, NamedTuple

from anydepth.record import Sample

Pairs = Sequence[tuple[Sample, Sample]]


class Estimate(NamedTuple):
    """A figure with its 95 % interval, which is None below two questions."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Work:
    """A figure a question, of either arm, with A / B and A - B; the intervals are paired ones over questions."""

    a: float
    b: float
    ratio: Estimate | None
    difference: Estimate

    @property
    def share(self) -> float | None:
        """A / B, None where B is 0."""
        return self.a / self.b if self.b else None

    def asdict(self) -> dict[str, Any]:
        return {
            "a": self.a,
            "b": self.b,
            "ratio": self.ratio and self.ratio._asdict(),
            "difference": self.difference._asdict(),
        }


def by_question(values: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    """Values of each question id, in the order in which ids come."""
    found: dict[str, list[float]] = {}
    for id, value in values:
        found.setdefault(id, []).append(value)
    return found


def work(pairs: Pairs, figure: Callable[[Sample], float]) -> Work:
    """Means, difference, and ratio of the means with its interval by the delta method on the logarithm."""
    ones, others = (
        [fmean(values) for values in by_question((pair[i]["id"], figure(pair[i])) for pair in pairs).values()]
        for i in (0, 1)
    )
    a, b = fmean(ones), fmean(others)
    ratio = None
    if a > 0 and b > 0:
        _, low, high = _mean([x / a - y / b for x, y in zip(ones, others, strict=True)])
        limits = [None if bound is None else a / b * exp(bound) for bound in (low, high)]
        ratio = Estimate(a / b, *limits)
    return Work(a=a, b=b, ratio=ratio, difference=_mean([x - y for x, y in zip(ones, others, strict=True)]))


def _mean(values: Sequence[float]) -> Estimate:
    """Mean with the normal interval."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, None)
    reach = NormalDist().inv_cdf(0.975) * stdev(values) / sqrt(len(values))
    return Estimate(mean, mean - reach, mean + reach)
