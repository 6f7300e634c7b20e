"""The runner of `resident` signals: it submits turns that decide for themselves, and hears of them later.

Shape suffixes as in `resident_turn`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anydepth.engine.completions import Buffers, Completions, Ticket
from anydepth.engine.plan import LateResult, Plan, Row, Sequence
from anydepth.engine.resident_turn import Asks, Given, Kind, Rows, State, run_turn
from anydepth.engine.runner import turn_work
from anydepth.engine.slots import Slots
from anydepth.exits.base import Policy
from anydepth.models.base import Model
from anydepth.ops.fill import Fill


class ResidentSlots(Slots):
    """Slots whose depths, positions and ends are known here and not to the host. One row more than there are slots, and
    one page: those of rows that only pad."""

    def __init__(self, model: Model, fill: Fill, *, slots: int, pages: int, page_size: int, context: int) -> None:
        super().__init__(model, fill, slots=slots + 1, pages=pages + 1, page_size=page_size, context=context)
        self.padding = slots

        def row(fill_value: int = 0, *size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((slots + 1, *size), fill_value, dtype=dtype, device=self.device)

        self.state = State(self.h_Sd, self.kept_h_Sd, self.kept_depth_S, row(1), row(), row(), row(dtype=torch.bool))
        self.asks = Asks(
            planned_SI=row(0, context + 1, dtype=torch.int32),
            high_S=row(1),
            policy_S=row(-1),
            limit_S=row(),
            stop_SK=row(-1, 8),
            sampled_S=row(dtype=torch.bool),
            processed_S=row(dtype=torch.bool),
            uniform_SI=self.sampler.uniform_SI,
            settings=self.sampler.settings,
        )

    def __len__(self) -> int:
        return self.padding

    def rows(self) -> list[Tensor]:
        return list(self.state)

    def policies_of(self, sequences: list[Sequence]) -> tuple[tuple[int, Policy, Tensor], ...]:
        """(number, policy, state by slot) of every policy that some of them need asked."""
        known = list(self.states)
        used = {id(s.request.policy) for s in sequences}
        return tuple((n, policy, self.states[policy]) for n, policy in enumerate(known) if id(policy) in used)

    def _seat(self, sequence: Sequence, slot: int, pages: tuple[int, ...]) -> None:
        state, asks, request = self.state, self.asks, sequence.request
        new = sequence.saved is None
        super()._seat(sequence, slot, pages)
        if new:
            state.depth_S[slot], state.position_S[slot], state.output_S[slot] = 1, len(request.prompt_ids) - 1, 0
            state.runs_S[slot] = True
        sampling, segments = request.sampling, self.model.shape.segments
        planned = [request.policy.planned(sampling, i, segments) or 0 for i in range(request.max_tokens)]
        asks.planned_SI[slot, : len(planned)] = torch.tensor(planned, dtype=torch.int32, device=self.device)
        asks.high_S[slot], asks.limit_S[slot] = request.bounds[1], request.max_tokens
        known = list(self.states)
        asks.policy_S[slot] = known.index(request.policy) if request.policy in known else -1  # type: ignore[arg-type]
        asks.sampled_S[slot] = sampling.temperature > 0
        asks.processed_S[slot] = sequence.logprobs_mode == "processed"
        self._seat_stop_ids(slot, sorted(request.stop_ids))

    def _seat_stop_ids(self, slot: int, ids: list[int]) -> None:
        if len(ids) > self.asks.stop_SK.shape[1]:
            more = self.asks.stop_SK.new_full((len(self.h_Sd), len(ids)), -1)
            more[:, : self.asks.stop_SK.shape[1]] = self.asks.stop_SK
            self.asks = self.asks._replace(stop_SK=more)
        self.asks.stop_SK[slot] = -1
        self.asks.stop_SK[slot, : len(ids)] = self.index(ids)


class ResidentRunner:
    """Submits turns. `padding`: decode rows are padded to a power of two, so that few shapes occur."""

    def __init__(
        self, model: Model, fill: Fill, slots: ResidentSlots, *, completions: Completions, padding: bool = False
    ) -> None:
        self.model, self.fill, self.slots, self.completions, self.padding = model, fill, slots, completions, padding
        self.buffers = Buffers(2 * len(slots) + 1, model.device)

    @torch.inference_mode()
    def run(self, plan: Plan) -> LateResult:
        """Submit one turn; the outcomes are those that have arrived by its end, of whatever turn."""
        self.slots.move(plan.moves)
        readouts = 0
        if plan.rows:
            decode, prompts = plan.rows[: plan.decode_rows], plan.rows[plan.decode_rows :]
            given = self._submit(decode, prompts)
            self._keep_chunks(prompts, given.prompt_h_Pd)
            self.completions.put(self._tickets(decode, prompts, given))
            readouts = len(given.token_L)
        signals = sum(row.sequence.request.policy in self.slots.states for row in plan.rows[: plan.decode_rows])
        return LateResult(self.completions.take(), turn_work(plan, signals, readouts, ()))

    def drain(self) -> None:
        """Wait for all that is on its way to the host, and let go of it."""
        self.completions.drain()

    def _submit(self, decode: tuple[Row, ...], prompts: tuple[Row, ...]) -> Given:
        slots, index = self.slots, self.slots.index
        places = [row.slot for row in decode]
        if self.padding and places:
            places += [slots.padding] * ((1 << (len(places) - 1).bit_length()) - len(places))
        chunks = [(row.slot, row.start, row.length, row.depth) for row in prompts]
        positions_P, write_P, parts = slots.map.prompt_rows(chunks)
        ends = [0]
        for row in prompts:
            ends.append(ends[-1] + row.length)
        ending = [n for n, row in enumerate(prompts) if row.last]
        rows = Rows(
            index(places),
            self._prompt_h(prompts),
            positions_P,
            write_P,
            index(prompts[n].slot for n in ending),
            index(ends[n + 1] - 1 for n in ending),
        )
        sequences = [row.sequence for row in decode]
        context = max((row.start for row in decode), default=0) + 1
        kind = _kind(context, [*sequences, *(prompts[n].sequence for n in ending)], slots.sampler.vocab)
        policies = slots.policies_of(sequences)
        return run_turn(self.model, self.fill, slots.map, policies, parts, slots.state, slots.asks, rows, kind)

    def _prompt_h(self, prompts: tuple[Row, ...]) -> Tensor:
        """What the prompt rows carry into their segment."""
        parts = [self.slots.h_Sd[:0]]
        for row in prompts:
            if row.depth == 1:
                ids = row.sequence.request.prompt_ids[row.start : row.start + row.length]
                parts.append(self.model.embed(self.slots.index(ids)))
            else:
                parts.append(self.slots.chunks.pop(row.slot))
        return torch.cat(parts)

    def _keep_chunks(self, prompts: tuple[Row, ...], h_Pd: Tensor) -> None:
        start = 0
        for row in prompts:
            if row.depth < self.model.shape.segments:
                self.slots.chunks[row.slot] = h_Pd[start : start + row.length]
            start += row.length

    def _tickets(self, decode: tuple[Row, ...], prompts: tuple[Row, ...], given: Given) -> list[Ticket]:
        """Send the turn's outcomes on their way: one ticket a row."""
        buffer = self.buffers.take()
        buffer.write("leaves", given.left_L)
        buffer.write("token", given.token_L)
        buffer.write("depth", given.depth_L)
        if given.logprob_L is not None:
            buffer.write("logprob", given.logprob_L)
        if buffer.done is not None:
            buffer.done.record()
        places: list[int | None] = list(range(len(decode)))
        at = len(given.ran_B)
        for row in prompts:
            places.append(at if row.last else None)
            at += row.last
        return [
            Ticket(row.sequence, self.buffers, buffer, read_at=at, row=row, leave_at=at, if_left=True)
            for row, at in zip((*decode, *prompts), places, strict=True)
        ]


def _kind(context: int, sequences: list[Sequence], vocab: int) -> Kind:
    """What the rows that may give a token ask for."""
    drawn = [s.request.sampling for s in sequences if s.request.sampling.temperature > 0]
    wanted = [s for s in sequences if s.reports_logprob]
    return Kind(
        context,
        bool(drawn),
        max((min(ask.top_k, vocab) for ask in drawn if ask.top_k is not None), default=None),
        any(ask.top_p < 1 for ask in drawn),
        bool(wanted),
        any(s.logprobs_mode == "processed" for s in wanted),
    )
