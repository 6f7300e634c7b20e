"""Exit policies on tensors: where rows leave, against the reference's row-by-row rule and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anydepth.exits import fixed, gate_cdf, never, trace
from anydepth.exits.base import at_depth, bounds_of, thresholds
from anydepth.exits.load import known_policies, load_policy, policy_name
from anydepth.reference.policies import Row, make_policy
from anydepth.types import Sampling, Shape

SHAPE = Shape(
    segments=4,
    segment_layers=(range(2),) * 4,
    shared_weights=True,
    hidden=8,
    heads=2,
    kv_heads=2,
    head_dim=4,
    vocab=9,
    max_positions=16,
    has_gate=True,
)
NAMES = ["fixed", "gate_cdf", "interval", "never", "trace"]


def run(policy, asks, logits_NR, dtype):
    """Depths at which rows leave when the whole batch is asked round by round, rows that left staying in it."""
    rows, segments = logits_NR.shape
    numbers = [policy.parameters(ask, (ask.min_depth, ask.max_depth or segments), segments) for ask in asks]
    state = policy.start(torch.tensor(numbers, dtype=torch.float64))
    left = torch.zeros(rows, dtype=torch.int64)
    for depth in range(1, segments + 1):
        seen = logits_NR[:, depth - 1].to(dtype)
        leave, state = policy.decide(state, torch.full((rows,), depth), seen)
        left = torch.where((left == 0) & leave, depth, left)
    return left.tolist(), state


ASK = st.tuples(
    st.sampled_from([0.0, 0.2, 0.5, 0.51, 0.9, 0.999, 1.0]), st.integers(1, 4), st.integers(1, 4)
).map(lambda x: Sampling(exit_threshold=x[0], min_depth=min(x[1:]), max_depth=max(x[1:])))  # fmt: skip


@pytest.mark.parametrize("gate_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=100, deadline=None, derandomize=False, database=None, print_blob=True)
@given(data=st.data())
def test_a_batch_leaves_where_the_reference_says_row_by_row(gate_dtype, dtype, data):
    """Thresholds, bounds and hazards all mixed in one batch, hazards of 0 and 1 among them."""
    asks = data.draw(st.lists(ASK, min_size=1, max_size=5))
    logit = st.sampled_from([-math.inf, -3.0, -1.0, -0.2, 0.0, 0.7, 2.0, 6.3, 40.0]) | st.floats(-4, 4)
    logits = torch.tensor([[data.draw(logit) for _ in range(4)] for _ in asks], dtype=torch.float64).to(dtype)
    depths, _ = run(load_policy("gate_cdf", gate_dtype=gate_dtype), asks, logits, dtype)
    for ask, row, got in zip(asks, logits, depths, strict=True):
        rule = make_policy(
            4,
            True,
            exit_policy="gate_cdf",
            exit_threshold=ask.exit_threshold,
            min_depth=ask.min_depth,
            max_depth=ask.max_depth,
            gate_dtype=gate_dtype,
        )
        lone = Row(rule, 0)
        wanted = next(r for r in range(1, 5) if lone.leaves(r, row[r - 1]))
        assert got == wanted or lone.margin < 1e-12, (ask, row)


def test_the_product_starts_afresh_at_depth_one():
    """A token's hazards do not count for the next one."""
    policy, ask = gate_cdf.Policy(), Sampling(exit_threshold=0.5)
    state = policy.start(torch.tensor([policy.parameters(ask, (1, 4), 4)], dtype=torch.float64))
    for _ in range(3):
        depths = []
        for depth in (1, 2, 3):
            leave, state = policy.decide(state, torch.tensor([depth]), torch.tensor([math.log(0.25 / 0.75)]))
            depths.append(leave.item())
        assert depths == [False, False, True]  # 1 - .75^2 = .4375, 1 - .75^3 = .578


def test_a_threshold_that_is_met_exactly_leaves():
    """1 - .5 >= .5, and a threshold of 0 leaves at min."""
    half = torch.zeros(1, 4, dtype=torch.float64)
    assert run(gate_cdf.Policy(), [Sampling(exit_threshold=0.5)], half, torch.float64)[0] == [1]
    assert run(gate_cdf.Policy(), [Sampling(exit_threshold=0.75)], half, torch.float64)[0] == [2]
    silent = torch.full((1, 4), -math.inf, dtype=torch.float64)
    assert run(gate_cdf.Policy(), [Sampling(exit_threshold=0.0, min_depth=3)], silent, torch.float64)[0] == [3]


def test_a_threshold_of_one_turns_adaptive_exit_off():
    """Not `cdf >= 1`, which a hazard of 1 would reach; the released bfloat16 arithmetic does leave there."""
    certain = torch.full((1, 4), 100.0)
    ask = Sampling(exit_policy="gate_cdf", exit_threshold=1.0)
    assert run(gate_cdf.Policy(), [ask], certain, torch.float32)[0] == [4]
    assert run(gate_cdf.ReleasedArithmetic(), [ask], certain, torch.float32)[0] == [1]


def test_bfloat16_rounds_the_threshold_and_saturates():
    """0.2 becomes 0.2002, and a hazard is 1 from a logit of 6.24 on."""
    policy, ask = gate_cdf.ReleasedArithmetic(), Sampling(exit_policy="gate_cdf")
    assert policy.parameters(Sampling(exit_threshold=0.2), (1, 4), 4)[0] == 0.2001953125
    for logit, depth in ((6.25, 1), (6.0, 4)):
        logits = torch.tensor([[logit, -math.inf, -math.inf, -math.inf]])
        assert run(policy, [ask], logits, torch.float32)[0] == [depth]


@pytest.mark.parametrize(
    "tau, logit, wide, low",
    [
        (0.5, -0.002, 2, 1),  # a hazard of .4995 becomes .5: one flip, and the rounds after it decide nothing
        (0.20366, -1.3635, 1, 2),  # .20367 becomes .2031, the threshold .2041
        (0.5, -1.0, 3, 3),
        (0.5, 0.0, 1, 1),
    ],
)
def test_flips_are_counted_up_to_the_round_a_row_leaves(tau, logit, wide, low):
    policy, ask, logits = gate_cdf.ReleasedArithmetic(), Sampling(exit_threshold=tau), torch.full((1, 4), logit)
    assert run(gate_cdf.Policy(), [ask], logits, torch.float32)[0] == [wide]
    depths, state = run(policy, [ask], logits, torch.float32)
    assert depths == [low] and state[0, policy.tallies["gate_flips"]] == (wide != low)


def test_thresholds_below_min_are_out_of_reach_and_at_max_always_met():
    assert thresholds(0.5, (2, 3), 4) == (math.inf, 0.5, -math.inf, -math.inf)
    table = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert at_depth(table, torch.tensor([2, 0])).tolist() == [3.0, 4.0]


@pytest.mark.parametrize("name", NAMES)
def test_planned_policies_know_every_depth_beforehand(name):
    ask = Sampling(depth=2, trace=(4, 1, 3), exit_threshold=0.5, interval=2, shallow_depth=1)
    planned = [load_policy(name).planned(ask, index, 4) for index in range(3)]
    depths = {"never": [4] * 3, "fixed": [2] * 3, "interval": [4, 1, 4], "trace": [4, 1, 3], "gate_cdf": [None] * 3}
    assert planned == depths[name]
    assert load_policy(name).needs == ("signal" if name == "gate_cdf" else "nothing")


def test_every_so_many_tokens_think_to_the_end():
    """Counted from the first token that is fed back, or from the prompt's last where that is a decode row."""
    policy = load_policy("interval")
    depths = [policy.planned(Sampling(interval=3, shallow_depth=1), index, 4) for index in range(8)]
    assert depths == [4, 1, 1, 4, 1, 1, 4, 1]
    by_policy = Sampling(interval=3, shallow_depth=1, first_token="policy")
    assert [policy.planned(by_policy, index, 4) for index in range(7)] == [1, 1, 4, 1, 1, 4, 1]
    assert [policy.planned(Sampling(interval=1), index, 4) for index in range(3)] == [4, 4, 4]


def test_names():
    assert known_policies() == sorted([*NAMES, "confidence", "probe"])  # those of heads: tests/engine/test_heads.py
    assert isinstance(load_policy("tests.exits.test_policies:Own"), Own)
    assert type(load_policy("gate_cdf", gate_dtype="bfloat16")) is gate_cdf.ReleasedArithmetic
    assert type(load_policy("never", gate_dtype="bfloat16")) is never.Policy


class Own(fixed.Policy):
    """A policy of somebody's own."""


@pytest.mark.parametrize(
    "options, name",
    [
        ({}, "never"),
        ({"depth": 3}, "fixed"),
        ({"trace": (4,)}, "trace"),
        ({"exit_threshold": 0.99}, "gate_cdf"),
        ({"exit_policy": "gate_cdf"}, "gate_cdf"),
        ({"exit_policy": "fixed", "depth": 3}, "fixed"),
        ({"exit_policy": "gate_cdf", "exit_threshold": 0.3}, "gate_cdf"),
        ({"exit_policy": "a:B", "exit_threshold": 0.3}, "a:B"),
    ],
)
def test_options_imply_their_policy(options, name):
    assert policy_name(Sampling(**options)) == name


def test_bounds():
    assert bounds_of(Sampling(), SHAPE) == (1, 4) and bounds_of(Sampling(min_depth=2, max_depth=3), SHAPE) == (2, 3)
    never.Policy().check(Sampling(min_depth=4), SHAPE)
    fixed.Policy().check(Sampling(depth=2, min_depth=2, max_depth=2), SHAPE)
    trace.Policy().check(Sampling(trace=(4, 2, 3), min_depth=2, max_depth=3), SHAPE)
    trace.Policy().check(Sampling(trace=(1, 2), first_token="policy"), SHAPE)
