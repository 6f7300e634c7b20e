"""`interval`: every so many tokens one thinks through to the end, those between are read early.

The decode token of index i runs all R segments if i is a multiple of `interval`, else it is read at `shallow_depth`;
i = 1 is the first sampled token that is fed back. Interval 1 is `never`.
Example: interval 3, shallow_depth 1 and R = 4 read tokens 1, 2, 3, 4, 5, 6 at depths 1, 1, 4, 1, 1, 4.
"""

from __future__ import annotations

from anydepth.exits import base
from anydepth.models.base import Shape
from anydepth.types import Sampling


class Policy(base.Policy):
    name = "interval"

    def check(self, sampling: Sampling, shape: Shape) -> None:
        bounds, shallow = base.bounds_of(sampling, shape), sampling.shallow_depth
        if sampling.interval is None:
            raise ValueError("policy 'interval' needs interval=n (every n-th token at full depth) and shallow_depth")
        base.exclude_bounds(self.name, shape.segments, bounds)
        if sampling.interval == 1:
            return
        if shallow is None or shallow >= shape.segments:
            raise ValueError(
                f"shallow_depth is {shallow}; policy 'interval' reads the tokens between at a depth of "
                f"1 .. {shape.segments - 1}"
                + (": this model has one segment" if shape.segments == 1 else "; give one of them")
            )
        base.exclude_bounds(self.name, shallow, bounds)

    def planned(self, sampling: Sampling, index: int, segments: int) -> int:
        """The prefill gives output 0; with first_token="policy" output 0 is the first decode token, i = 1."""
        assert sampling.interval is not None
        i = index + (sampling.first_token == "policy")
        return segments if i % sampling.interval == 0 else sampling.shallow_depth or segments
