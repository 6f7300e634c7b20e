"""`never`: every token runs all R segments. The plain model, token for token."""

from __future__ import annotations

from anydepth.exits import base
from anydepth.models.base import Shape
from anydepth.types import Sampling


class Policy(base.Policy):
    name = "never"

    def check(self, sampling: Sampling, shape: Shape) -> None:
        base.exclude_bounds(self.name, shape.segments, base.bounds_of(sampling, shape))

    def planned(self, sampling: Sampling, index: int, segments: int) -> int:
        return segments
