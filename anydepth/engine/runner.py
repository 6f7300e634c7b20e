"""The synchronous runner: one plan in, what came of it out.

One turn embeds nothing by itself: a row's next token is embedded when the row leaves, so that at every turn's start the
pool `h` holds what each decode row carries into its next segment. A decode row is one position, of a token to be read,
and, under `deferred`, others before it that come along; only the token's is asked about leaving. Shape suffixes: S
slots, B decode rows, M their positions, N all positions of the turn, L rows that leave; others as in `models.base`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as List
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from anydepth.engine.plan import Plan, Read, Result, Row, Sequence, TurnWork
from anydepth.engine.sampling import Draw
from anydepth.engine.slots import Slots
from anydepth.exits.base import Policy
from anydepth.models.base import Model, Part
from anydepth.ops.fill import Early, Fill
from anydepth.ops.kv import Group, TurnKV, join


class Shown(NamedTuple):
    """Logits of rows, by their places in the plan: [n, C], see `Model.listed`."""

    rows: list[int]
    logits: Tensor


class Decided(NamedTuple):
    """What one policy said of its rows, by their places in the plan; with the logits that were made for that."""

    rows: list[int]
    leave: Tensor
    shown: Shown | None


class Leaving(NamedTuple):
    """Rows that leave in this turn: their places in the plan, readout depths, and the states to read. `logits` are
    those that are known of the first of them."""

    rows: list[int]
    depths: list[int]
    h_Ld: Tensor
    logits: Tensor | None = None


class Runner:
    """Runs plans over `slots`, each turn to its end. `lone_chunk`: a decode row that is alone, or the only one of its
    length, is a chunk, for which nothing is gathered or padded; the host must know its plane and position for that."""

    lone_chunk = True
    reads_leave = True  # the host may read who leaves in the middle of a turn

    def __init__(self, model: Model, fill: Fill, slots: Slots) -> None:
        self.model, self.fill, self.segments, self.slots = model, fill, model.shape.segments, slots
        self._made = Counter[tuple[Part, int]]()  # rows of this turn by part and depth: see TurnWork

    @torch.inference_mode()
    def run(self, plan: Plan) -> Result:
        """One turn: every row of the plan through its segment; rows that leave are read out and sampled."""
        self._made.clear()
        self.slots.move(plan.moves)
        decode, prefill = plan.rows[: plan.decode_rows], plan.rows[plan.decode_rows :]
        slots_B, depth_B, start_B, places_M = self._numbers(decode)
        kv = self._kv(plan, slots_B, depth_B, start_B)
        h_Nd = self.model.segment(plan.segment, self._carried(places_M, prefill), kv)

        h_Bd = self._tokens(decode, len(places_M), h_Nd)
        asked = self._asked(decode, slots_B)
        decided = self._decide(decode, asked, slots_B, depth_B, h_Bd)
        if self.fill.runs_on:
            leaving = self._leave_full(decode, decided, slots_B, depth_B, h_Bd)
        else:
            leaving = self._leave_early(decode, decided, h_Bd)
        if len(leaving.rows) < len(decode) or self.fill.defers:  # a row that leaves carries on with an embedding
            self.slots.h_Wd.index_copy_(0, places_M, h_Nd[: len(places_M)])
        copies = self._fill(leaving, kv, h_Bd)
        reads = self._read(plan.rows, self._keep_chunks(plan, h_Nd, leaving))
        return Result(reads, turn_work(plan, len(asked), len(reads), copies, self._made))

    def drain(self) -> None:
        """Nothing is ever on its way."""

    def _numbers(self, decode: tuple[Row, ...]) -> List[Tensor]:
        """(slots, depths, first positions) of decode rows, [B] each, and where the states of all their positions are,
        [M]. One transfer for all."""
        numbers = [row.slot for row in decode]
        numbers += [row.depth for row in decode]
        numbers += [row.start for row in decode]
        if not self.fill.defers:  # one state a slot
            slots, depths, starts = self._index(numbers).view(3, -1).unbind()
            return slots, depths, starts, slots
        numbers += self.slots.places(decode)
        return self._index(numbers).split([len(decode)] * 3 + [len(numbers) - 3 * len(decode)])

    def _tokens(self, decode: tuple[Row, ...], positions: int, h_Nd: Tensor) -> Tensor:
        """[B, d], the last position of every decode row; they have so many `positions` in all."""
        if positions == len(decode):
            return h_Nd[: len(decode)]
        return h_Nd.index_select(0, self._index(end - 1 for end in itertools.accumulate(row.length for row in decode)))

    def _kv(self, plan: Plan, slots_B: Tensor, depth_B: Tensor, start_B: Tensor) -> TurnKV:
        """What the rows write and see."""
        groups, end = list[Group](), 0
        for length, rows in itertools.groupby(plan.rows[: plan.decode_rows], key=attrgetter("length")):
            starts = [row.start for row in rows]
            if len(starts) == 1 and self.lone_chunk:  # only such ones come after it
                break
            own, end = slice(end, end + len(starts)), end + len(starts)
            groups.append(Group(slots_B[own], start_B[own], depth_B[own], length, max(starts) + length))
        chunks = [(row.slot, row.start, row.length, row.depth) for row in plan.rows[end:]]
        return self.slots.map.turn(groups, chunks)

    def _index(self, values: Iterable[int]) -> Tensor:
        return self.slots.index(values)

    def _carried(self, places_M: Tensor, prefill: tuple[Row, ...]) -> Tensor:
        """h [N, d] that the turn's rows carry into their segment: decode rows, then prefill rows."""
        parts = [self.slots.h_Wd.index_select(0, places_M)] if len(places_M) else []
        parts += self.slots.prompt_rows(prefill)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _asked(self, decode: tuple[Row, ...], slots_B: Tensor) -> list[int]:
        """The rows whose policy has to say if they leave; where a head may have to be run for that, not those that left
        before and run on."""
        asked = [i for i, row in enumerate(decode) if is_asked(row)]
        if self.model.shape.shared_weights or not (self.fill.runs_on and asked):
            return asked
        left = self.slots.kept_depth_S.index_select(0, slots_B).tolist()
        return [i for i in asked if decode[i].depth == 1 or not left[i]]

    def _decide(
        self, decode: tuple[Row, ...], asked: list[int], slots_B: Tensor, depth_B: Tensor, h_Bd: Tensor
    ) -> list[Decided]:
        """(rows, leave) for every policy that has rows to decide on."""
        groups: dict[Policy, list[int]] = {}
        for i in asked:
            groups.setdefault(decode[i].sequence.request.policy, []).append(i)  # type: ignore[arg-type]
        decided = []
        for policy, rows in groups.items():
            everyone = len(rows) == len(decode)
            index = slice(None) if everyone else self._index(rows)
            slots, depth, h = slots_B[index], depth_B[index], h_Bd[index]
            k = decode[rows[0]].depth
            seen = policy.seen(self.model, k, h)
            if policy.needs in ("signal", "logits"):
                self._made["signal" if policy.needs == "signal" else "readout", k] += len(rows)
            states = self.slots.states[policy]
            before = states.index_select(0, slots)
            leave, state = policy.decide(before, depth, seen)
            if self.fill.runs_on and policy.tallies:
                state = self._uncounted(policy, slots, depth, before, state)
            decision = Decided(rows, leave, Shown(rows, seen) if policy.needs == "logits" else None)
            decided.append(self._answering(k, h, decision) if self.model.declines(k) else decision)
            states.index_copy_(0, slots, state)
        return decided

    def _uncounted(self, policy: Policy, slots: Tensor, depth: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """The state after a decision, without what was tallied of rows that had left: they are asked on to R."""
        gone = (depth > 1) & (self.slots.kept_depth_S.index_select(0, slots) != 0)
        columns = list(policy.tallies.values())
        after[:, columns] = torch.where(gone.unsqueeze(1), before[:, columns], after[:, columns])
        return after

    def _answering(self, k: int, h_Nd: Tensor, decision: Decided) -> Decided:
        """Without the rows that the exit's head must not answer. It takes the head's logits to know: of the rows that
        are about to leave, as far as the host may see which these are."""
        rows, leave, shown = decision
        at = None
        if shown is None:
            some = leave.tolist() if self.reads_leave else [True] * len(rows)
            leaving = [n for n, left in enumerate(some) if left]
            if not leaving:
                return decision
            if len(leaving) < len(rows):
                at = self._index(leaving)
                h_Nd = h_Nd[at]
            self._made["readout", k] += len(h_Nd)
            shown = Shown([rows[n] for n in leaving], self.model.listed(k, h_Nd))
        may = self.model.answers(k, h_Nd, shown.logits)
        self._made["answers", k] += len(may)
        return Decided(rows, leave & may if at is None else leave.index_copy(0, at, may), shown)

    def _leave_early(self, decode: tuple[Row, ...], decided: list[Decided], h_Bd: Tensor) -> Leaving:
        """A row leaves at the depth it is read. Here the host reads who leaves."""
        leaves = [row.depth == _latest(row) for row in decode]
        for rows, leave, _ in decided:
            for i, left in zip(rows, leave.tolist(), strict=True):
                leaves[i] = left
        out = [i for i, left in enumerate(leaves) if left]
        h_Ld = h_Bd if len(out) == len(decode) else h_Bd.index_select(0, self._index(out))
        known = self._known(decode[0].depth, out, decided) if out else None
        return Leaving(out, [decode[i].depth for i in out], h_Ld, known)

    def _known(self, k: int, out: list[int], decided: list[Decided]) -> Tensor | None:
        """Logits [L, V] of the rows that leave at depth k, where those of all of them were made for one policy."""
        if len(decided) != 1 or (shown := decided[0].shown) is None:
            return None
        place = {i: n for n, i in enumerate(shown.rows)}
        if any(i not in place for i in out):
            return None
        logits_LC = shown.logits.index_select(0, self._index(place[i] for i in out))
        return self.model.over_vocabulary(k, logits_LC)

    def _leave_full(
        self,
        decode: tuple[Row, ...],
        decided: list[Decided],
        slots_B: Tensor,
        depth_B: Tensor,
        h_Bd: Tensor,
    ) -> Leaving:
        """Rows run on to R; the state of the readout depth is kept on the device until then."""
        self._keep_reads(decode, decided, slots_B, depth_B, h_Bd)
        out = [i for i, row in enumerate(decode) if row.depth == self.segments]
        h_Ld, depths = h_Bd.index_select(0, self._index(out)), [self.segments] * len(out)
        early = [j for j, i in enumerate(out) if decode[i].read != self.segments]
        if early:
            slots = self._index(decode[out[j]].slot for j in early)
            h_Ld[self._index(early)] = self.slots.kept_h_Sd[slots]
            for j, depth in zip(early, self.slots.kept_depth_S[slots].tolist(), strict=True):
                depths[j] = depth
        return Leaving(out, depths, h_Ld)

    def _keep_reads(
        self,
        decode: tuple[Row, ...],
        decided: list[Decided],
        slots_B: Tensor,
        depth_B: Tensor,
        h_Bd: Tensor,
    ) -> None:
        """Keep h and depth of rows that are read at this depth and run on."""
        watched = [i for i, row in enumerate(decode) if row.read != self.segments]
        if not watched:
            return
        leaves_B = torch.zeros(len(decode), dtype=torch.bool, device=self.model.device)
        for rows, leave, _ in decided:
            leaves_B[self._index(rows)] = leave
        last_B = self._index(row.depth == _latest(row) for row in decode) > 0
        at = self._index(watched)
        self._snapshot(slots_B[at], depth_B[at], h_Bd[at], leaves_B[at], last_B[at])

    def _snapshot(self, slots: Tensor, depth: Tensor, h: Tensor, leaves: Tensor, last: Tensor) -> None:
        """A row is read where its policy leaves for the first time in this token, or at its last depth."""
        pool, depths = self.slots.kept_h_Sd, self.slots.kept_depth_S
        before = torch.where(depth == 1, 0, depths[slots])
        now = (leaves | last) & (before == 0)
        pool[slots] = torch.where(now.unsqueeze(1), h, pool[slots])
        depths[slots] = torch.where(now, depth, before)

    def _fill(self, leaving: Leaving, kv: TurnKV, h_Bd: Tensor) -> tuple[int, ...]:
        """Fill the deeper planes of rows that left early; the depths they left at."""
        if not self.fill.copies:
            return ()
        early = [j for j, depth in enumerate(leaving.depths) if depth < self.segments]
        if not early:
            return ()
        depths = [leaving.depths[j] for j in early]
        rows, depth = self._index((*(leaving.rows[j] for j in early), *depths)).split(len(early))
        storage = kv.write_N.index_select(0, rows)
        self.fill.leave(self.model, self.slots.pool, Early(storage, depth, depths, rows, kv.positions, h_Bd))
        return tuple(depths)

    def _keep_chunks(self, plan: Plan, h_Nd: Tensor, leaving: Leaving) -> Leaving:
        """Keep chunks that go deeper; add the last position of every prompt that came through to those that leave."""
        prefill = plan.rows[plan.decode_rows :]
        if not prefill:
            return leaving
        end = plan.decode_positions
        self.slots.keep_prompts(prefill, h_Nd[end:])
        rows, states = list(leaving.rows), [leaving.h_Ld]
        for index, row in enumerate(prefill, plan.decode_rows):
            end += row.length
            if row.last:
                rows.append(index)
                states.append(h_Nd[end - 1 : end])
        depths = leaving.depths + [self.segments] * (len(rows) - len(leaving.rows))
        return leaving._replace(rows=rows, depths=depths, h_Ld=join(states))

    def _read(self, rows: tuple[Row, ...], leaving: Leaving) -> dict[int, Read]:
        """Readout and sampling of the rows that leave, and the embedding of what they carry on with."""
        if not leaving.rows:
            return {}
        sequences = [rows[i].sequence for i in leaving.rows]
        draws = [Draw(sequence, sequence.slot, sequence.issued) for sequence in sequences]
        choice = self.slots.sampler.choose(draws, self._logits(leaving))
        places = self._index(self.slots.place(s.slot, _next_position(s)) for s in sequences)
        self.slots.h_Wd.index_copy_(0, places, self.model.embed(choice.feed_L))
        logprobs: Iterable[float | None] = itertools.repeat(None)
        if choice.logprob_L is not None:
            values = choice.logprob_L.tolist()
            logprobs = [v if s.reports_logprob else None for v, s in zip(values, sequences, strict=True)]
        matches = itertools.repeat(True) if choice.matches_L is None else choice.matches_L.tolist()
        reads = map(Read, choice.token_L.tolist(), leaving.depths, logprobs, matches)
        return dict(zip(leaving.rows, reads, strict=True))

    def _logits(self, leaving: Leaving) -> Tensor:
        """[L, V]. A layered model may read each depth its own way, a looped one reads all alike."""
        if (known := leaving.logits) is not None:
            start = len(known)
            rest = Leaving(leaving.rows[start:], leaving.depths[start:], leaving.h_Ld[start:])
            return torch.cat((known, self._logits(rest))) if rest.rows else known
        depths = set(leaving.depths)
        if self.model.shape.shared_weights or len(depths) == 1:
            return self._readout(leaving.depths[0], leaving.h_Ld)
        logits = leaving.h_Ld.new_empty(len(leaving.rows), self.model.shape.vocab)
        for depth in depths:
            at = self._index(j for j, d in enumerate(leaving.depths) if d == depth)
            logits[at] = self._readout(depth, leaving.h_Ld[at])
        return logits

    def _readout(self, depth: int, h_Nd: Tensor) -> Tensor:
        self._made["readout", depth] += len(h_Nd)
        return self.model.readout(depth, h_Nd)


def is_asked(row: Row) -> bool:
    """Whether a decode row's policy has to say if it leaves."""
    request = row.sequence.request
    if row.read is not None or row.depth >= request.bounds[1]:
        return False
    policy = request.policy
    return policy.everywhere or policy.asks(request.sampling, request.bounds, row.depth)


def _latest(row: Row) -> int:
    """The depth at which a decode row is read whatever its policy says."""
    return row.sequence.request.bounds[1] if row.read is None else row.read


def _next_position(s: Sequence) -> int:
    """Where the sequence goes on after the token that it is about to get."""
    return s.first_position if s.target and s.issued + 1 == len(s.target) else s.position + 1


def turn_work(
    plan: Plan,
    signals: int,
    readouts: int,
    copies: tuple[int, ...],
    made: Mapping[tuple[Part, int], int] | None = None,
) -> TurnWork:
    attended = kv_read = 0
    for row in plan.rows:
        attended += row.length * row.start + row.length * (row.length + 1) // 2
        kv_read += row.start + row.length
    prefilled = sum(row.length for row in plan.rows[plan.decode_rows :])
    parts = None if made is None else tuple((part, depth, rows) for (part, depth), rows in made.items())
    return TurnWork(plan.segment, plan.decode_positions, prefilled, attended, kv_read, signals, readouts, copies, parts)
