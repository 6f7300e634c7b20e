"""The runner of late signals, `delayed` and `exact`: nothing of a turn is read before it has arrived.

Shape suffixes: B decode rows, L rows that leave as the turn begins, S slots; others as in `models.base`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anydepth.engine.completions import ANSWERS, DEPTHS, TOKENS, Buffers, Completions, Part, Submitted
from anydepth.engine.plan import LateResult, Leave, Plan, Row, Sequence
from anydepth.engine.runner import Decided, Leaving, Runner, is_asked, turn_work
from anydepth.engine.sampling import Choice, Draw
from anydepth.engine.slots import Slots
from anydepth.engine.submission import Streams, Submission
from anydepth.models.base import Model
from anydepth.ops.fill import Early, Fill
from anydepth.ops.kv import join

ENDED, SAID, COUNTS = -1, 0, 1


class LateSlots(Slots):
    """tallied_S: whether what a policy tallies of a slot's rounds COUNTS, or is of a token of which it has SAID that it
    leaves, or of one after a stop id, with which the request has ENDED."""

    def __init__(self, model: Model, fill: Fill, **options: int) -> None:
        super().__init__(model, fill, **options)
        self.tallied_S = torch.full((len(self.kept_h_Sd),), COUNTS, device=self.device)

    def rows(self) -> list[Tensor]:
        return [*super().rows(), self.tallied_S]

    def _seat(self, sequence: Sequence, slot: int, pages: tuple[int, ...]) -> None:
        self.tallied_S[slot] = COUNTS
        super()._seat(sequence, slot, pages)


class Left(NamedTuple):
    """What came of rows that left: depths copied from, tokens, and readout depths where only the device knows them."""

    copies: tuple[int, ...]
    choice: Choice
    depth_L: Tensor | None


class LateRunner(Runner):
    """A turn: rows that leave are read, sampled and embedded, then every row of the plan runs its segment and its
    policy decides. `reads_late`: see `LateScheduler`."""

    reads_leave = False
    slots: LateSlots

    def __init__(
        self,
        model: Model,
        fill: Fill,
        slots: LateSlots,
        *,
        completions: Completions,
        submission: Submission,
        reads_late: bool,
    ) -> None:
        super().__init__(model, fill, slots)
        self.completions, self.reads_late = completions, reads_late
        self.buffers = Buffers(len(slots), model.device, static=submission.static_buffers)
        self.streams = Streams(submission, model.device)

    @torch.inference_mode()
    def run(self, plan: Plan) -> LateResult:  # type: ignore[override]
        """Submit one turn; the outcomes are those that have arrived by its end, of whatever turn."""
        self._made.clear()
        self.slots.move(plan.moves)
        left = self._leave(plan.leaving) if plan.leaving else None
        decided = self._advance(plan) if plan.rows else []
        if plan.rows or plan.leaving:
            self.completions.put(self._submitted(plan, left, decided))
        signals = sum(len(each.rows) for each in decided)
        work = turn_work(plan, signals, len(plan.leaving), left.copies if left else (), self._made)
        return LateResult(self.completions.take(), work)

    def drain(self) -> None:
        """Wait for all that is on its way to the host, and let go of it."""
        self.completions.drain()

    def _leave(self, leaving: tuple[Leave, ...]) -> Left:
        """Fill, readout, sampling, and the embedding that each row carries on with. The late round has written its
        planes by now, so what is copied over them stays."""
        slots = self.slots
        at = [n for n, x in enumerate(leaving) if x.depth and x.depth < self.segments and self.fill.copies]
        copied = [leaving[n] for n in at]
        depths = tuple(leave.depth or 0 for leave in copied)
        numbers = [leave.slot for leave in leaving]  # one transfer for all
        numbers += [slots.place(leave.slot, leave.position) for leave in leaving]
        numbers += [slots.place(leave.slot, leave.position + 1) for leave in leaving]
        numbers += [slots.map.place(leave.slot, leave.position) for leave in copied]
        numbers += [*depths, *at, *(leave.position for leave in leaving)]
        sizes = [len(leaving)] * 3 + [len(copied)] * 3 + [len(leaving)]
        slots_L, at_L, next_L, places, depth, early, position_L = self._index(numbers).split(sizes)
        kept = [leave.kept for leave in leaving]
        h_Ld = slots.kept_h_Sd.index_select(0, slots_L) if all(kept) else slots.h_Wd.index_select(0, at_L)
        if any(kept) and not all(kept):
            kept_L1 = self._index(kept).unsqueeze(1)
            h_Ld = torch.where(kept_L1 > 0, slots.kept_h_Sd.index_select(0, slots_L), h_Ld)
        if copied:
            storage = slots.map.at(places, depth)
            self.fill.leave(self.model, slots.pool, Early(storage, depth, depths, early, position_L, h_Ld))
        logits_LV = self._logits(Leaving(list(range(len(leaving))), self._depths(leaving, slots_L), h_Ld))
        choice = slots.sampler.choose([Draw(x.sequence, x.slot, x.output) for x in leaving], logits_LV)
        slots.h_Wd.index_copy_(0, next_L, self.model.embed(choice.feed_L))
        if self._tallying():
            self._count_next(leaving, slots_L, choice.token_L)
        unknown = any(leave.depth is None for leave in leaving)
        return Left(depths, choice, slots.kept_depth_S.index_select(0, slots_L) if unknown else None)

    def _depths(self, leaving: tuple[Leave, ...], slots_L: Tensor) -> list[int]:
        """Depths of the readouts. A looped model reads all alike; of a layered one the host must ask for those that
        only the device knows."""
        if self.model.shape.shared_weights or all(leave.depth for leave in leaving):
            return [leave.depth or self.segments for leave in leaving]
        there = self.slots.kept_depth_S.index_select(0, slots_L).tolist()
        return [leave.depth or depth for leave, depth in zip(leaving, there, strict=True)]

    def _advance(self, plan: Plan) -> list[Decided]:
        """Every row through its segment; what the policies say of them."""
        decode, prefill = plan.rows[: plan.decode_rows], plan.rows[plan.decode_rows :]
        slots_B, depth_B, start_B, places_M = self._numbers(decode)
        carried = self._carried(places_M, prefill)
        if decode and not (self.fill.runs_on or self.reads_late):  # the state one round back, for a row that left there
            self.slots.kept_h_Sd.index_copy_(0, slots_B, self._tokens(decode, len(places_M), carried))
        h_Nd = self.model.segment(plan.segment, carried, self._kv(plan, slots_B, depth_B, start_B))
        h_Bd = self._tokens(decode, len(places_M), h_Nd)
        asked = [i for i, row in enumerate(decode) if is_asked(row)]
        decided = self._decide(decode, asked, slots_B, depth_B, h_Bd)
        if self.fill.runs_on:
            self._keep_reads(decode, decided, slots_B, depth_B, h_Bd)
        self.slots.h_Wd.index_copy_(0, places_M, h_Nd[: len(places_M)])
        self._keep_prompts(plan, h_Nd)
        return decided

    def _tallying(self) -> list[tuple[Tensor, list[int]]]:
        """The states of policies that tally something, and the columns of it."""
        states = self.slots.states.items()
        return [(state, list(policy.tallies.values())) for policy, state in states if policy.tallies]

    def _count_next(self, leaving: tuple[Leave, ...], slots_L: Tensor, token_L: Tensor) -> None:
        """The rounds of the next token count, unless the request has ended with a stop id, which the host has yet to
        hear of."""
        stops = [() if x.sequence.request.forced else sorted(x.sequence.request.stop_ids) for x in leaving]
        longest = max(map(len, stops))
        padded = (token for ids in stops for token in (*ids, *[-1] * (longest - len(ids))))
        table_LK = self._index(padded).view(len(stops), longest)
        pool = self.slots.tallied_S
        ended_L = (table_LK == token_L.unsqueeze(1)).any(1) | (pool.index_select(0, slots_L) == ENDED)
        pool.index_copy_(0, slots_L, torch.where(ended_L, ENDED, COUNTS))

    def _decide(
        self, decode: tuple[Row, ...], asked: list[int], slots_B: Tensor, depth_B: Tensor, h_Bd: Tensor
    ) -> list[Decided]:
        """What is tallied is what the synchronous engine tallies, though late rounds and wasted ones are asked too."""
        pool, tallying = self.slots.tallied_S, self._tallying()
        if not tallying:
            return super()._decide(decode, asked, slots_B, depth_B, h_Bd)
        before = [state[:, columns] for state, columns in tallying]
        decided = super()._decide(decode, asked, slots_B, depth_B, h_Bd)
        for (state, columns), tallies in zip(tallying, before, strict=True):
            state[:, columns] = torch.where((pool == COUNTS).unsqueeze(1), state[:, columns], tallies)
        if not self.fill.runs_on:
            for rows, leave, _ in decided:
                slots = slots_B[self._index(rows)]
                pool[slots] = torch.where(leave, pool[slots].clamp(max=SAID), pool[slots])
        return decided

    def _keep_prompts(self, plan: Plan, h_Nd: Tensor) -> None:
        """Chunks go deeper; the last position of a prompt that came through is what its slot carries."""
        prefill = plan.rows[plan.decode_rows :]
        if not prefill:
            return
        end = plan.decode_positions
        self.slots.keep_prompts(prefill, h_Nd[end:])
        for row in prefill:
            end += row.length
            if row.last:
                self.slots.h_Wd[self.slots.place(row.slot, row.start + row.length - 1)] = h_Nd[end - 1]

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

    def _submitted(self, plan: Plan, left: Left | None, decided: list[Decided]) -> Submitted:
        """Send the turn's outcomes on their way."""
        answers: dict[int, int] = {}
        leaves = token = depth = logprob = matches = None
        if decided and not self.fill.runs_on:  # where rows run on, the device itself keeps what is read
            answers = {i: n for n, i in enumerate(i for each in decided for i in each.rows)}
            leaves = join([each.leave for each in decided])
        if left is not None:
            token, depth = left.choice.token_L, left.depth_L
            logprob, matches = left.choice.logprob_L, left.choice.matches_L
        buffer = self.buffers.take()
        numbers = ((TOKENS, token), (DEPTHS, depth), (ANSWERS, leaves))
        self.streams.beside(buffer.write, numbers, logprob=logprob, matches=matches)
        tokens: dict[Sequence, tuple[int | None, int | None]] = {
            leave.sequence: (n, leave.depth) for n, leave in enumerate(plan.leaving)
        }
        none = (None, None)
        parts: list[Part] = [
            (row.sequence, row, *tokens.pop(row.sequence, none), answers.get(i)) for i, row in enumerate(plan.rows)
        ]
        parts += [(sequence, None, *token, None) for sequence, token in tokens.items()]
        return Submitted(parts, buffer, self.buffers)
