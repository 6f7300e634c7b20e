"""Documents of any length packed into one batch without padding, and a frozen model's states at several layers.

Shape suffixes: N tokens of a batch, A positions that are trained on, d hidden size; attention as in `models/base.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from anydepth.models.llama import Llama
from anydepth.train.prepared import Prepared


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Documents one after the other, each without its last token, which predicts nothing. `lengths` are theirs;
    `trained_A` index the tokens that predict `targets_A`."""

    ids_N: Tensor
    lengths: tuple[int, ...]
    trained_A: Tensor
    targets_A: Tensor

    @classmethod
    def of(cls, data: Prepared, documents: Sequence[int], *, mask_prompts: bool, device: torch.device) -> Pack:
        """With `mask_prompts` only the tokens of answers are targets."""
        ids, trained, targets, start = [], [], [], 0
        for index in documents:
            document, prompt = data.document(index)
            first = prompt if mask_prompts else 1  # the first token that is predicted
            ids.append(document[:-1])
            targets.append(document[first:])
            trained.append(torch.arange(first - 1, len(document) - 1) + start)
            start += len(document) - 1
        whole = (torch.cat(parts).to(device) for parts in (ids, trained, targets))
        ids_N, trained_A, targets_A = whole
        return cls(ids_N=ids_N, lengths=tuple(len(part) for part in ids), trained_A=trained_A, targets_A=targets_A)


class PackedKV:
    """The model's `KV` for packed documents: each position sees its own document up to itself."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._lengths = list(lengths)
        self.positions = torch.cat([torch.arange(length, device=device) for length in lengths])

    def attend(self, layer: int, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        """[N, H, D]."""
        parts = []
        grouped = q_NHD.shape[1] != k_NGD.shape[1]
        for own in zip(*(x.split(self._lengths) for x in (q_NHD, k_NGD, v_NGD)), strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in own)
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            parts.append(mixed[0].transpose(0, 1))
        return torch.cat(parts)


@torch.no_grad()
def exit_states(model: Llama, pack: Pack, exits: Sequence[int]) -> list[Tensor]:
    """States [A, d] of the trained positions after each of the exit layers and after the last layer, in one pass."""
    kv = PackedKV(pack.lengths, model.device)
    h_Nd, states, done = model.embed(pack.ids_N), [], 0
    for layer in (*exits, model.shape.layers):
        h_Nd, done = model.run_layers(range(done, layer), h_Nd, kv), layer
        states.append(h_Nd.index_select(0, pack.trained_A))
    return states


class Order:
    """Which documents stand in micro-batch i = 0, 1, ...: epoch after epoch, each shuffled by the seed and packed until
    the next document would exceed `tokens`. A function of its arguments alone, so a resumed run needs no state."""

    def __init__(self, data: Prepared, *, tokens: int, seed: int) -> None:
        self._documents = data.documents(held_out=False)
        self._lengths, self._tokens, self._seed = data.lengths(), tokens, seed
        self._epoch, self._first, self._packs = 0, 0, list(self._of_epoch(0))

    def __call__(self, index: int) -> list[int]:
        if index < self._first:
            self._epoch, self._first, self._packs = 0, 0, list(self._of_epoch(0))
        while index >= self._first + len(self._packs):
            self._first += len(self._packs)
            self._epoch += 1
            self._packs = list(self._of_epoch(self._epoch))
        return self._packs[index - self._first]

    @property
    def packs_per_epoch(self) -> int:
        """Of the epoch asked for last."""
        return len(self._packs)

    def _of_epoch(self, epoch: int) -> Iterator[list[int]]:
        order = list(self._documents)
        Random(f"heads {self._seed} {epoch}").shuffle(order)
        yield from in_packs(order, self._lengths, tokens=self._tokens)


def in_packs(documents: Sequence[int], lengths: Sequence[int], *, tokens: int) -> Iterator[list[int]]:
    """Documents in this order, in groups of at most `tokens` together (one that is longer stands alone)."""
    pack: list[int] = []
    room = tokens
    for index in documents:
        if pack and lengths[index] > room:
            yield pack
            pack, room = [], tokens
        pack.append(index)
        room -= lengths[index]
    if pack:
        yield pack
