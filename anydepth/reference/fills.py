"""What deeper planes hold at a position that left early: one class a fill, each with its own K/V, or with none.

All three have the same three methods: `prefill(ids)` runs prompt positions through every segment and gives the last
one's state after segment R (None for no ids); `decode(token, row)` runs one more position and gives the state the row
reads out; `planes()` gives K and V, [layers of the plane, positions, K, C] each, K after RoPE, one pair a plane.
`executed` and `prefilled` count position x segment run for decode rows and for the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anydepth.reference.model import KV, Model
from anydepth.reference.policies import Row


class Full:
    """Everything is computed, only the readout is chosen. No K/V is kept: every token recomputes the whole sequence."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.ids: list[int] = []
        self.executed = self.prefilled = 0

    def prefill(self, ids: Sequence[int]) -> Tensor | None:
        self.ids += ids
        self.prefilled += len(ids) * self.model.segments
        return self.model.dense(self.ids)[0][-1][-1] if ids else None

    def decode(self, token: int, row: Row) -> Tensor:
        self.ids.append(token)
        self.executed += self.model.segments
        states, _ = self.model.dense(self.ids)
        for r, h in enumerate(states, start=1):
            if row.leaves(r, self.model.gate_logit(h[-1])):
                return h[-1]
        raise AssertionError("no policy goes past R")

    def planes(self) -> list[KV]:
        return self.model.dense(self.ids)[1]


class Serial:
    """Position by position; K/V in a dict: `kv[plane, layer]` is the list of (K, V) of positions 0, 1, .., [K, C]."""

    looped = True

    def __init__(self, model: Model) -> None:
        if model.looped != self.looped:
            raise ValueError(f"{type(self).__name__} is a fill of {'looped' if self.looped else 'layered'} models")
        self.model, self.length = model, 0
        self.kv: dict[tuple[int, int], list[KV]] = {}
        self.executed = self.prefilled = 0

    def plane_of(self, r: int) -> int:
        return r

    def loop(self, r: int, h: Tensor, position: int) -> Tensor:
        """Loop r of one position: writes its K/V into the loop's plane, attends to that plane's positions so far."""
        model = self.model
        h_1D = h[None]
        for layer in model.layers_of[r - 1]:
            q, k, v = model.qkv(layer, h_1D, [position])
            slots = self.kv.setdefault((self.plane_of(r), layer), [])
            slots[position : position + 1] = [(k[0], v[0])]  # appends, or overwrites this position's earlier entry
            keys, values = torch.stack([k for k, _ in slots]), torch.stack([v for _, v in slots])
            h_1D = model.after_attention(layer, h_1D, model.attend(q, keys, values))
        return model.end_of_segment(h_1D)[0]

    def prefill(self, ids: Sequence[int]) -> Tensor | None:
        h = None
        for token in ids:
            h = self.model.embed([token])[0]
            for r in range(1, self.model.segments + 1):
                h = self.loop(r, h, self.length)
            self.length += 1
        self.prefilled += len(ids) * self.model.segments
        return h

    def decode(self, token: int, row: Row) -> Tensor:
        h = self.model.embed([token])[0]
        for r in range(1, self.model.segments + 1):
            h = self.loop(r, h, self.length)
            if row.leaves(r, self.model.gate_logit(h)):
                break
        self.executed += row.depth
        self.finish(row.depth, h)
        self.length += 1
        return h

    def finish(self, depth: int, h: Tensor) -> None:
        """What happens to the planes deeper than `depth` at the position that has just left, with state h."""

    def planes(self) -> list[KV]:
        planes = []
        for plane in sorted({plane for plane, _ in self.kv}):
            layers = [self.kv[plane, layer] for layer in self.model.layers_of[plane - 1]]
            keys = torch.stack([torch.stack([k for k, _ in slots]) for slots in layers])
            values = torch.stack([torch.stack([v for _, v in slots]) for slots in layers])
            planes.append((keys, values))
        return planes


class LastExited(Serial):
    """A copy of the position's plane-d K/V, layer by layer, in each plane d+1..R."""

    def finish(self, depth: int, h: Tensor) -> None:
        for plane in range(depth + 1, self.model.segments + 1):
            for layer in range(self.model.num_layers):
                source = self.kv[depth, layer][self.length]
                self.kv.setdefault((plane, layer), []).append(source)


class Shared(Serial):
    """One plane, overwritten at every loop: a later token reads an earlier token's last K/V at all depths."""

    def plane_of(self, r: int) -> int:
        return 1


class Deferred(Full):
    """What `full` reads, counting only what somebody needed; every plane is given as `full` has it."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.depths: list[int] = []

    def decode(self, token: int, row: Row) -> Tensor:
        h = super().decode(token, row)
        self.depths.append(row.depth)
        self.executed = sum(deferred_depths(self.depths))
        return h


class Project(Serial):
    """In each skipped layer what its own input norm, K/V projection and RoPE make of the state that was read."""

    looped = False

    def finish(self, depth: int, h: Tensor) -> None:
        for r in range(depth + 1, self.model.segments + 1):
            for layer in self.model.layers_of[r - 1]:
                _, k, v = self.model.qkv(layer, h[None], [self.length])
                self.kv.setdefault((r, layer), []).append((k[0], v[0]))


FILLS = {"full": Full, "last_exited": LastExited, "shared": Shared, "deferred": Deferred, "project": Project}


def deferred_depths(depths: Sequence[int], *, most: int | None = None, deepest: int | None = None) -> list[int]:
    """How deep `deferred` has run each of the decode rows of these readout depths, as the last of them leaves: as deep
    as the deepest of itself and the later ones. (1, 3, 2) -> [3, 3, 2]. Where `most` rows shallower than `deepest` wait
    as a token leaves, and another one comes, all of them run as deep as that."""
    ran: list[int] = []
    for n, depth in enumerate(depths):
        ran = [max(depth, before) for before in [*ran, depth]]
        if most is not None and deepest is not None and n + 1 < len(depths):
            waiting = sum(depth < deepest for depth in ran)
            ran = [max(deepest, before) if waiting >= most else before for before in ran]
    return ran
