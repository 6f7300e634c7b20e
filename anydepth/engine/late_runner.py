"""The runner of late signals, `delayed` and `exact`: nothing of a turn is read before it has arrived.

Shape suffixes: B decode rows, L rows that leave as the turn begins, S slots; others as in `models.base`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anydepth.engine.completions import Buffers, Completions, Ticket
from anydepth.engine.plan import LateResult, Leave, Plan, Sequence
from anydepth.engine.runner import Leaving, Runner, turn_work
from anydepth.engine.sampling import Choice, Draw
from anydepth.engine.slots import Slots
from anydepth.models.base import Model
from anydepth.ops.fill import Fill


class LateRunner(Runner):
    """A turn: rows that leave are read, sampled and embedded, then every row of the plan runs its segment and its
    policy decides. `reads_late`: see `LateScheduler`."""

    def __init__(self, model: Model, fill: Fill, slots: Slots, *, completions: Completions, reads_late: bool) -> None:
        super().__init__(model, fill, slots)
        self.completions, self.reads_late = completions, reads_late
        self.buffers = Buffers(len(slots), model.device)

    @torch.inference_mode()
    def run(self, plan: Plan) -> LateResult:  # type: ignore[override]
        """Submit one turn; the outcomes are those that have arrived by its end, of whatever turn."""
        self.slots.move(plan.moves)
        copies, depth_L, choice = self._leave(plan.leaving) if plan.leaving else ((), None, None)
        decided = self._advance(plan) if plan.rows else []
        self.completions.put(self._tickets(plan, depth_L, choice, decided))
        signals = sum(len(rows) for rows, _ in decided)
        return LateResult(self.completions.take(), turn_work(plan, signals, len(plan.leaving), copies))

    def drain(self) -> None:
        """Wait for all that is on its way to the host, and let go of it."""
        self.completions.drain()

    def _leave(self, leaving: tuple[Leave, ...]) -> tuple[tuple[int, ...], Tensor, Choice]:
        """Fill, readout, sampling, and the embedding that each row carries on with; (depths copied from, depth_L,
        choice). The late round has written its planes by now, so what is copied over them stays."""
        slots_L = self._index(leave.slot for leave in leaving)
        h_Ld = self.slots.h_Sd.index_select(0, slots_L)
        depth_L = self._index(leave.depth or 0 for leave in leaving)
        kept = [j for j, leave in enumerate(leaving) if leave.kept]
        if kept:
            at = self._index(kept)
            h_Ld[at] = self.slots.kept_h_Sd[slots_L[at]]
        unknown = [j for j, leave in enumerate(leaving) if leave.depth is None]
        if unknown:
            at = self._index(unknown)
            depth_L[at] = self.slots.kept_depth_S[slots_L[at]]
        copies = self._finalise(leaving, slots_L, depth_L)
        depths = [leave.depth or 0 for leave in leaving]
        if unknown and not self.model.shape.shared_weights:  # each depth has a readout of its own: the host must ask
            depths = depth_L.tolist()
        logits_LV = self._logits(Leaving(list(range(len(leaving))), depths, h_Ld))
        choice = self.slots.sampler.choose([Draw(x.sequence, x.slot, x.output) for x in leaving], logits_LV)
        self.slots.h_Sd.index_copy_(0, slots_L, self.model.embed(choice.feed_L))
        return copies, depth_L, choice

    def _finalise(self, leaving: tuple[Leave, ...], slots_L: Tensor, depth_L: Tensor) -> tuple[int, ...]:
        """Fill the planes deeper than the readout; the depths that were copied from."""
        early = [j for j, leave in enumerate(leaving) if leave.depth is not None and leave.depth < self.segments]
        if not early or not self.fill.copies:
            return ()
        at = self._index(early)
        position = self._index(leaving[j].position for j in early)
        storage = self.slots.map.at(slots_L[at], position, depth_L[at])
        self.fill.leave(self.slots.pool, storage, depth_L[at])
        return tuple(leaving[j].depth or 0 for j in early)

    def _advance(self, plan: Plan) -> list[tuple[list[int], Tensor]]:
        """Every row through its segment; what the policies say of them."""
        decode, prefill = plan.rows[: plan.decode_rows], plan.rows[plan.decode_rows :]
        slots_B = self._index(row.slot for row in decode)
        depth_B = self._index(row.depth for row in decode)
        carried = self._carried(slots_B, prefill)
        if decode and not (self.fill.runs_on or self.reads_late):  # the state one round back, for a row that left there
            self.slots.kept_h_Sd.index_copy_(0, slots_B, carried[: len(decode)])
        h_Nd = self.model.segment(plan.segment, carried, self._kv(plan, slots_B, depth_B))
        h_Bd = h_Nd[: len(decode)]
        asked = [i for i, row in enumerate(decode) if row.read is None and row.depth < row.sequence.request.bounds[1]]
        decided = self._decide(decode, asked, slots_B, depth_B, h_Bd)
        if self.fill.runs_on:
            self._keep_reads(decode, decided, slots_B, depth_B, h_Bd)
        self.slots.h_Sd.index_copy_(0, slots_B, h_Bd)
        self._keep_prompts(plan, h_Nd)
        return decided

    def _keep_prompts(self, plan: Plan, h_Nd: Tensor) -> None:
        """Chunks go deeper; the last position of a prompt that came through is what its slot carries."""
        start = plan.decode_rows
        for row in plan.rows[plan.decode_rows :]:
            end = start + row.length
            if row.depth < self.segments:
                self.slots.chunks[row.slot] = h_Nd[start:end]
            elif row.last:
                self.slots.h_Sd[row.slot] = h_Nd[end - 1]
            start = end

    def _snapshot(self, slots: Tensor, depth: Tensor, h: Tensor, leaves: Tensor, last: Tensor) -> None:
        """`delayed` reads one round after the policy said so: -1 stands for "said so", until then."""
        if not self.reads_late:
            Runner._snapshot(self, slots, depth, h, leaves, last)
            return
        pool, depths = self.slots.kept_h_Sd, self.slots.kept_depth_S
        before = torch.where(depth == 1, 0, depths[slots])
        now = (before == -1) | (last & (before == 0))
        pool[slots] = torch.where(now.unsqueeze(1), h, pool[slots])
        depths[slots] = torch.where(now, depth, torch.where(leaves & (before == 0), -1, before))

    def _tickets(
        self, plan: Plan, depth_L: Tensor | None, choice: Choice | None, decided: list[tuple[list[int], Tensor]]
    ) -> list[Ticket]:
        """Send the turn's outcomes on their way: one ticket a sequence."""
        reads = {leave.sequence: n for n, leave in enumerate(plan.leaving)}
        rows = {row.sequence: row for row in plan.rows}
        if not rows and not reads:
            return []
        buffer = self.buffers.take()
        if choice is not None and depth_L is not None:
            buffer.write("token", choice.token_L)
            buffer.write("depth", depth_L)
            if choice.logprob_L is not None:
                buffer.write("logprob", choice.logprob_L)
            if choice.matches_L is not None:
                buffer.write("matches", choice.matches_L)
        answers: dict[Sequence, int] = {}
        if decided and not self.fill.runs_on:  # where rows run on, the device itself keeps what is read
            answers = {plan.rows[i].sequence: n for n, i in enumerate(i for rows, _ in decided for i in rows)}
            buffer.write("leaves", torch.cat([leave for _, leave in decided]))
        if buffer.done is not None:
            buffer.done.record()
        return [
            Ticket(s, self.buffers, buffer, read_at=reads.get(s), row=rows.get(s), leave_at=answers.get(s))
            for s in {**reads, **rows}
        ]
