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
from anydepth.ops.fill import Early, Fill
from anydepth.ops.kv import Chunk, KVMap, TurnKV


class State(NamedTuple):
    """What changes from turn to turn, by slot: h_Sd and kept_h_Sd as in `Slots`, and eight numbers, int64, of which the
    last three are the request's own.

    | column | |
    |---|---|
    | 0 | segment to run next |
    | 1 | position of the token carried in h_Sd |
    | 2 | which output comes next |
    | 3 | 1 while the request runs, 0 once it has ended |
    | 4 | depth of kept_h_Sd, 0 while nothing is kept |
    | 5 | its max_depth |
    | 6 | its last output |
    | 7 | the number of its policy, -1 if none is asked |
    """

    h_Sd: Tensor
    kept_h_Sd: Tensor
    numbers_S8: Tensor


MOVING = 5  # columns that change from turn to turn


class Asks(NamedTuple):
    """What a request asked for, by slot. planned_SI: readout depth of output i, 0 where the policy decides; stop_SK:
    its stop ids, -1 where there are fewer."""

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
    row has a planned depth, stop ids, may end in this turn or have ended before (as padding has), is sampled, with
    top-k (the largest) or top-p, whether log-probabilities are wanted, and processed ones."""

    context: int
    planned: bool = False
    stops: bool = False
    ends: bool = True
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
    prompt_h_Pd: Tensor | None


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
    numbers = state.numbers_S8.index_select(0, slots)
    depth, position, output, runs, kept, last, final, policy = numbers.unbind(1)
    h_Bd, h_Pd, write_B = _segment(model, map, state, slots, depth, position, runs, prompts, kind)
    if prompts is not None and len(slots) + len(prompts.ending_slots_F) == 0:  # nobody who could give a token
        return Given(slots.new_zeros(3, 0), None, h_Pd)

    rows = Deciding(slots, depth, output, runs, kept, last, policy)
    read_Bd, read_depth, left = h_Bd, depth, _leaves(model, policies, asks, rows, h_Bd, kind)
    if fill.runs_on:
        read_Bd, kept = _keep(state, slots, depth, kept, left, h_Bd)
        left, read_depth = depth == segments, kept
    elif fill.copies:  # of a row that goes on, plane R counts, which has none deeper: it is written over with itself
        fill.leave(model, map.pool, Early(write_B, torch.where(left, depth, segments), None, slots, position, h_Bd))

    next_Bd = h_Bd
    if prompts is not None and h_Pd is not None:  # the last row of a prompt leaves, at full depth
        ending, last_Fd = prompts.ending_slots_F, h_Pd[prompts.ending_at_F]
        full = torch.full_like(ending, segments)
        slots, left = torch.cat((slots, ending)), torch.cat((left, full > 0))
        read_depth, kept = torch.cat((read_depth, full)), torch.cat((kept, 0 * full))
        read_Bd, next_Bd = torch.cat((read_Bd, last_Fd)), torch.cat((next_Bd, last_Fd))
        numbers = torch.cat((numbers, state.numbers_S8.index_select(0, ending)))
        depth, position, output, runs, _, last, final, policy = numbers.unbind(1)
    token, logprob = _choose(asks, slots, output, model.readout(segments, read_Bd), kind)

    gave = on = left.long()
    if kind.ends:
        goes_on = output < final
        if kind.stops:
            goes_on = goes_on & (asks.stop_SK.index_select(0, slots) != token.unsqueeze(1)).all(1)
        on = gave * goes_on  # one that ends stays where it is: there may be no further position
        runs = runs * (on == gave)
    moved = (depth.masked_fill(left, 0) + 1, position + on, output + on, runs, kept, last, final, policy)
    state.numbers_S8.index_copy_(0, slots, torch.stack(moved, 1))
    state.h_Sd.index_copy_(0, slots, torch.where(left.unsqueeze(1), model.embed(token), next_Bd))
    return Given(torch.stack((token, read_depth, gave)), logprob, h_Pd)


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
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(h of the decode rows, h of the prompt rows if there are any, where the decode rows wrote)."""
    ended = (runs == 0).unsqueeze(1) if kind.ends else None
    write_B, seen = map.together(slots, position.unsqueeze(1), depth, kind.context, ended)
    h, rows = state.h_Sd.index_select(0, slots), len(slots)
    if prompts is None:
        return model.segment(1, h, TurnKV(map.pool, position, write_B, [seen])), None, write_B
    kv = TurnKV(
        map.pool,
        torch.cat((position, prompts.positions_P)),
        torch.cat((write_B, prompts.write_P)),
        [seen, *prompts.chunks] if rows else prompts.chunks,
    )
    h = model.segment(1, torch.cat((h, prompts.h_Pd)), kv)
    return h[:rows], h[rows:], write_B


class Deciding(NamedTuple):
    """Decode rows before they are asked, [B] each: slot, depth, output, whether they run, the depth at which they
    were read if they run on, max_depth, their policy."""

    slots: Tensor
    depth: Tensor
    output: Tensor
    runs: Tensor
    kept: Tensor
    last: Tensor
    policy: Tensor


def _leaves(model: Model, policies: Policies, asks: Asks, rows: Deciding, h_Bd: Tensor, kind: Kind) -> Tensor:
    """[B], whether the policy says so or the last depth is reached."""
    slots, depth, output, runs, kept, last, mine = rows
    adaptive = None
    if kind.planned:
        planned = asks.planned_SI.index_select(0, slots).gather(1, output.unsqueeze(1)).squeeze(1)
        adaptive = planned == 0
        last = torch.where(adaptive, last, planned)
    at_last = depth == last
    says: Tensor | None = None
    if model.shape.segments == 1:
        return at_last
    inner = depth.clamp(max=model.shape.segments - 1) if policies else depth  # a policy may know nothing of R
    for number, policy, states in policies:
        before = states.index_select(0, slots)
        leave, after = policy.decide(before, inner, policy.seen(model, 1, h_Bd))
        if len(policies) > 1:
            leave = leave & (mine == number)
        if policy.tallies:  # they outlive the token: a row that was not asked, or has left, must not count
            asked = (runs > 0) & (depth < last) & (mine == number) & ((depth == 1) | (kept == 0))
            asked = asked if adaptive is None else asked & adaptive
            after = torch.where(asked.unsqueeze(1), after, before)
        states.index_copy_(0, slots, after)
        says = leave if says is None else says | leave
    if says is None:
        return at_last
    return at_last | (says if adaptive is None else says & adaptive)


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
