"""Exit policies, one row at a time: at which depth does a token stop?

A policy leaves at the first depth r in [min, max] that its rule names, and always at max. The state starts afresh for
every token. gate_cdf leaves where `1 - prod_{j<=r}(1 - l_j) >= tau`, `l_j = sigmoid(g_j)`; the product runs over all
rounds, also those below min.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NAMES = ("never", "fixed", "interval", "gate_cdf", "trace")


@dataclass(frozen=True)
class Policy:
    """What decides, resolved and checked; depths 1..segments. `released`: the released model's bfloat16 arithmetic.
    `delayed`: what decides at one round is acted on after the next (an adaptive policy; not beyond max)."""

    name: str
    segments: int
    low: int = 1
    high: int = 0
    depth: int = 0
    interval: int = 1
    threshold: float = 1.0
    trace: tuple[int, ...] = ()
    released: bool = False
    delayed: bool = False


def make_policy(
    segments: int,
    has_gate: bool,
    *,
    exit_policy: str | None = None,
    exit_threshold: float = 1.0,
    min_depth: int = 1,
    max_depth: int | None = None,
    depth: int | None = None,
    interval: int | None = None,
    shallow_depth: int | None = None,
    trace: Sequence[int] | None = None,
    gate_dtype: str = "float32",
    delayed: bool = False,
) -> Policy:
    """The policy of a request's settings; ValueError for what the model or the bounds exclude.

    Without a name, `depth` means fixed, `interval` interval, `trace` trace, a threshold below 1 gate_cdf; else never.
    """
    high = segments if max_depth is None else max_depth
    name = exit_policy
    if name is None:
        if depth is not None:
            name = "fixed"
        elif interval is not None:
            name = "interval"
        elif trace is not None:
            name = "trace"
        else:
            name = "gate_cdf" if exit_threshold < 1.0 else "never"
    if name not in NAMES:
        raise ValueError(f"policy {name!r}; allowed: {', '.join(NAMES)}")
    if not 1 <= min_depth <= high <= segments:
        raise ValueError(f"bounds {min_depth}..{high}; allowed: within 1..{segments}")
    if not 0.0 <= exit_threshold <= 1.0:
        raise ValueError(f"exit_threshold {exit_threshold}; allowed: 0..1")
    if name == "gate_cdf" and not has_gate:
        raise ValueError("gate_cdf needs a gate")
    if gate_dtype not in ("float32", "bfloat16"):
        raise ValueError(f"gate_dtype {gate_dtype!r}; allowed: float32, bfloat16")
    if name == "interval":
        if interval is None:
            raise ValueError("policy interval needs an interval")
        depth = shallow_depth if interval > 1 else segments
    depths: dict[str, list[int | None]] = {"never": [segments], "fixed": [depth], "interval": [segments, depth]}
    for d in depths.get(name, []):
        if d is None or not min_depth <= d <= high:
            raise ValueError(f"{name} at depth {d}, outside {min_depth}..{high}")
    if any(not 1 <= d <= segments for d in trace or ()):
        raise ValueError(f"trace {trace}; allowed: depths 1..{segments}")
    released = gate_dtype == "bfloat16"
    return Policy(
        name,
        segments,
        low=min_depth,
        high=high,
        depth=depth or 0,
        interval=interval or 1,
        threshold=exit_threshold,
        trace=tuple(trace or ()),
        released=released,
        delayed=delayed,
    )


@dataclass
class Row:
    """The decision about one token: `leaves(r, gate logit)` is asked for r = 1, 2, .. until it says True.

    index: the output the token's pass produces, 0-based (a trace has one entry an output). nth: which decode token of
    the request it is, 1-based.
    cdf: the deciding number after each round asked about (gate_cdf only). margin: the least distance of one that could
    have decided otherwise from the threshold; inf where nothing but the depth decided.
    """

    policy: Policy
    index: int
    nth: int = 1
    depth: int = 0
    cdf: list[float] = field(default_factory=list)
    margin: float = math.inf
    _remaining: Any = 1.0  # a float; of the released arithmetic a bfloat16 tensor
    _sum: Any = 0.0
    _said_so: bool = False

    def leaves(self, r: int, gate_logit: Tensor | None) -> bool:
        p = self.policy
        self.depth = r
        if self._said_so:
            return True
        if p.name == "gate_cdf":
            assert gate_logit is not None
            fires = self._released(r, gate_logit) if p.released else self._gate_cdf(gate_logit)
        else:
            fires = r == self._planned()
        fires = r >= p.low and fires
        if p.delayed and p.name == "gate_cdf" and r < p.high:
            self._said_so, fires = fires, False
        return r == p.high or fires

    def _planned(self) -> int:
        p = self.policy
        if p.name == "interval":
            return p.segments if self.nth % p.interval == 0 else p.depth
        return p.segments if p.name == "never" else p.depth if p.name == "fixed" else p.trace[self.index]

    def _gate_cdf(self, gate_logit: Tensor) -> bool:
        """Hazard in the model's float32 or float64, product in float64; a threshold of 1 or more never fires."""
        self._remaining = self._remaining * (1.0 - float(torch.sigmoid(gate_logit)))
        self.cdf.append(1.0 - self._remaining)
        return self.policy.threshold < 1.0 and self._compare(self.cdf[-1], self.policy.threshold)

    def _released(self, r: int, gate_logit: Tensor) -> bool:
        """Every step rounded to bfloat16, threshold too; the last gate is never used. A threshold of 1 can fire."""
        if r == 1:
            self._remaining = torch.ones((), dtype=torch.bfloat16)
            self._sum = torch.zeros((), dtype=torch.bfloat16)
        hazard = torch.sigmoid(gate_logit.to(torch.bfloat16))
        share = hazard * self._remaining if r < self.policy.segments else self._remaining
        self._remaining = self._remaining * (1.0 - hazard)
        self._sum = self._sum + share
        self.cdf.append(float(self._sum))
        return self._compare(self.cdf[-1], float(torch.tensor(self.policy.threshold, dtype=torch.bfloat16)))

    def _compare(self, cdf: float, threshold: float) -> bool:
        if self.policy.low <= self.depth < self.policy.high:
            self.margin = min(self.margin, abs(cdf - threshold))
        return cdf >= threshold
