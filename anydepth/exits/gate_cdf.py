"""`gate_cdf`: leave when the exit gate's cumulative probability reaches a threshold (Ouro, arXiv 2510.25741).

With hazards l_r = sigmoid(gate logit r), the probability of having left by depth r is 1 - prod_{j<=r} (1 - l_j); a row
leaves at the first r in [min, max] where that is >= tau. The product runs over all rounds, those below min included.
tau >= 1 turns adaptive exit off (never `cdf >= 1`), tau = 0 leaves at min.
Example: hazards .3, .3 with tau = .5 leave at depth 2, since 1 - .7 * .7 = .51.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anydepth.exits import base
from anydepth.models.base import Shape
from anydepth.types import Sampling


class Policy(base.Policy):
    """State columns: 0 the product of (1 - hazard) so far, d = 1..R the threshold at depth d."""

    name = "gate_cdf"
    needs = "signal"

    def check(self, sampling: Sampling, shape: Shape) -> None:
        if not shape.has_gate:
            raise ValueError(
                "policy 'gate_cdf' (exit_threshold below 1) needs an exit gate, which this model has not; "
                "allowed here: 'never', 'fixed' (depth=), 'interval', 'trace'; with a profile 'confidence', 'probe'"
            )
        base.bounds_of(sampling, shape)

    def parameters(self, sampling: Sampling, bounds: tuple[int, int], segments: int) -> tuple[float, ...]:
        tau = sampling.exit_threshold
        return base.thresholds(tau if tau < 1 else float("inf"), bounds, segments)

    def start(self, parameters_NP: Tensor) -> Tensor:
        return torch.cat((torch.ones_like(parameters_NP[:, :1]), parameters_NP), 1)

    def decide(self, state_NS: Tensor, depth_N: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        survive = torch.where(depth_N == 1, 1.0, state_NS[:, 0]) * (1.0 - base.wide(seen).sigmoid().double())
        leave = 1.0 - survive >= base.at_depth(state_NS, depth_N)
        return leave, torch.cat((survive.unsqueeze(1), state_NS[:, 1:]), 1)


class ReleasedArithmetic(Policy):
    """`gate_dtype="bfloat16"`: the pdf, its running sum and tau rounded to bfloat16, as the released code has them.

    For parity arms only: a hazard is 1.0 from logit 6.24 on, so even tau = 1 can leave early. State columns: remaining
    probability, running sum, the float32 policy's product, flips so far, then thresholds for bfloat16 and float32.
    A flip is a round at which the two precisions decide differently, up to the one where the row leaves.
    """

    tallies = {"gate_flips": 3}  # noqa: RUF012 (as its base class declares it)

    def parameters(self, sampling: Sampling, bounds: tuple[int, int], segments: int) -> tuple[float, ...]:
        rounded = float(torch.tensor(sampling.exit_threshold, dtype=torch.bfloat16))
        return (*base.thresholds(rounded, bounds, segments), *super().parameters(sampling, bounds, segments))

    def start(self, parameters_NP: Tensor) -> Tensor:
        one, zero = torch.ones_like(parameters_NP[:, :1]), torch.zeros_like(parameters_NP[:, :1])
        return torch.cat((one, zero, one, zero, parameters_NP), 1)

    def decide(self, state_NS: Tensor, depth_N: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        first, segments = depth_N == 1, (state_NS.shape[1] - 4) // 2
        low, wide = state_NS[:, 4 : 4 + segments], state_NS[:, 4 + segments :]
        hazard = seen.bfloat16().sigmoid()
        remaining = torch.where(first, 1.0, state_NS[:, 0]).bfloat16()
        mass = torch.where(first, 0.0, state_NS[:, 1]).bfloat16() + hazard * remaining
        leave = mass.double() >= base.at_depth(low, depth_N - 1)
        reference = torch.cat((state_NS[:, 2:3], wide), 1)
        leave_wide, reference = super().decide(reference, depth_N, seen)
        gone = ~first & (state_NS[:, 1] >= base.at_depth(low, (depth_N - 2).clamp(min=0)))
        flips = state_NS[:, 3] + ((leave != leave_wide) & ~gone)
        moved = torch.stack(((remaining * (1 - hazard)).double(), mass.double(), reference[:, 0], flips), 1)
        return leave, torch.cat((moved, state_NS[:, 4:]), 1)
