"""The runner of `resident` signals: it submits turns that decide for themselves, and hears of them later.

Shape suffixes as in `resident_turn`.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from anydepth.engine.completions import ALL_LINES, Buffers, Completions, Part, Submitted
from anydepth.engine.graphs import Graphs
from anydepth.engine.plan import LateResult, Plan, Row, Seat, Sequence
from anydepth.engine.resident_turn import MOVING, Asks, Given, Kind, Policies, Prompts, State, run_turn
from anydepth.engine.runner import turn_work
from anydepth.engine.slots import Slots
from anydepth.engine.submission import Streams, Submission
from anydepth.models.base import Model
from anydepth.ops.fill import Fill


class ResidentSlots(Slots):
    """Slots whose depths, positions and ends are known here and not to the host. One row more than there are slots, and
    one page: those of rows that only pad."""

    def __init__(self, model: Model, fill: Fill, *, slots: int, pages: int, page_size: int, context: int) -> None:
        super().__init__(model, fill, slots=slots + 1, pages=pages + 1, page_size=page_size, context=context)
        self.padding = slots
        self.plans = [False] * slots  # whether a slot's request has outputs of planned depth

        rows = slots + 1
        # A row of padding is one that has ended, at depth 1 and position 0.
        self.state = State(self.h_Wd, self.kept_h_Sd, self._numbers(rows, 8))
        self.asks = Asks(
            planned_SI=self._numbers(rows, context + 1),
            stop_SK=self._numbers(rows, 8, value=-1),
            sampled_S=torch.zeros(rows, dtype=torch.bool, device=self.device),
            processed_S=torch.zeros(rows, dtype=torch.bool, device=self.device),
            uniform_SI=self.sampler.uniform_SI,
            settings=self.sampler.settings,
        )
        self.state.numbers_S8[:, 0] = self.state.numbers_S8[:, 5] = 1

    def _numbers(self, *size: int, value: int = 0) -> Tensor:
        return torch.full(size, value, dtype=torch.int64, device=self.device)

    def __len__(self) -> int:
        return self.padding

    def rows(self) -> list[Tensor]:
        return list(self.state)

    def policies_of(self, sequences: list[Sequence]) -> Policies:
        """(number, policy, state by slot) of every policy that some of them need asked."""
        known = list(self.states)
        used = {id(s.request.policy) for s in sequences}
        return tuple((n, policy, self.states[policy]) for n, policy in enumerate(known) if id(policy) in used)

    def _seat(self, sequence: Sequence, slot: int, pages: tuple[int, ...]) -> None:
        asks, request, new = self.asks, sequence.request, sequence.saved is None
        super()._seat(sequence, slot, pages)
        known = list(self.states)
        number = known.index(request.policy) if request.policy in known else -1  # type: ignore[arg-type]
        if new:
            self.state.numbers_S8[slot, :MOVING] = self.index((1, len(request.prompt_ids) - 1, 0, 1, 0))
        self.state.numbers_S8[slot, MOVING:] = self.index((request.bounds[1], request.max_tokens - 1, number))
        asks.sampled_S[slot].fill_(request.sampling.temperature > 0)
        asks.processed_S[slot].fill_(sequence.logprobs_mode == "processed")
        depths = planned_depths(sequence, self.model.shape.segments)
        asks.planned_SI[slot, : len(depths)] = self.index(depths)
        self.plans[slot] = any(depths)
        self._seat_stop_ids(slot, sorted(request.stop_ids))

    def _seat_stop_ids(self, slot: int, ids: list[int]) -> None:
        if len(ids) > self.asks.stop_SK.shape[1]:
            more = self.asks.stop_SK.new_full((len(self.kept_h_Sd), len(ids)), -1)
            more[:, : self.asks.stop_SK.shape[1]] = self.asks.stop_SK
            self.asks = self.asks._replace(stop_SK=more)
        self.asks.stop_SK[slot] = -1
        self.asks.stop_SK[slot, : len(ids)] = self.index(ids)


class Decode(NamedTuple):
    """The decode rows of a turn: their slots, the same with padding on the device, their policies, and what they ask
    for."""

    places: tuple[int, ...]
    slots_B: Tensor
    policies: Policies
    kind: Kind


class ResidentRunner:
    """Submits turns, as `submission` says."""

    def __init__(
        self, model: Model, fill: Fill, slots: ResidentSlots, *, completions: Completions, submission: Submission
    ) -> None:
        self.model, self.fill, self.slots, self.completions = model, fill, slots, completions
        self.padding = submission.padding
        self.buffers = Buffers(2 * len(slots) + 1, model.device, static=submission.static_buffers)
        self.streams = Streams(submission, model.device)
        self.graphs = Graphs(submission.graph_bytes, model.device) if submission.graphs else None
        self._decode = Decode((), slots.index(()), (), Kind(1))

    @torch.inference_mode()
    def run(self, plan: Plan) -> LateResult:
        """Submit one turn; the outcomes are those that have arrived by its end, of whatever turn."""
        self.slots.move(plan.moves)
        signals, readouts, copies = 0, 0, tuple[int, ...]()
        if plan.rows:
            decode, prompts = plan.rows[: plan.decode_rows], plan.rows[plan.decode_rows :]
            known = self._decode_of(decode, new=any(isinstance(move, Seat) for move in plan.moves))
            given = self._run(decode, prompts, known)
            self.completions.put(self._submitted(decode, prompts, given, len(known.slots_B)))
            signals, readouts = len(decode) * bool(known.policies), given.given_3L.shape[1]
            copies = tuple(row.depth for row in decode) if self.fill.copies else ()
        return LateResult(self.completions.take(), turn_work(plan, signals, readouts, copies))

    def drain(self) -> None:
        """Wait for all that is on its way to the host, and let go of it."""
        self.completions.drain()

    def _decode_of(self, rows: tuple[Row, ...], *, new: bool) -> Decode:
        """What the decode rows are. Most turns have those of the turn before."""
        places = tuple(row.slot for row in rows)
        if new or places != self._decode.places:
            slots, sequences = self.slots, [row.sequence for row in rows]
            padded = (1 << (len(places) - 1).bit_length()) - len(places) if self.padding and places else 0
            self._decode = Decode(
                places,
                slots.index((*places, *[slots.padding] * padded)),
                slots.policies_of(sequences),
                kind_of(sequences, planned=any(slots.plans[slot] for slot in places), vocab=slots.sampler.vocab),
            )
        return self._decode

    def _run(self, decode: tuple[Row, ...], prompts: tuple[Row, ...], known: Decode) -> Given:
        slots, kind = self.slots, known.kind
        ending = [row.sequence for row in prompts if row.last]
        if ending:
            both = [*(row.sequence for row in decode), *ending]
            kind = kind_of(both, planned=kind.planned, vocab=slots.sampler.vocab)
        context = max((row.start for row in decode), default=0) + 1
        if self.graphs is not None:  # few contexts, so that there are few graphs
            context = min(1 << (context - 1).bit_length(), slots.map.table.shape[1])
        may_end = (s.issued + s.ahead >= s.request.max_tokens for s in (*(row.sequence for row in decode), *ending))
        ends = kind.stops or len(known.slots_B) > len(decode) or any(may_end)
        kind = kind._replace(context=context, ends=ends)
        coming = self._prompts(prompts) if prompts else None

        def turn(slots_B: Tensor) -> Given:
            policies, state, asks = known.policies, slots.state, slots.asks
            return run_turn(self.model, self.fill, slots.map, policies, state, asks, slots_B, coming, kind)

        if self.graphs is None or prompts:
            given = turn(known.slots_B)
        else:
            numbers = tuple(number for number, _, _ in known.policies)
            given = self.graphs.run((len(known.slots_B), numbers, slots.asks.stop_SK.shape, kind), known.slots_B, turn)
        if given.prompt_h_Pd is not None:
            slots.keep_prompts(prompts, given.prompt_h_Pd)
        return given

    def _prompts(self, rows: tuple[Row, ...]) -> Prompts:
        slots, ends = self.slots, list(itertools.accumulate(row.length for row in rows))
        chunks = [(row.slot, row.start, row.length, row.depth) for row in rows]
        ending = [n for n, row in enumerate(rows) if row.last]
        return Prompts(
            torch.cat(slots.prompt_rows(rows)),
            *slots.map.prompt_rows(chunks),
            slots.index(rows[n].slot for n in ending),
            slots.index(ends[n] - 1 for n in ending),
        )

    def _submitted(
        self, decode: tuple[Row, ...], prompts: tuple[Row, ...], given: Given, decode_rows: int
    ) -> Submitted:
        """Send the turn's outcomes on their way. Of `decode_rows` places the last may be padding."""
        buffer = self.buffers.take()
        numbers = ((ALL_LINES, given.given_3L),)
        if self.graphs is None:
            self.streams.beside(buffer.write, numbers, logprob=given.logprob_L)
        else:  # what a graph gives is overwritten by its next replay: it is copied away before that, on the same stream
            buffer.write(numbers, logprob=given.logprob_L)
        parts: list[Part] = [(row.sequence, row, n, None, n) for n, row in enumerate(decode)]
        at = decode_rows
        for row in prompts:
            place = at if row.last else None
            parts.append((row.sequence, row, place, None, place))
            at += row.last
        return Submitted(parts, buffer, self.buffers, if_left=True)


def planned_depths(sequence: Sequence, segments: int) -> list[int]:
    """Readout depth of every output the request may have, 0 where its policy decides on the way."""
    request = sequence.request
    return [request.policy.planned(request.sampling, i, segments) or 0 for i in range(request.max_tokens)]


def kind_of(sequences: list[Sequence], *, planned: bool, vocab: int) -> Kind:
    """What the rows that may give a token ask for; of any context."""
    drawn = [s.request.sampling for s in sequences if s.request.sampling.temperature > 0]
    wanted = [s for s in sequences if s.reports_logprob]
    return Kind(
        context=1,
        planned=planned,
        stops=any(s.request.stop_ids for s in sequences),
        sampled=bool(drawn),
        max_k=max((min(ask.top_k, vocab) for ask in drawn if ask.top_k is not None), default=None),
        top_p=any(ask.top_p < 1 for ask in drawn),
        logprobs=bool(wanted),
        processed=any(s.logprobs_mode == "processed" for s in wanted),
    )
