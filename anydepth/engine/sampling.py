"""From logits to one token a row. The functions are of tensors, without a host read; `Sampler` holds their settings.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from typing import NamedTuple

import torch
from torch import Tensor

from anydepth.engine.philox import uniforms
from anydepth.engine.plan import Sequence
from anydepth.ops.send import send, send_tensor
from anydepth.types import Request


class Settings(NamedTuple):
    """What each of N sampled rows asks for: float64 temperature, int64 top_k (V + 1: all), float64 top_p (1: all)."""

    temperature_N: Tensor
    top_k_N: Tensor
    top_p_N: Tensor


def greedy(logits_NV: Tensor) -> Tensor:
    """The largest logit's id, [N]; ties go to the lower id."""
    return logits_NV.argmax(-1)


def processed(logits_NV: Tensor, settings: Settings, *, max_k: int | None, any_top_p: bool) -> Tensor:
    """Probabilities after temperature, top-k and top-p, renormalised; [N, V] float64.

    Top-k keeps exactly k (ties: lower id); top-p keeps the token that crosses, measured on the renormalised top-k,
    equal probabilities in ascending id. `max_k` is the largest top_k among the rows (None: no row has one).
    """
    wide = logits_NV.double()
    # The largest logit becomes 0 first: a tiny temperature then sends the others to -inf instead of overflowing.
    scaled = (wide - wide.amax(-1, keepdim=True)) / settings.temperature_N.unsqueeze(1)
    if max_k is not None:
        scaled = scaled.masked_fill(~_top_k(scaled, settings.top_k_N, max_k), float("-inf"))
    probabilities = scaled.softmax(-1)
    if any_top_p:
        ordered, ids = probabilities.sort(stable=True, dim=-1, descending=True)
        dropped = ordered.cumsum(-1).roll(1, -1) >= settings.top_p_N.unsqueeze(1)
        dropped[:, 0] = False
        kept = torch.zeros_like(probabilities).scatter_(1, ids, ordered.masked_fill(dropped, 0.0))
        # A row that asks for no top-p stays as it is, bit for bit, whoever stands beside it.
        asked = (settings.top_p_N < 1).unsqueeze(1)
        probabilities = torch.where(asked, kept / kept.sum(-1, keepdim=True), probabilities)
    return probabilities


def _top_k(scaled_NV: Tensor, top_k_N: Tensor, max_k: int) -> Tensor:
    """Mask of exactly top_k entries a row: those above the k-th largest, then equal ones in ascending id."""
    k_N1 = top_k_N.unsqueeze(1)
    cut = scaled_NV.topk(max_k, -1).values.gather(1, (k_N1 - 1).clamp(max=max_k - 1))
    above, equal = scaled_NV > cut, scaled_NV == cut
    room = k_N1 - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= room))) | (k_N1 > max_k)


def pick(probabilities_NV: Tensor, u_N: Tensor) -> Tensor:
    """The first id, ascending, whose cumulative probability exceeds u; the last possible id if none does. [N]"""
    token = (probabilities_NV.cumsum(-1) <= u_N.unsqueeze(1)).sum(-1)
    last = probabilities_NV.shape[1] - 1 - (probabilities_NV > 0).flip(-1).int().argmax(-1)
    return torch.minimum(token, last)


def raw_logprobs(logits_NV: Tensor, token_N: Tensor) -> Tensor:
    """log-softmax of the logits at the token, [N], float64."""
    wide = logits_NV.double()
    return wide.gather(1, token_N.unsqueeze(1)).squeeze(1) - wide.logsumexp(-1)


def processed_logprobs(probabilities_NV: Tensor, token_N: Tensor) -> Tensor:
    """log of the processed probability at the token, [N], float64."""
    return probabilities_NV.gather(1, token_N.unsqueeze(1)).squeeze(1).log()


class Draw(NamedTuple):
    """A row that leaves: whose it is, its slot, and which of its outputs (of its continuation) this will be."""

    sequence: Sequence
    slot: int
    output: int


class Choice(NamedTuple):
    """What each of L rows gives: its token, what its sequence feeds next, the token's logprob (None: no row reports
    one; rows that report none hold anything), and whether it was the argmax (None: no row is being scored)."""

    token_L: Tensor
    feed_L: Tensor
    logprob_L: Tensor | None
    matches_L: Tensor | None


class Sampler:
    """Sampling settings and uniforms of every slot, and the choice of tokens for rows that leave."""

    def __init__(self, slots: int, context: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.uniform_SI = torch.zeros(slots, context + 1, dtype=torch.float64, device=device)
        self.settings = Settings(
            torch.ones(slots, dtype=torch.float64, device=device),
            torch.full((slots,), vocab + 1, dtype=torch.int64, device=device),
            torch.ones(slots, dtype=torch.float64, device=device),
        )

    def seat(self, slot: int, request: Request) -> None:
        """Write a request's settings and all its uniforms (they depend on seed and output index alone)."""
        ask, settings = request.sampling, (1.0, self.vocab + 1, 1.0)
        if ask.temperature > 0 and not request.forced:
            drawn = send_tensor(torch.from_numpy(uniforms(request.seed, request.max_tokens)), self.uniform_SI.device)
            self.uniform_SI[slot, : len(drawn)] = drawn
            top_k = self.vocab + 1 if ask.top_k is None else min(ask.top_k, self.vocab)
            settings = (ask.temperature, top_k, ask.top_p)
        for pool, value in zip(self.settings, settings, strict=True):
            pool[slot].fill_(value)  # pool[slot] = value would wait for a GPU

    def choose(self, draws: List[Draw], logits_LV: Tensor) -> Choice:
        """One token for each row: its target where it is being scored, else sampled, else the argmax."""
        best = greedy(logits_LV)
        asks = [draw.sequence.request for draw in draws]
        forced = [j for j, ask in enumerate(asks) if ask.forced]
        drawn = [j for j, ask in enumerate(asks) if ask.sampling.temperature > 0 and not ask.forced]
        reported = [j for j, draw in enumerate(draws) if draw.sequence.reports_logprob]
        if not (forced or drawn or reported):
            return Choice(best, best, None, None)
        token, feed, at_forced = best.clone(), None, self._index(forced)
        logprob = logits_LV.new_zeros(len(draws), dtype=torch.float64) if reported else None
        token[at_forced] = self._index(_target(draws[j]) for j in forced)
        if drawn:
            self._draw(draws, drawn, logits_LV, token, logprob)
        raw = [j for j in reported if asks[j].forced or draws[j].sequence.logprobs_mode != "processed"]
        if logprob is not None and raw:
            at = self._index(raw)
            logprob[at] = raw_logprobs(logits_LV[at], token[at])
        if forced:
            feed = token.clone()
            feed[at_forced] = self._index(_next_input(draws[j]) for j in forced)
        return Choice(token, token if feed is None else feed, logprob, token == best if forced else None)

    def _draw(
        self,
        draws: List[Draw],
        drawn: list[int],
        logits_LV: Tensor,
        token_L: Tensor,
        logprob_L: Tensor | None,
    ) -> None:
        """Sample rows `drawn` into `token`, and write their processed logprobs (raw ones are written over it)."""
        asks = [draws[j].sequence.request.sampling for j in drawn]
        at, slots = self._index(drawn), self._index(draws[j].slot for j in drawn)
        settings = Settings(*(pool[slots] for pool in self.settings))
        max_k = max((min(ask.top_k, self.vocab) for ask in asks if ask.top_k is not None), default=None)
        chances = processed(logits_LV[at], settings, max_k=max_k, any_top_p=any(ask.top_p < 1 for ask in asks))
        u = self.uniform_SI[slots, self._index(draws[j].output for j in drawn)]
        token_L[at] = pick(chances, u)
        if logprob_L is not None:
            logprob_L[at] = processed_logprobs(chances, token_L[at])

    def _index(self, values: Iterable[int]) -> Tensor:
        return send(values, self.uniform_SI.device)


def _target(draw: Draw) -> int:
    assert draw.sequence.target is not None
    return draw.sequence.target[draw.output]


def _next_input(draw: Draw) -> int:
    """What a scored sequence feeds next: its target token, or the prompt's last token where a continuation ends."""
    ends = draw.output + 1 == len(draw.sequence.target or ())
    return draw.sequence.request.prompt_ids[-1] if ends else _target(draw)
