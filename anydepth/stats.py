"""Intervals for what was measured, in plain Python."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist
from typing import NamedTuple


class Interval(NamedTuple):
    """Two-sided bounds, `low <= estimate <= high`."""

    low: float
    high: float


def wilson(successes: float, n: int, *, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion, without continuity correction (Wilson 1927; Newcombe 1998, method 3).

    Partial credit counts: `successes` is a sum of n scores in [0, 1], for which the interval is on the wide side.
    Raises ValueError for n < 1, successes outside 0..n, confidence outside (0, 1).
    Example: wilson(81, 263) is (0.2553, 0.3662) to four digits.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n}; allowed: 0 <= successes <= n and n >= 1")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; allowed: above 0 and below 1")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = successes / n
    centre = share + z * z / (2 * n)
    reach = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At 0 and n one bound is exactly 0 or 1; rounding must not move it past the estimate.
    return Interval(min(share, max(0.0, (centre - reach) / scale)), max(share, min(1.0, (centre + reach) / scale)))
