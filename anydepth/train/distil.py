"""What a head learns at one exit: the full-depth model's distribution (Hinton, Vinyals and Dean 2015, forward KL), and,
by its probe, whether this exit says what full depth would.

A head's loss at a position is  T^2 KL(p || q) + ce_weight CE,  p and q being teacher and head at temperature T and CE
the cross-entropy of the data's own next token. Its gradient in the logits is known, T (q - p) + ce_weight (q_1 - 1),
so logits are made, used and forgotten some rows at a time: the graph that autograd would keep of five vocabularies is
ten times the model, and on CPUs the products are faster without it. A shortlist's last column is taught the
probability of everything outside the list.

Shape suffixes: A positions, n of them at a time, d hidden size, V vocabulary, C columns of a head (V, or S listed
tokens and "any other"), E exits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anydepth.models.llama import Llama
from anydepth.ops.linear import linear, pack
from anydepth.train.trained_head import TrainedHead

_CHUNK_BYTES = {"cpu": 24 << 20, "cuda": 1 << 30}  # on CPUs: cache, and what malloc keeps instead of returning


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What of the loss can be chosen."""

    temperature: float = 1.0
    ce_weight: float = 0.0


class Unembedding(NamedTuple):
    """The model's own, for products with rows (d to V) and with their gradients (V to d)."""

    d_to_V: Tensor
    V_to_d: Tensor

    @classmethod
    def packed(cls, model: Llama) -> Unembedding:
        """Two copies in the order in which a CPU multiplies fastest; elsewhere the matrix itself."""
        with torch.no_grad():
            return cls(pack(model.head), pack(model.head.t()))


MEASURED = ("kl", "ce", "bce", "agreement", "answers", "probe_accuracy")


class Sums(NamedTuple):
    """Sums over the positions seen, one row for each name in MEASURED, [6, E] in float64: losses (bce is the probe's),
    and how many rows the head says as full depth does, may answer, and its probe judges rightly. Beside them what the
    probes say, and which rows agree."""

    total_6E: Tensor
    probe_AE: Tensor
    agrees_AE: Tensor


class _Teacher(NamedTuple):
    """What full depth says at n rows: probabilities at T, their summed p log p, and the likeliest token."""

    p_nV: Tensor
    negentropy_n: Tensor
    top_n: Tensor


def distil(
    heads: Sequence[TrainedHead],
    model: Llama,
    states: Sequence[Tensor],
    targets_A: Tensor,
    *,
    goal: Goal,
    weights: Sequence[float],
    share: float | None,
    unembedding: Unembedding | None = None,
) -> Sums:
    """Losses of all heads on the states of their exits; the last state is full depth's.

    `share`: what one position counts in the loss that is differentiated, whose gradients are added to the parameters'
    `.grad`. None: no gradients. The frozen model gets none either way. `unembedding`: the model's, if packed.
    """
    frozen = unembedding or Unembedding(model.head, model.head.t())
    counts = [0.0 if share is None else share * weight for weight in weights]
    with torch.set_grad_enabled(share is not None):
        works = [_Work(*each, model, frozen) for each in zip(heads, states[:-1], counts, strict=True)]
    wide, device, vocab = heads[0].mean.dtype, targets_A.device, model.shape.vocab
    size = max(16, _CHUNK_BYTES.get(device.type, 1 << 28) // (vocab * heads[0].mean.element_size()))
    rooms = torch.empty(2, size * (vocab + 1), dtype=wide, device=device)
    with torch.no_grad():
        for start in range(0, len(targets_A), size):
            rows = slice(start, min(start + size, len(targets_A)))
            teacher = _teach(linear(model.final_norm(states[-1][rows]), frozen.d_to_V), goal.temperature, rooms[0])
            for work in works:
                work.add(rows, teacher, targets_A[rows], goal, rooms[1], gradient=share is not None)
    totals = [work.finish(share) for work in works]
    probes = torch.stack([work.probe_A.detach() for work in works], 1)
    return Sums(torch.stack(totals, 1), probes, torch.stack([work.agrees_A for work in works], 1))


class _Work:
    """One head's share of a `distil`. `counts`: what a position counts in the loss of the head."""

    def __init__(self, head: TrainedHead, h_Ad: Tensor, counts: float, model: Llama, frozen: Unembedding) -> None:
        self.head, self.counts, h_Ad = head, counts, h_Ad.to(head.mean.dtype)
        self.x_Ad, self.probe_A = head.features(h_Ad, model.eps), head.probe_logits(h_Ad)
        self.dx_Ad = torch.zeros_like(self.x_Ad)
        self.agrees_A = torch.empty(len(h_Ad), dtype=torch.bool, device=h_Ad.device)
        self.total_4 = torch.zeros(4, dtype=torch.float64, device=h_Ad.device)
        self.column_V = _column_of(head, model.shape.vocab)
        self.other = head.tensors.get("other")
        self.there, self.back, self.dtype = *frozen, model.dtype
        if self.other is not None:
            listed = model.head.index_select(1, head.tensors["ids"]).to(self.other)
            self.there = torch.cat((listed, head.own("other").detach()[:, None]), 1)
            self.back, self.dtype = self.there.t(), h_Ad.dtype

    def add(
        self, rows: slice, teacher: _Teacher, targets_n: Tensor, goal: Goal, room: Tensor, *, gradient: bool
    ) -> None:
        """Measure some rows, and take their gradients in the features."""
        z_nC = linear(self.x_Ad[rows].to(self.dtype), self.there).to(room.dtype)
        measured_4, self.agrees_A[rows], dz_nC = _columns(
            self.head, z_nC, teacher, targets_n, self.column_V, goal, room
        )
        self.total_4 += measured_4
        if gradient:
            self.dx_Ad[rows] = linear(dz_nC.to(self.dtype), self.back) * self.counts
            if self.other is not None:
                change = self.x_Ad[rows].t() @ dz_nC[:, -1] * self.head.units["other"] * self.counts
                self.other.grad = change if self.other.grad is None else self.other.grad.add_(change)

    def finish(self, share: float | None) -> Tensor:
        """The six sums; with `share`, the gradients of all parameters, the probe's included."""
        with torch.set_grad_enabled(share is not None):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                self.probe_A, self.agrees_A.to(self.probe_A), reduction="sum"
            )
        if share is not None:
            torch.autograd.backward([self.x_Ad, loss * share], [self.dx_Ad, None])
        kl, ce, agree, answers = self.total_4
        right = ((self.probe_A.detach() > 0) == self.agrees_A).sum()
        return torch.stack([kl, ce, loss.detach().double(), agree, answers, right.double()])


def _column_of(head: TrainedHead, vocab: int) -> Tensor | None:
    """[V]: the column of every token, "any other"'s for those that a shortlist leaves out; None: its own."""
    if head.kind != "shortlist":
        return None
    ids = head.tensors["ids"]
    columns = torch.full((vocab,), len(ids), device=ids.device)
    return columns.index_copy(0, ids, torch.arange(len(ids), device=ids.device))


def _teach(z_nV: Tensor, temperature: float, room: Tensor) -> _Teacher:
    z_nV = z_nV.to(room.dtype)
    top_n = z_nV.argmax(-1)
    if temperature != 1:
        z_nV = z_nV / temperature
    p_nV = _softmax(z_nV, room)
    log_sum_n = _log_normaliser(z_nV.amax(-1), p_nV)
    return _Teacher(p_nV, z_nV.mul_(p_nV).sum(1) - log_sum_n, top_n)


def _softmax(z_nC: Tensor, room: Tensor) -> Tensor:
    """Written into room that is used again and again: a fresh tensor of this size costs its page faults, 15 ms in 25 MB
    where the exponentials take 3."""
    return torch.softmax(z_nC, -1, out=room[: z_nC.numel()].view(z_nC.shape))


def _log_normaliser(top_n: Tensor, p_nC: Tensor) -> Tensor:
    """log sum exp of the logits whose largest is `top` and whose softmax is `p`, without more exponentials."""
    return top_n - p_nC.amax(-1).log()


def _columns(
    head: TrainedHead,
    z_nC: Tensor,
    teacher: _Teacher,
    targets_n: Tensor,
    columns_V: Tensor | None,
    goal: Goal,
    room: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(summed KL, CE, agreement and answers; which rows agree; the gradient of the loss in the logits). What stood in
    `z_nC` is gone, the gradient lies in `room`."""
    p, negentropy, wanted, target = teacher.p_nV, teacher.negentropy_n, teacher.top_n, targets_n
    top_n = z_nC.amax(-1)
    answers_n = torch.ones_like(top_n, dtype=torch.bool)
    if columns_V is not None:
        listed = p.index_select(1, head.tensors["ids"])
        p = torch.cat((listed, (1 - listed.sum(1, keepdim=True)).clamp(min=0)), 1)
        negentropy = torch.special.xlogy(p, p).sum(1)
        wanted, target = columns_V[wanted], columns_V[target]
        answers_n = z_nC[:, :-1].amax(-1) >= z_nC[:, -1]
    agrees_n = (z_nC.gather(1, wanted[:, None])[:, 0] >= top_n) & answers_n
    if columns_V is not None:
        agrees_n &= wanted < z_nC.shape[1] - 1
    t = goal.temperature
    q = _softmax(z_nC if t == 1 else z_nC / t, room)
    q_1 = q if t == 1 else torch.softmax(z_nC, -1)
    ce_n = _log_normaliser(top_n, q_1) - z_nC.gather(1, target[:, None])[:, 0]
    kl_n = negentropy + _log_normaliser(top_n / t, q) - z_nC.mul_(p).sum(1) / t
    measured = torch.stack([kl_n.sum(), ce_n.sum(), agrees_n.sum(), answers_n.sum()]).double()
    if not goal.ce_weight:
        dz = q.sub_(p)
        return measured, agrees_n, dz if t == 1 else dz.mul_(t)
    hard = q_1 * goal.ce_weight
    hard.scatter_add_(1, target[:, None], hard.new_full((len(hard), 1), -goal.ce_weight))
    return measured, agrees_n, q.sub_(p).mul_(t).add_(hard)


def auc(score_A: Tensor, right_A: Tensor) -> float:
    """Probability that a right row scores above a wrong one, ties half; nan where all rows are alike."""
    _, of_A, count = torch.unique(score_A.double(), return_inverse=True, return_counts=True)
    rank_A = (count.cumsum(0) - (count - 1) / 2.0)[of_A]
    right, wrong = int(right_A.sum()), int((~right_A).sum())
    if not right or not wrong:
        return float("nan")
    return float((rank_A[right_A].sum() - right * (right + 1) / 2) / (right * wrong))
