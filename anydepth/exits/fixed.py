"""`fixed`: every decode token is read at the same depth."""

from __future__ import annotations

from anydepth.exits import base
from anydepth.models.base import Shape
from anydepth.types import Sampling


class Policy(base.Policy):
    name = "fixed"

    def check(self, sampling: Sampling, shape: Shape) -> None:
        if sampling.depth is None:
            raise ValueError(f"policy 'fixed' needs depth=1 .. {shape.segments}")
        base.exclude_bounds(self.name, sampling.depth, base.bounds_of(sampling, shape))

    def planned(self, sampling: Sampling, index: int, segments: int) -> int:
        assert sampling.depth is not None
        return sampling.depth
