import math

import pytest
import torch

from anydepth.reference.policies import Row, make_policy


def depth_of(hazards, *, dtype=torch.float64, segments=None, logits=None, **settings):
    """The depth at which a row with these hazards leaves; the row itself beside it."""
    logits = logits if logits is not None else [math.log(x / (1 - x)) if 0 < x < 1 else -1e9 for x in hazards]
    row = Row(make_policy(segments or len(logits), True, **settings), 0)
    for r, logit in enumerate(logits, start=1):
        if row.leaves(r, torch.tensor(logit, dtype=dtype)):
            return r, row
    raise AssertionError("the row never left")


def test_product_runs_over_the_rounds_below_min():
    assert depth_of([0.3, 0.3, 0.3], exit_threshold=0.5, min_depth=2)[0] == 2
    assert depth_of([0.9, 0.0, 0.0], exit_threshold=0.5, min_depth=2)[0] == 2


def test_nothing_fires_leaves_at_max_not_at_one():
    assert depth_of([0.01] * 4, exit_threshold=0.9)[0] == 4
    assert depth_of([0.01] * 4, exit_threshold=0.9, max_depth=3)[0] == 3


def test_neutral_settings():
    certain = [1e9] * 4  # sigmoid is 1.0: the cdf reaches 1 at the first round
    assert depth_of(None, logits=certain, exit_policy="gate_cdf", exit_threshold=1.0)[0] == 4
    assert depth_of(None, logits=certain, exit_threshold=0.999)[0] == 1
    assert depth_of([0.0] * 4, exit_threshold=0.0)[0] == 1
    assert depth_of([0.0] * 4, exit_threshold=0.0, min_depth=3)[0] == 3
    assert depth_of([0.9] * 4)[0] == 4  # no setting: never


def test_a_tie_leaves():
    depth, row = depth_of(None, logits=[0.0, 0.0, 0.0], exit_threshold=0.75)
    assert (depth, row.cdf, row.margin) == (2, [0.5, 0.75], 0.0)


def test_deciding_number_is_the_sum_of_exit_probabilities():
    hazards = [0.2, 0.5, 0.1, 0.7]
    _, row = depth_of(hazards, exit_policy="gate_cdf")
    pdf, remaining = [], 1.0
    for hazard in hazards:
        pdf.append(hazard * remaining)
        remaining -= pdf[-1]
    assert row.cdf == pytest.approx([sum(pdf[: r + 1]) for r in range(4)])
    assert row.margin == math.inf  # threshold 1: nothing was compared
    _, row = depth_of(hazards, exit_threshold=0.5)
    assert row.margin == pytest.approx(0.1) and row.depth == 2
    _, row = depth_of(hazards, exit_threshold=0.2, min_depth=2)
    assert row.margin == pytest.approx(0.4)  # round 1 could not have left


def test_float32_hazards_enter_a_float64_product():
    _, row = depth_of([0.2, 0.5], dtype=torch.float32, exit_threshold=0.99)
    a, b = (float(torch.sigmoid(torch.tensor(math.log(x / (1 - x)), dtype=torch.float32))) for x in (0.2, 0.5))
    assert row.cdf == [1.0 - (1.0 - a), 1.0 - (1.0 - a) * (1.0 - b)]


def test_released_arithmetic_rounds_everything_to_bfloat16():
    released = {"gate_dtype": "bfloat16", "exit_policy": "gate_cdf"}
    # the logit of 0.19995 rounds up to a hazard of 0.2002, and 0.2 becomes 0.2002 too: a flip
    assert depth_of([0.19995, 0.0, 0.0], exit_threshold=0.2)[0] == 3
    assert depth_of([0.19995, 0.0, 0.0], exit_threshold=0.2, **released)[0] == 1
    _, row = depth_of([0.5, 0.5, 0.5], exit_threshold=0.2, **released)
    assert row.margin == 0.5 - 0.2001953125
    # a sigmoid is 1.0 from logit 6.24 on, so that a threshold of 1 can leave early
    assert depth_of(None, logits=[6.25, 0.0, 0.0], exit_threshold=1.0, **released)[0] == 1
    assert depth_of(None, logits=[6.20, -9.0, -9.0], exit_threshold=1.0, **released)[0] == 3
    # a running sum in bfloat16 loses a probability below half its last place
    _, row = depth_of([0.75, 0.004, 0.0], exit_threshold=0.99, **released)
    assert row.cdf[:2] == [0.75, 0.75]
    assert row.cdf[2] == 1.0  # the last round takes what remains: its gate is never used


def test_fixed_and_trace():
    assert depth_of([0.9] * 4, depth=3)[0] == 3
    policy = make_policy(4, False, trace=[4, 1, 3])
    for index, depth in enumerate([4, 1, 3]):
        row = Row(policy, index)
        assert [row.leaves(r, None) for r in range(1, depth + 1)] == [False] * (depth - 1) + [True]


@pytest.mark.parametrize(
    "settings",
    [
        {"min_depth": 3, "max_depth": 2},
        {"min_depth": 0},
        {"max_depth": 5},
        {"exit_threshold": -0.1},
        {"exit_threshold": 1.1},
        {"max_depth": 3},
        {"depth": 1, "min_depth": 2},
        {"depth": 5},
        {"trace": [4, 5]},
        {"exit_policy": "sometimes"},
        {"exit_policy": "fixed"},
        {"exit_threshold": 0.5, "gate_dtype": "float16"},
    ],
)
def test_refused(settings):
    with pytest.raises(ValueError):
        make_policy(4, True, **settings)


def test_a_gate_policy_needs_a_gate():
    with pytest.raises(ValueError, match="gate"):
        make_policy(4, False, exit_threshold=0.5)
