"""`confidence`: leave where the exit's own logits are sure enough, by three tests at once.

A row leaves at the first exit k in [min, max] where z1 >= logit_k, z1 - z2 >= margin_k and H(softmax(z / T)) <=
entropy_k; z1, z2 are the two largest raw logits, H is in nats. The numbers are a profile's (`anydepth.profile`). As in
ExitFlow (github.com/Roger-Zhou0/ExitFlow). Exits that the profile has not are not asked.
Example: z = (3, 1, 0), T = 1 has margin 2 and entropy 0.52; (logit 2, margin 1, entropy 0.6) lets it go.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anydepth.exits import base
from anydepth.models.base import Shape
from anydepth.types import Sampling

TESTS = ("logit", "margin", "entropy")
NEVER, ALWAYS = (float("inf"), float("inf"), float("-inf")), (float("-inf"), float("-inf"), float("inf"))


def scores(logits_NC: Tensor, temperature: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """What the tests look at, [N] each: the largest logit, its lead over the second (inf over none), and the entropy in
    nats of softmax(logits / temperature), with a temperature a row ([N, 1]) or one for all. Tokens left out are as ones
    with -inf."""
    logits = base.wide(logits_NC)
    if logits.shape[1] == 1:
        logits = torch.nn.functional.pad(logits, (0, 1), value=float("-inf"))
    top = logits.topk(2, -1).values.double()
    spread = torch.special.entr((logits / temperature).softmax(-1)).sum(-1)
    return top[:, 0], top[:, 0] - top[:, 1], spread


class Policy(base.Policy):
    """State columns: how often a row stayed, how often because of one test alone (three columns), T, and R thresholds
    of each test. A test that alone never kept anyone decides nothing."""

    name = "confidence"
    needs = "logits"
    everywhere = False
    tallies = {"stayed": 0, "stayed_by_logit": 1, "stayed_by_margin": 2, "stayed_by_entropy": 3}  # noqa: RUF012

    def check(self, sampling: Sampling, shape: Shape) -> None:
        base.bounds_of(sampling, shape)
        thresholds = self.profile_of(sampling)
        if not any(exit is not None and exit.has_confidence for exit in thresholds.by_depth):
            raise ValueError(
                f"profile {self.profile_name(sampling)!r} has no exit with logit, margin and entropy, which policy "
                f"'confidence' needs; give another profile, or exit_policy='probe'"
            )

    def asks(self, sampling: Sampling, bounds: tuple[int, int], depth: int) -> bool:
        exit = self.profile_of(sampling).by_depth[depth - 1]
        return depth >= bounds[0] and exit is not None and exit.has_confidence

    def parameters(self, sampling: Sampling, bounds: tuple[int, int], segments: int) -> tuple[float, ...]:
        thresholds = self.profile_of(sampling)
        rows = []
        for depth, exit in enumerate(thresholds.by_depth, start=1):
            if depth >= bounds[1]:
                rows.append(ALWAYS)
            elif exit is None or depth < bounds[0] or exit.logit is None or exit.margin is None or exit.entropy is None:
                rows.append(NEVER)
            else:
                rows.append((exit.logit, exit.margin, exit.entropy))
        return (thresholds.gate_temperature, *(row[test] for test in range(3) for row in rows))

    def start(self, parameters_NP: Tensor) -> Tensor:
        return torch.cat((parameters_NP.new_zeros(len(parameters_NP), len(self.tallies)), parameters_NP), 1)

    def decide(self, state_NS: Tensor, depth_N: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        counts, temperature, table = state_NS.split(
            (len(self.tallies), 1, state_NS.shape[1] - 1 - len(self.tallies)), 1
        )
        logit, margin, entropy = (base.at_depth(part, depth_N - 1) for part in table.chunk(3, 1))
        first, lead, spread = scores(seen, temperature)
        passes = torch.stack((first >= logit, lead >= margin, spread <= entropy), 1)
        leave, failed = passes.all(1), ~passes
        alone = failed & (failed.sum(1, keepdim=True) == 1)
        counts = counts + torch.cat((~leave.unsqueeze(1), alone), 1)
        return leave, torch.cat((counts, temperature, table), 1)
