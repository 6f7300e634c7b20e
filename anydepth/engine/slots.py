"""Every tensor that belongs to a request, by slot: hidden rows, policy states, sampling settings, K/V pages.

A request's state goes in and out whole: what `save` keeps and `Seat` brings back is everything that the next segment
reads. Shape suffixes: S slots, W states held for them, others as in `models.base`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from anydepth.engine.plan import Copy, Grow, Move, Row, Save, Seat, Sequence
from anydepth.engine.sampling import Sampler
from anydepth.exits.base import Policy
from anydepth.models.base import Model
from anydepth.ops.fill import Fill
from anydepth.ops.kv import KVMap, KVPool
from anydepth.ops.send import send, send_tensor


class Saved(NamedTuple):
    """A preempted request in host memory: its K/V in all planes, its rows of the pools, its prompt chunk on the way."""

    kv: Tensor
    rows: list[Tensor]
    state: Tensor | None
    chunk: Tensor | None


class Slots:
    """Pools of `slots` rows on one device. `context` is the most positions a slot may hold.

    h_Wd: what positions carry into their next segment, the last `states_per_slot` of each slot in its own
    `states_per_slot` rows, see `place`. kept_h_Sd, kept_depth_S: the state a token will be read from
    where that is not its latest one, and its depth (0: none yet).
    """

    def __init__(
        self,
        model: Model,
        fill: Fill,
        *,
        slots: int,
        pages: int,
        page_size: int,
        context: int,
        states_per_slot: int = 1,
    ) -> None:
        self.model, self.device, self.states_per_slot = model, model.device, states_per_slot
        shape = model.shape
        self.pool = KVPool(shape, fill.planes(shape), pages, page_size, dtype=model.dtype, device=model.device)
        self.map = KVMap(self.pool, slots, context)
        self.h_Wd = torch.zeros(slots * states_per_slot, shape.hidden, dtype=model.dtype, device=model.device)
        self.kept_h_Sd = torch.zeros(slots, shape.hidden, dtype=model.dtype, device=model.device)
        self.kept_depth_S = torch.zeros(slots, dtype=torch.int64, device=model.device)
        self.states: dict[Policy, Tensor] = {}
        self.former: dict[Policy, Tensor] = {}  # [S, tallies]: what a slot's tallies had when its tenant came
        self.chunks: dict[int, Tensor] = {}
        self.sampler = Sampler(slots, context, shape.vocab, model.device)

    def __len__(self) -> int:
        return len(self.kept_h_Sd)

    def place(self, slot: int, position: int) -> int:
        """Where h_Wd has the state of a slot's position."""
        return slot * self.states_per_slot + position % self.states_per_slot

    def places(self, rows: Iterable[Row]) -> list[int]:
        """Where h_Wd has the states of all their positions."""
        held = self.states_per_slot
        return [row.slot * held + at % held for row in rows for at in range(row.start, row.start + row.length)]

    def index(self, values: Iterable[int]) -> Tensor:
        return send(values, self.device)

    def move(self, moves: Iterable[Move]) -> None:
        """Carry out what the scheduler decided about slots and pages, in its order."""
        for move in moves:
            match move:
                case Seat(sequence, slot, pages):
                    self._seat(sequence, slot, pages)
                case Save(sequence, slot, pages):
                    sequence.saved = self._save(sequence, slot, pages)
                case Grow(slot, at, pages):
                    self.map.give(slot, at, pages)
                case Copy(source, target):
                    self._copy(source, target)

    def tallied(self, policy: Policy, slot: int) -> dict[str, int]:
        """What the policy has tallied of the request in a slot, also before it was preempted."""
        state, former = self.states[policy][slot].tolist(), self.former[policy][slot].tolist()
        named = zip(policy.tallies.items(), former, strict=True)
        return {name: int(state[column] - before) for (name, column), before in named}

    def vacate(self, slot: int) -> None:
        """Let go of the chunk that an aborted request had on its way; what is left of it is written over."""
        self.chunks.pop(slot, None)

    def prompt_rows(self, rows: Iterable[Row]) -> list[Tensor]:
        """What prompt rows carry into their segment, one tensor a row: embeddings, or what `keep_prompts` kept."""
        return [
            self.model.embed(self.index(row.sequence.request.prompt_ids[row.start : row.start + row.length]))
            if row.depth == 1
            else self.chunks.pop(row.slot)
            for row in rows
        ]

    def keep_prompts(self, rows: Iterable[Row], h_Pd: Tensor) -> None:
        """Keep the chunks that go deeper."""
        start = 0
        for row in rows:
            if row.depth < self.model.shape.segments:
                self.chunks[row.slot] = h_Pd[start : start + row.length]
            start += row.length

    def rows(self) -> list[Tensor]:
        """The pools that hold one row a slot, but for the policies' and the sampler's."""
        return [self.h_Wd.view(len(self), -1), self.kept_h_Sd, self.kept_depth_S]

    def _seat(self, sequence: Sequence, slot: int, pages: tuple[int, ...]) -> None:
        """Write what a request brings into its slot. Nothing of the slot's former tenant is read again."""
        request = sequence.request
        self.map.seat(slot, pages)
        self.sampler.seat(slot, request)
        if sequence.saved is not None:
            self._bring_back(sequence, slot, pages)
            return
        last = len(request.prompt_ids) - 1
        self.h_Wd[self.place(slot, last)] = self.model.embed(self.index([request.prompt_ids[last]]))[0]
        policy = request.policy
        assert isinstance(policy, Policy)
        if policy.needs != "nothing":
            numbers = policy.parameters(request.sampling, request.bounds, self.model.shape.segments)
            state = policy.start(send_tensor(torch.tensor([numbers], dtype=torch.float64), self.device))
            self._write_state(policy, slot, state[0])

    def _write_state(self, policy: Policy, slot: int, state: Tensor) -> None:
        """A policy's state of one slot; columns that are tallied over all requests go on."""
        pool = self.states.setdefault(policy, state.new_zeros(len(self.kept_h_Sd), len(state)))  # padding has a row
        former = self.former.setdefault(policy, state.new_zeros(len(pool), len(policy.tallies)))
        for n, column in enumerate(policy.tallies.values()):
            former[slot, n] = pool[slot, column] - state[column]
            state[column] = pool[slot, column]
        pool[slot] = state

    def _save(self, sequence: Sequence, slot: int, pages: tuple[int, ...]) -> Saved:
        policy = sequence.request.policy
        assert isinstance(policy, Policy)
        state = None
        if policy in self.states:
            state = self.states[policy][slot].cpu().clone()
            for name, count in self.tallied(policy, slot).items():
                state[policy.tallies[name]] = count
        chunk = self.chunks.pop(slot, None)
        kv = self.pool.data.index_select(2, self.map.storage(pages)).cpu()
        rows = [pool[slot].cpu().clone() for pool in self.rows()]
        return Saved(kv, rows, state, None if chunk is None else chunk.cpu().clone())

    def _bring_back(self, sequence: Sequence, slot: int, pages: tuple[int, ...]) -> None:
        saved, policy = sequence.saved, sequence.request.policy
        self.pool.data.index_copy_(2, self.map.storage(pages), saved.kv.to(self.device))
        for pool, row in zip(self.rows(), saved.rows, strict=True):
            pool[slot] = row.to(self.device)
        if saved.state is not None:
            self._write_state(policy, slot, saved.state.to(self.device))  # type: ignore[arg-type]
        if saved.chunk is not None:
            self.chunks[slot] = saved.chunk.to(self.device)
        sequence.saved = None

    def _copy(self, source: int, target: int) -> None:
        at = self.map.storage((source, target)).view(self.pool.planes, 2, -1)
        self.pool.data.index_copy_(2, at[:, 1].flatten(), self.pool.data.index_select(2, at[:, 0].flatten()))
