"""Paged keys and values, a plane a segment.

One storage index stands for one position of one plane: `plane * positions + page * page_size + offset`. The pages of a
request are the same in every plane, so copying between planes moves along the index by a multiple of `positions`.

| offsets in a plane             | what stands there                                               |
|--------------------------------|-----------------------------------------------------------------|
| [0, page_size)                 | the null page; plane 1's is zero, read where a row has no context |
| [page * size, (page+1) * size) | page `page`, 1 <= page <= pages                                 |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anydepth.ops.attend import attend_chunk, attend_rows, causal_mask
from anydepth.ops.send import send
from anydepth.types import Shape


class KVPool:
    """K/V of every layer: `data[layer]` is [2, planes * positions, G * D] (keys, then values).

    A looped model keeps `planes` of them per layer; a layered model's layers belong to one segment each, so planes is 1
    there and a segment's plane is simply its layers.
    """

    def __init__(
        self, shape: Shape, planes: int, pages: int, page_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.planes, self.pages, self.page_size = planes, pages + 1, page_size  # with the null page
        self.positions = self.pages * page_size
        self.groups, self.head_dim = shape.kv_heads, shape.head_dim
        self.data = torch.empty(
            shape.layers, 2, planes * self.positions, self.groups * self.head_dim, dtype=dtype, device=device
        )
        self.data[:, :, :page_size] = 0
        self.scratch = (self.pages - 1) * page_size  # in the last page, which the runner may keep for itself
        # Row d: how far each plane lies from plane d. One that is not deeper counts as plane d itself, which is then
        # written over with its own values.
        planes_R = torch.arange(planes, device=device)
        depths = torch.arange(shape.segments + 1, device=device)
        self._offset = (depths - 1) * self.positions if planes > 1 else 0 * depths
        self._deeper = (planes_R - torch.arange(-1, planes, device=device).unsqueeze(1)).clamp(min=0) * self.positions

    def offset(self, depth_N: Tensor) -> Tensor:
        """Where the plane of segment `depth` begins."""
        return self._offset.index_select(0, depth_N)

    def write(self, layer: int, storage_N: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> None:
        """Store keys and values of one layer."""
        keys, values = self.data[layer].unbind()
        keys.index_copy_(0, storage_N, k_NGD.flatten(1))
        values.index_copy_(0, storage_N, v_NGD.flatten(1))

    def copy_deeper(self, storage_N: Tensor, depth_N: Tensor) -> None:
        """Copy each row's K/V of plane `depth`, layer by layer, into every deeper plane."""
        source_NR = storage_N.unsqueeze(1).expand(-1, self.planes)
        target_NR = source_NR + self._deeper.index_select(0, depth_N)
        self.data.index_copy_(2, target_NR.view(-1), self.data.index_select(2, source_NR.reshape(-1)))


class Chunk(NamedTuple):
    """Consecutive positions of one request: how many, the storage of its context up to the last of them (a slice where
    its pages lie in a row), and the mask [n, T] (None for a single position, which sees all of it)."""

    positions: int
    storage_T: Tensor | slice
    mask_nT: Tensor | None


class Together(NamedTuple):
    """Requests with as many consecutive positions each: how many in all, and of every request the storage of its
    context, padded with the null page, and the mask."""

    positions: int
    storage_BT: Tensor
    mask_B1nT: Tensor


class TurnKV:
    """What the positions of one turn write and see: `models.base.KV` over a KVPool. Valid for one call of `segment`.
    `parts` take the positions one after the other."""

    def __init__(self, pool: KVPool, positions_N: Tensor, write_N: Tensor, parts: Sequence[Chunk | Together]) -> None:
        self.pool, self.positions, self.write_N, self.parts = pool, positions_N, write_N, parts

    def attend(self, layer: int, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        pool, both = self.pool, self.pool.data[layer]
        keys, values = both.unbind()
        keys.index_copy_(0, self.write_N, k_NGD.flatten(1))
        values.index_copy_(0, self.write_N, v_NGD.flatten(1))
        done, mixed = 0, []
        for part in self.parts:
            count, storage, mask = part
            q_nHD, done = q_NHD[done : done + count], done + count
            if isinstance(part, Together):
                seen = both.index_select(1, part.storage_BT.view(-1))
                k, v = seen.view(2, *part.storage_BT.shape, pool.groups, pool.head_dim).unbind()
                mixed.append(attend_rows(q_nHD, k, v, mask))
                continue
            if isinstance(storage, slice):
                k, v = keys[storage], values[storage]
            else:
                k, v = keys.index_select(0, storage), values.index_select(0, storage)
            k, v = (x.view(-1, pool.groups, pool.head_dim) for x in (k, v))
            mixed.append(attend_chunk(q_nHD, k, v, mask))
        return join(mixed)


class Group(NamedTuple):
    """Requests that run together: slots, first positions and depths, positions of each, and the largest context."""

    slots_B: Tensor
    starts_B: Tensor
    depth_B: Tensor
    length: int
    context: int


class KVMap:
    """Where each slot's positions are stored, and the TurnKV of a turn. `table[slot, position]` is an index of plane 1;
    0, the null page, where the slot has no page."""

    def __init__(self, pool: KVPool, slots: int, max_positions: int) -> None:
        self.pool = pool
        device = pool.data.device
        self.table = torch.zeros(slots, max_positions, dtype=torch.int64, device=device)
        self._arange = torch.arange(max_positions, device=device)
        self._open, self._shut = torch.tensor([0.0, float("-inf")], dtype=pool.data.dtype, device=device).unbind()
        self._run: dict[int, tuple[int, int]] = {}  # slot -> (first page, pages), if its pages lie in a row

    def seat(self, slot: int, pages: Sequence[int]) -> None:
        """Give a slot its pages, in the order of positions."""
        self._run[slot] = (pages[0], 0)
        self.give(slot, 0, pages)

    def give(self, slot: int, at: int, pages: Sequence[int]) -> None:
        """Make `pages` the slot's pages from its `at`-th on."""
        size = self.pool.page_size
        starts = send(pages, self.table.device).unsqueeze(1) * size
        storage = (starts + self._arange[:size]).view(-1)[: self.table.shape[1] - at * size]
        self.table[slot, at * size : at * size + len(storage)] = storage
        first, count = self._run.get(slot, (0, -1))
        if at == count and list(pages) == list(range(first + count, first + count + len(pages))):
            self._run[slot] = (first, count + len(pages))
        else:
            self._run.pop(slot, None)

    def place(self, slot: int, position: int) -> int:
        """A slot's position as one number, for `at`."""
        return slot * self.table.shape[1] + position

    def at(self, places_N: Tensor, depth_N: Tensor) -> Tensor:
        """Where the plane of `depth` holds each place, [N]."""
        return self.table.view(-1).index_select(0, places_N) + self.pool.offset(depth_N)

    def storage(self, pages: Sequence[int]) -> Tensor:
        """Indices of all positions of these pages in every plane, [planes * pages * page_size]."""
        starts = send(pages, self.table.device).unsqueeze(1) * self.pool.page_size
        plane = (starts + self._arange[: self.pool.page_size]).view(-1)
        planes = torch.arange(self.pool.planes, device=plane.device).unsqueeze(1) * self.pool.positions
        return (planes + plane).view(-1)

    def turn(self, groups: Sequence[Group], chunks: Sequence[tuple[int, int, int, int]]) -> TurnKV:
        """The TurnKV of groups of requests that run together, and then of chunks (slot, start, positions, depth)."""
        known: list[tuple[Tensor, Tensor, Sequence[Chunk | Together]]] = [self._group(group) for group in groups]
        if chunks:
            known.append(self.chunks(chunks))
        positions, writes, parts = zip(*known, strict=True) if known else ((), (), ())
        return TurnKV(self.pool, join(positions), join(writes), [part for several in parts for part in several])

    def _group(self, group: Group) -> tuple[Tensor, Tensor, list[Together]]:
        slots_B, starts_B, depth_B, length, context = group
        positions_Bn = starts_B.unsqueeze(1)
        if length > 1:
            positions_Bn = positions_Bn + self._arange[:length]
        write_N, together = self.together(slots_B, positions_Bn, depth_B, context)
        return positions_Bn.view(-1), write_N, [together]

    def together(
        self, slots_B: Tensor, positions_Bn: Tensor, depth_B: Tensor, context: int, ended_B1: Tensor | None = None
    ) -> tuple[Tensor, Together]:
        """(where each position writes [N], what it sees) of requests whose largest context is `context`. Those that
        `ended_B1` says so of write to the pool's scratch page."""
        seen_BnT = self._arange[:context] <= positions_Bn.unsqueeze(2)
        table = self.table[:, :context].index_select(0, slots_B) + self.pool.offset(depth_B).unsqueeze(1)
        write_Bn = table.gather(1, positions_Bn)
        if ended_B1 is not None:
            write_Bn = write_Bn.masked_fill(ended_B1, self.pool.scratch)
        # Beyond a request's length its pages hold anything, so it reads the null page there: zeroed by length.
        storage_BT = table * seen_BnT[:, -1]
        mask = torch.where(seen_BnT, self._open, self._shut).unsqueeze(1)
        return write_Bn.view(-1), Together(positions_Bn.numel(), storage_BT, mask)

    def chunks(self, chunks: Sequence[tuple[int, int, int, int]]) -> tuple[Tensor, Tensor, list[Chunk]]:
        """(positions [P], where they write [P], what they see) of chunks, (slot, start, positions, depth) each."""
        positions = [self._arange[start : start + rows] for _, start, rows, _ in chunks]
        writes = [self.table[slot, start : start + rows] + self._plane(depth) for slot, start, rows, depth in chunks]
        return join(positions), join(writes), [self.chunk(*chunk) for chunk in chunks]

    def chunk(self, slot: int, start: int, rows: int, depth: int) -> Chunk:
        end, plane = start + rows, self._plane(depth)
        if (run := self._run.get(slot)) is not None:
            begin = run[0] * self.pool.page_size + plane
            storage: Tensor | slice = slice(begin, begin + end)
        else:
            storage = self.table[slot, :end] + plane
        mask = causal_mask(rows, end, self.pool.data.dtype, self.table.device) if rows > 1 else None
        return Chunk(rows, storage, mask)

    def _plane(self, depth: int) -> int:
        return (depth - 1) * self.pool.positions if self.pool.planes > 1 else 0


def join(parts: Sequence[Tensor]) -> Tensor:
    """Their rows one after the other; a single tensor as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
