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
    """What changes from turn to turn, by slot. depth_S: segment to run next; position_S: of the token carried in h_Sd;
    output_S: which output comes next; runs_S: False once the request has ended; kept_*: as in `Slots`."""

    h_Sd: Tensor
    kept_h_Sd: Tensor
    kept_depth_S: Tensor
    depth_S: Tensor
    position_S: Tensor
    output_S: Tensor
    runs_S: Tensor


class Asks(NamedTuple):
    """What a request asked for, by slot. planned_SI: readout depth of output i, 0 where the policy decides; high_S: its
    max_depth; policy_S: which policy; stop_SK: its stop ids, -1 where there are fewer; limit_S: max_tokens."""

    planned_SI: Tensor
    high_S: Tensor
    policy_S: Tensor
    limit_S: Tensor
    stop_SK: Tensor
    sampled_S: Tensor
    processed_S: Tensor
    uniform_SI: Tensor
    settings: sampling.Settings


class Rows(NamedTuple):
    """The turn's rows: slots of the decode rows; of prompts, the hidden rows, their positions and where they are
    written, and for those that end, their slots and which of the P rows is the last."""

    slots_B: Tensor
    prompt_h_Pd: Tensor
    prompt_positions_P: Tensor
    prompt_write_P: Tensor
    ending_slots_F: Tensor
    ending_at_F: Tensor


class Kind(NamedTuple):
    """What makes two turns different programs. `context`: most positions a decode row may see. The others: whether any
    row is sampled, with top-k (the largest) or top-p, whether log-probabilities are wanted, and processed ones."""

    context: int
    sampled: bool = False
    max_k: int | None = None
    top_p: bool = False
    logprobs: bool = False
    processed: bool = False


class Given(NamedTuple):
    """What came of it: of each B whether it ran; of each L whether it gave a token, which, from which depth, and its
    logprob; the prompts' hidden rows."""

    ran_B: Tensor
    left_L: Tensor
    token_L: Tensor
    depth_L: Tensor
    logprob_L: Tensor | None
    prompt_h_Pd: Tensor


def run_turn(
    model: Model,
    fill: Fill,
    map: KVMap,
    policies: tuple[tuple[int, Policy, Tensor], ...],
    chunks: list[Chunk],
    state: State,
    asks: Asks,
    rows: Rows,
    kind: Kind,
) -> Given:
    """Run a turn and move `state`, the policies' states (number, policy, state by slot) and the K/V on."""
    slots, segments = rows.slots_B, model.shape.segments
    runs_B, depth_B = state.runs_S[slots], state.depth_S[slots]
    # A row that ended may stand one beyond the last position there is.
    position_B, output_B = torch.where(runs_B, state.position_S[slots], 0), state.output_S[slots]
    write_B, storage_BT, mask = map.decode_rows(slots, position_B, depth_B, kind.context, runs_B)
    some = len(slots) > 0
    kv = TurnKV(
        map.pool,
        torch.cat((position_B, rows.prompt_positions_P)),
        torch.cat((write_B, rows.prompt_write_P)),
        storage_BT if some else None,
        mask if some else None,
        chunks,
    )
    carried_Bd = state.h_Sd[slots]
    h_Nd = model.segment(1, torch.cat((carried_Bd, rows.prompt_h_Pd)), kv)
    h_Bd, h_Pd = h_Nd[: len(slots)], h_Nd[len(slots) :]

    leaves_B, last_B = _decide(model, policies, asks, slots, depth_B, output_B, runs_B, h_Bd)
    if fill.runs_on:
        read_Bd, read_depth_B = _keep(state, slots, depth_B, leaves_B | last_B, h_Bd)
        left_B = runs_B & (depth_B == segments)
    else:
        read_Bd, read_depth_B, left_B = h_Bd, depth_B, runs_B & (leaves_B | last_B)
        if fill.copies:  # of a row that goes on, plane R counts, which has none deeper: it is written over with itself
            fill.leave(map.pool, write_B, torch.where(left_B, depth_B, segments))

    slots_L = torch.cat((slots, rows.ending_slots_F))
    left_L = torch.cat((left_B, torch.ones_like(rows.ending_slots_F, dtype=torch.bool)))
    depth_L = torch.cat((read_depth_B, torch.full_like(rows.ending_slots_F, segments)))
    output_L = state.output_S[slots_L]
    logits_LV = model.readout(segments, torch.cat((read_Bd, h_Pd[rows.ending_at_F])))
    token_L, logprob_L = _choose(asks, slots_L, output_L, logits_LV, kind)

    ends_L = (asks.stop_SK[slots_L] == token_L.unsqueeze(1)).any(1) | (output_L + 1 >= asks.limit_S[slots_L])
    next_B = torch.where(runs_B.unsqueeze(1), h_Bd, carried_Bd)
    next_L = torch.cat((next_B, h_Pd[rows.ending_at_F]))
    state.h_Sd.index_copy_(0, slots_L, torch.where(left_L.unsqueeze(1), model.embed(token_L), next_L))
    before_L = state.depth_S[slots_L]
    state.depth_S.index_copy_(0, slots_L, torch.where(left_L, 1, before_L + state.runs_S[slots_L]))
    state.position_S.index_copy_(0, slots_L, state.position_S[slots_L] + left_L)
    state.output_S.index_copy_(0, slots_L, output_L + left_L)
    state.runs_S.index_copy_(0, slots_L, state.runs_S[slots_L] & ~(left_L & ends_L))
    return Given(runs_B, left_L, token_L, depth_L, logprob_L, h_Pd)


def _decide(
    model: Model,
    policies: tuple[tuple[int, Policy, Tensor], ...],
    asks: Asks,
    slots: Tensor,
    depth_B: Tensor,
    output_B: Tensor,
    runs_B: Tensor,
    h_Bd: Tensor,
) -> tuple[Tensor, Tensor]:
    """(the policy says so, the last depth is reached), [B] each."""
    planned_B = asks.planned_SI[slots, output_B.clamp(max=asks.planned_SI.shape[1] - 1)]
    high_B = asks.high_S[slots]
    asked_B = runs_B & (planned_B == 0) & (depth_B < high_B)
    leaves_B = torch.zeros_like(runs_B)
    for number, policy, states in policies:
        if policy.needs == "signal":
            seen = model.signal(1, h_Bd)
        else:
            seen = model.readout(1, h_Bd) if policy.needs == "logits" else h_Bd
        before = states.index_select(0, slots)
        leave, after = policy.decide(before, depth_B, seen)
        mine_B = asked_B & (asks.policy_S[slots] == number)
        states.index_copy_(0, slots, torch.where(mine_B.unsqueeze(1), after, before))
        leaves_B = leaves_B | (leave & mine_B)
    return leaves_B, depth_B == torch.where(planned_B > 0, planned_B, high_B)


def _keep(state: State, slots: Tensor, depth_B: Tensor, reads_B: Tensor, h_Bd: Tensor) -> tuple[Tensor, Tensor]:
    """Keep h and depth where a token is read for the first time; what is kept now, (h [B, d], depth [B])."""
    before = torch.where(depth_B == 1, 0, state.kept_depth_S[slots])
    now = reads_B & (before == 0)
    h = torch.where(now.unsqueeze(1), h_Bd, state.kept_h_Sd[slots])
    depth = torch.where(now, depth_B, before)
    state.kept_h_Sd.index_copy_(0, slots, h)
    state.kept_depth_S.index_copy_(0, slots, depth)
    return h, depth


def _choose(
    asks: Asks, slots_L: Tensor, output_L: Tensor, logits_LV: Tensor, kind: Kind
) -> tuple[Tensor, Tensor | None]:
    """(token [L], its logprob [L] or None); those of rows that give no token mean nothing."""
    token, chances = sampling.greedy(logits_LV), None
    if kind.sampled:
        settings = sampling.Settings(*(pool[slots_L] for pool in asks.settings))
        chances = sampling.processed(logits_LV, settings, max_k=kind.max_k, any_top_p=kind.top_p)
        u = asks.uniform_SI[slots_L, output_L.clamp(max=asks.uniform_SI.shape[1] - 1)]
        token = torch.where(asks.sampled_S[slots_L], sampling.pick(chances, u), token)
    if not kind.logprobs:
        return token, None
    logprob = sampling.raw_logprobs(logits_LV, token)
    if kind.processed and chances is not None:
        logprob = torch.where(asks.processed_S[slots_L], sampling.processed_logprobs(chances, token), logprob)
    return token, logprob
