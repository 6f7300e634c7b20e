"""A whole turn as one function of tensors: segment, policy, readout, sampling, stop check and next embedding.

Nothing here reads a number from the device, so that the host can submit the next turn before this one has run, and a
GPU can capture it. What differs from turn to turn in more than numbers is in `Kind`, which the host knows beforehand.
Shape suffixes: S slots, B decode rows (rows that do not run any more and padding included), P prompt rows, F prompts
that end in this turn, L = B + F rows that may give a token, I outputs of a request, K stop ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anydepth.engine import sampling
from anydepth.exits.base import Policy
from anydepth.models.base import Model
from anydepth.ops.fill import Fill
from anydepth.ops.kv import Chunk, KVMap, TurnKV


class State(NamedTuple):
    """What changes from turn to turn, by slot: h_Sd and kept_h_Sd as in `Slots`, and five numbers, int64.

    | column | |
    |---|---|
    | 0 | segment to run next |
    | 1 | position of the token carried in h_Sd |
    | 2 | which output comes next |
    | 3 | 1 while the request runs, 0 once it has ended |
    | 4 | depth of kept_h_Sd, 0 while nothing is kept |
    """

    h_Sd: Tensor
    kept_h_Sd: Tensor
    numbers_S5: Tensor


class Asks(NamedTuple):
    """What a request asked for, by slot. limits_S3: max_depth, max_tokens, number of its policy; planned_SI: readout
    depth of output i, 0 where the policy decides; stop_SK: its stop ids, -1 where there are fewer."""

    limits_S3: Tensor
    planned_SI: Tensor
    stop_SK: Tensor
    sampled_S: Tensor
    processed_S: Tensor
    uniform_SI: Tensor
    settings: sampling.Settings


class Prompts(NamedTuple):
    """A turn's prompt rows: what they carry, their positions, where they write and what they see; and of prompts that
    end in this turn the slots, and which of the P rows is the last."""

    h_Pd: Tensor
    positions_P: Tensor
    write_P: Tensor
    chunks: list[Chunk]
    ending_slots_F: Tensor
    ending_at_F: Tensor


class Kind(NamedTuple):
    """What makes two turns different programs. `context`: most positions a decode row may see. The others: whether any
    row has a planned depth, stop ids, is sampled, with top-k (the largest) or top-p, whether log-probabilities are
    wanted, and processed ones."""

    context: int
    planned: bool = False
    stops: bool = False
    sampled: bool = False
    max_k: int | None = None
    top_p: bool = False
    logprobs: bool = False
    processed: bool = False


class Given(NamedTuple):
    """What came of it. given_3L: of each row that may give a token, the token, its depth, and 1 if it gave one; its
    logprob; and the prompts' hidden rows. Of decode rows whose request has ended it means nothing."""

    given_3L: Tensor
    logprob_L: Tensor | None
    prompt_h_Pd: Tensor


Policies = tuple[tuple[int, Policy, Tensor], ...]  # number, policy, state by slot


def run_turn(
    model: Model,
    fill: Fill,
    map: KVMap,
    policies: Policies,
    state: State,
    asks: Asks,
    slots: Tensor,
    prompts: Prompts | None,
    kind: Kind,
) -> Given:
    """Run a turn of decode rows `slots` [B], and of prompt rows; moves `state`, the policies' states and the K/V on.

    A row whose request has ended is computed like the others, on the last position it had, but it writes no K/V, and
    what comes of it is dropped.
    """
    segments = model.shape.segments
    depth, position, output, runs, kept = state.numbers_S5.index_select(0, slots).unbind(1)
    h_Bd, h_Pd, write_B = _segment(model, map, state, slots, depth, position, runs > 0, prompts, kind)

    if prompts is not None and len(slots) + len(prompts.ending_slots_F) == 0:  # nobody who could give a token
        return Given(slots.new_zeros(3, 0), None, h_Pd)

    limits_B3 = asks.limits_S3.index_select(0, slots)
    leaves, last = _decide(model, policies, asks, slots, depth, output, runs, limits_B3, h_Bd, kind)
    read_Bd, read_depth, left = h_Bd, depth, last if leaves is None else leaves | last
    if fill.runs_on:
        read_Bd, kept = _keep(state, slots, depth, kept, left, h_Bd)
        left, read_depth = depth == segments, kept
    elif fill.copies:  # of a row that goes on, plane R counts, which has none deeper: it is written over with itself
        fill.leave(map.pool, write_B, torch.where(left, depth, segments))
    after: tuple[Tensor, ...] = (torch.where(left, 1, depth + 1), position, output, runs, kept)

    limit, next_Bd = limits_B3[:, 1], h_Bd
    if prompts is not None:  # the last row of a prompt leaves, at full depth
        ending, last_Fd = prompts.ending_slots_F, h_Pd[prompts.ending_at_F]
        ones = torch.ones_like(ending)
        slots, left = torch.cat((slots, ending)), torch.cat((left, ones > 0))
        output, read_depth = torch.cat((output, 0 * ones)), torch.cat((read_depth, segments * ones))
        limit = torch.cat((limit, asks.limits_S3[:, 1].index_select(0, ending)))
        read_Bd, next_Bd = torch.cat((read_Bd, last_Fd)), torch.cat((next_Bd, last_Fd))
        end_position = state.numbers_S5[:, 1].index_select(0, ending)
        more = (ones, end_position, 0 * ones, ones, 0 * ones)
        after = tuple(torch.cat(pair) for pair in zip(after, more, strict=True))
    token, logprob = _choose(asks, slots, output, model.readout(segments, read_Bd), kind)

    goes_on = output + 1 < limit
    if kind.stops:
        goes_on = goes_on & (asks.stop_SK.index_select(0, slots) != token.unsqueeze(1)).all(1)
    state.h_Sd.index_copy_(0, slots, torch.where(left.unsqueeze(1), model.embed(token), next_Bd))
    depth, position, output, runs, kept = after
    on = left & goes_on  # one that ends stays where it is: there may be no further position
    moved = torch.stack((depth, position + on, output + on, torch.where(left, runs * goes_on, runs), kept), 1)
    state.numbers_S5.index_copy_(0, slots, moved)
    return Given(torch.stack((token, read_depth, left)), logprob, h_Pd)


def _segment(
    model: Model,
    map: KVMap,
    state: State,
    slots: Tensor,
    depth: Tensor,
    position: Tensor,
    runs: Tensor,
    prompts: Prompts | None,
    kind: Kind,
) -> tuple[Tensor, Tensor, Tensor]:
    """(h of the decode rows, h of the prompt rows, where the decode rows wrote)."""
    write_B, storage_BT, mask = map.decode_rows(slots, position, depth, kind.context, runs)
    h, rows = state.h_Sd.index_select(0, slots), len(slots)
    if prompts is None:
        h = model.segment(1, h, TurnKV(map.pool, position, write_B, storage_BT, mask, []))
        return h, h[rows:], write_B
    kv = TurnKV(
        map.pool,
        torch.cat((position, prompts.positions_P)),
        torch.cat((write_B, prompts.write_P)),
        storage_BT if rows else None,
        mask if rows else None,
        prompts.chunks,
    )
    h = model.segment(1, torch.cat((h, prompts.h_Pd)), kv)
    return h[:rows], h[rows:], write_B


def _decide(
    model: Model,
    policies: Policies,
    asks: Asks,
    slots: Tensor,
    depth: Tensor,
    output: Tensor,
    runs: Tensor,
    limits_B3: Tensor,
    h_Bd: Tensor,
    kind: Kind,
) -> tuple[Tensor | None, Tensor]:
    """(the policy says so; None without one; the last depth is reached), [B] each."""
    last, adaptive = limits_B3[:, 0], None
    if kind.planned:
        planned = asks.planned_SI.index_select(0, slots).gather(1, output.unsqueeze(1)).squeeze(1)
        adaptive = planned == 0
        last = torch.where(adaptive, last, planned)
    at_last = depth == last
    says: Tensor | None = None
    for number, policy, states in policies:
        if policy.needs == "signal":
            seen = model.signal(1, h_Bd)
        else:
            seen = model.readout(1, h_Bd) if policy.needs == "logits" else h_Bd
        before = states.index_select(0, slots)
        leave, after = policy.decide(before, depth, seen)
        if len(policies) > 1:
            leave = leave & (limits_B3[:, 2] == number)
        if policy.tallies:  # they outlive the token: a row that was not asked must not count
            asked = (runs > 0) & ~at_last & (limits_B3[:, 2] == number)
            asked = asked if adaptive is None else asked & adaptive
            after = torch.where(asked.unsqueeze(1), after, before)
        states.index_copy_(0, slots, after)
        says = leave if says is None else says | leave
    if says is not None and adaptive is not None:
        says = says & adaptive
    return says, at_last


def _keep(
    state: State, slots: Tensor, depth: Tensor, kept: Tensor, reads: Tensor, h_Bd: Tensor
) -> tuple[Tensor, Tensor]:
    """Keep h and depth where a token is read for the first time; what is kept now, (h [B, d], depth [B])."""
    before = torch.where(depth == 1, 0, kept)
    now = reads & (before == 0)
    h = torch.where(now.unsqueeze(1), h_Bd, state.kept_h_Sd.index_select(0, slots))
    state.kept_h_Sd.index_copy_(0, slots, h)
    return h, torch.where(now, depth, before)


def _choose(asks: Asks, slots: Tensor, output: Tensor, logits_LV: Tensor, kind: Kind) -> tuple[Tensor, Tensor | None]:
    """(token [L], its logprob [L] or None); those of rows that give no token mean nothing."""
    token, chances = sampling.greedy(logits_LV), None
    if kind.sampled:
        settings = sampling.Settings(*(pool.index_select(0, slots) for pool in asks.settings))
        chances = sampling.processed(logits_LV, settings, max_k=kind.max_k, any_top_p=kind.top_p)
        u = asks.uniform_SI[slots, output]
        token = torch.where(asks.sampled_S.index_select(0, slots), sampling.pick(chances, u), token)
    if not kind.logprobs:
        return token, None
    logprob = sampling.raw_logprobs(logits_LV, token)
    if kind.processed and chances is not None:
        logprob = torch.where(asks.processed_S[slots], sampling.processed_logprobs(chances, token), logprob)
    return token, logprob
