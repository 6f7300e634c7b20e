"""What looped pretraining minimises (Ouro's Stage I): the expected loss over exit depths, less an entropy that keeps
all of them in use.

Shape suffixes: A answer positions, R depths, d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anydepth.models.ouro import Ouro
from anydepth.train.data import Batch
from anydepth.train.kv import all_depths


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Sums over answer positions: the loss, and per depth how many computed numbers were asked for and were right."""

    total: Tensor
    asked_R: Tensor
    right_R: Tensor


def token_weights(batch: Batch, *, computed_weight: float) -> Tensor:
    """[A]: `computed_weight` on numbers that have to be worked out, 1 on the words around them."""
    return torch.where(batch.computed_A, computed_weight, 1.0)


def exit_log_probabilities(gate_logits_AR: Tensor, exit_depths_A: Tensor) -> Tensor:
    """log p_r of leaving at depth r for r < d, and of still being there at r = d; -inf beyond. [A, R].

    p_r = l_r * prod_{j<r} (1 - l_j), p_d = prod_{j<d} (1 - l_j), where d is the position's own last depth.
    """
    stay = torch.nn.functional.logsigmoid(-gate_logits_AR).cumsum(1).roll(1, 1)
    stay = torch.cat((torch.zeros_like(stay[:, :1]), stay[:, 1:]), 1)
    depth_R = torch.arange(1, gate_logits_AR.shape[1] + 1)
    last = exit_depths_A[:, None]
    leave = torch.where(depth_R < last, torch.nn.functional.logsigmoid(gate_logits_AR), 0.0)
    return (stay + leave).masked_fill(depth_R > last, -torch.inf)


def stage_one(
    model: Ouro, batch: Batch, *, computed_weight: float, entropy: float, exit_depths_BT: Tensor | None = None
) -> Loss:
    """Sum over answer positions of w * sum_r p_r CE_r - entropy * H(p); gradients flow through p as well.

    With `exit_depths_BT` deeper loops see copied K/V (see `DenseKV`) and a position's loss ends at its own depth.
    """
    states = all_depths(model, batch, exit_depths_BT=exit_depths_BT)
    logits_RAV = [model.readout(k, h) for k, h in enumerate(states, start=1)]
    losses_AR = torch.stack(
        [torch.nn.functional.cross_entropy(logits, batch.targets_A, reduction="none") for logits in logits_RAV], 1
    )
    gate_AR = torch.stack([model.signal(k, h) for k, h in enumerate(states, start=1)], 1)
    depths_A = (
        torch.full_like(batch.targets_A, len(states))
        if exit_depths_BT is None
        else exit_depths_BT.reshape(-1)[batch.answer_A]
    )
    log_p_AR = exit_log_probabilities(gate_AR, depths_A)
    reached_AR = torch.isfinite(log_p_AR)
    log_p_AR = log_p_AR.masked_fill(~reached_AR, 0.0)
    p_AR = log_p_AR.exp() * reached_AR
    weights_A = token_weights(batch, computed_weight=computed_weight)
    expected_A = (p_AR * losses_AR).sum(1)
    total = (weights_A * expected_A).sum() + entropy * (p_AR * log_p_AR).sum()
    with torch.no_grad():
        right_AR = torch.stack([logits.argmax(1) == batch.targets_A for logits in logits_RAV], 1)
        counted_AR = reached_AR & batch.computed_A[:, None]
    return Loss(total=total, asked_R=counted_AR.sum(0).float(), right_R=(right_AR & counted_AR).sum(0).float())
