"""The definition of equality has teeth: each tolerance fails at twice its size, and only near-ties are excused."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from anydepth.reference import Model, generate, random_weights, score, tiny_config

from .equality import Verdict, assert_campaign, assert_equal, compare

PROMPT = [5, 33, 12, 7]
GREEDY = {"max_tokens": 6, "exit_threshold": 0.5, "fill": "last_exited"}
SAMPLED = GREEDY | {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 4, "logprobs": "processed"}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])


def run(dtype=torch.float64, settings=GREEDY):
    config = tiny_config()
    return generate(Model(config, random_weights(config, 2, dtype)), PROMPT, **settings)


def pair(dtype=torch.float64, settings=GREEDY):
    """A reference result and an independent copy of it to spoil."""
    reference = run(dtype, settings)
    return reference, copy.deepcopy(reference)


@BOTH
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED])
def test_equal_to_itself(dtype, settings):
    verdict = assert_equal(*pair(dtype, settings))
    assert verdict and verdict.divergence is None and not verdict.near_ties
    assert set(verdict.worst.values()) == {0.0}


def test_optional_parts_may_be_missing():
    reference = run()
    assert_equal(reference, SimpleNamespace(token_ids=tuple(reference.token_ids), depths=tuple(reference.depths)))


@BOTH
def test_float32_and_float64_runs_of_the_same_weights(dtype):
    config = tiny_config()
    weights = random_weights(config, 2, torch.float32)
    single, double = (
        generate(Model(config, {n: w.to(d) for n, w in weights.items()}), PROMPT, **SAMPLED)
        for d in (torch.float32, torch.float64)
    )
    if dtype == torch.float32:
        assert_equal(single, double)
    else:
        assert not compare(double, single)  # 1e-9 sees the rounding


@BOTH
@pytest.mark.parametrize("factor, equal", [(0.9, True), (2.0, False), (math.nan, False), (math.inf, False)])
@pytest.mark.parametrize("what", ["logits", "logprobs", "K", "V"])
def test_tolerances_fail_at_twice_their_size(dtype, factor, equal, what):
    reference, got = pair(dtype)
    target, n = {
        "logits": (got.logits[3], 5),
        "logprobs": (got.logprobs, 2),
        "K": (got.planes[2][0][1, 6, 1], 3),
        "V": (got.planes[3][1][0, 2, 0], 0),
    }[what]
    target[n] += factor * TOLERANCE[dtype] * (1 + abs(float(target[n])))
    verdict = compare(reference, got)
    assert verdict.equal == equal
    assert equal or len(verdict.problems) == 1
    assert max(verdict.worst.values()) == pytest.approx(factor if factor == factor else math.inf, rel=0.2)


@BOTH
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED])
def test_another_id_or_depth_is_a_difference(dtype, settings):
    for what in ("token_ids", "depths"):
        reference, got = pair(dtype, settings)
        getattr(got, what)[2] += 1
        verdict = compare(reference, got)
        assert not verdict and verdict.divergence == 2 and "output 2" in verdict.problems[0]
        with pytest.raises(AssertionError, match="output 2"):
            assert_equal(reference, got)


def diverging(dtype, settings, *, what, draw=None, margin=None):
    """The two runs part at output 2, where the reference's draw or margin is replaced."""
    reference, got = pair(dtype, settings)
    if draw:
        reference.draws[2] = dataclasses.replace(reference.draws[2], **draw)
    if margin is not None:
        reference.decisions[2].margin = margin
    for n in range(2, len(got.token_ids)):
        got.token_ids[n] = (got.token_ids[n] + 1) % 61
        got.depths[n] = got.depths[n] % 4 + 1 if what == "depths" or n > 2 else got.depths[n]
        got.logits[n] = got.logits[n] + (n > 2 or what == "depths")
    return compare(reference, got)


EXCUSES = [
    ("token_ids", GREEDY, {"draw": {"top_gap": 1e-4}}, {"draw": {"top_gap": 2e-4}}),
    ("token_ids", SAMPLED, {"draw": {"u": 0.5, "low": 0.5 - 0.9e-5}}, {"draw": {"u": 0.5, "low": 0.5 - 2e-5}}),
    ("token_ids", SAMPLED, {"draw": {"u": 0.5, "high": 0.5 + 0.9e-5}}, {"draw": {"u": 0.5, "high": 0.5 + 2e-5}}),
    ("token_ids", SAMPLED, {"draw": {"cut_gap": 1e-4}}, {"draw": {"cut_gap": 2e-4}}),
    ("token_ids", SAMPLED, {"draw": {"mass_gap": 1e-5}}, {"draw": {"mass_gap": 2e-5}}),
    ("depths", GREEDY, {"margin": 1e-5}, {"margin": 2e-5}),
]


@pytest.mark.parametrize("what, settings, near, far", EXCUSES)
def test_near_ties_are_excused_in_float32_only(what, settings, near, far):
    verdict = diverging(torch.float32, settings, what=what, **near)
    assert verdict.equal and len(verdict.near_ties) == 1 and verdict.divergence == 2
    assert not diverging(torch.float64, settings, what=what, **near)
    assert not diverging(torch.float32, settings, what=what, **far)


def test_a_token_tie_does_not_excuse_a_depth_nor_a_policy_tie_a_token():
    assert not diverging(torch.float32, GREEDY, what="depths", draw={"top_gap": 0.0})
    assert not diverging(torch.float32, GREEDY, what="token_ids", margin=0.0)


def test_the_common_prefix_is_still_compared_after_a_near_tie():
    reference, got = pair(torch.float32)
    reference.draws[2] = dataclasses.replace(reference.draws[2], top_gap=0.0)
    got.token_ids[2] += 1
    got.planes[0][0][:, len(PROMPT) + 2 :] += 1.0  # the position of the differing token and later ones
    assert compare(reference, got)
    got.planes[0][0][0, len(PROMPT) + 1, 0, 0] += 1.0  # the position that produced it
    assert not compare(reference, got)
    got = copy.deepcopy(reference)
    got.token_ids[2] += 1
    got.logits[2][0] += 1.0  # its row's logits are still the same
    assert not compare(reference, got)


def test_lengths_prompts_and_shapes():
    reference, got = pair()
    for name in ("token_ids", "depths", "logits", "logprobs"):
        getattr(got, name).pop()
    assert "5 outputs" in compare(reference, got).problems[0]
    longer = run(settings=GREEDY | {"max_tokens": 7})
    assert "7 outputs" in compare(reference, longer).problems[0]
    for change in (
        {"depths": reference.depths[:-1]},
        {"prompt_ids": [1]},
        {"logits": reference.logits[:-1]},
        {"logprobs": reference.logprobs[:-1]},
        {"planes": reference.planes[:-1]},
        {"planes": [(k[:, :-1], v) for k, v in reference.planes]},
        {"logprobs_mode": "processed"},
        {"finish_reason": "stop"},
    ):
        got = dataclasses.replace(reference, **change)
        assert len(compare(reference, got).problems) >= 1, change


def test_planes_a_fill_leaves_empty_are_not_compared():
    reference, got = pair()
    positions = len(PROMPT) + 5
    got.plane_depths = [4] * positions
    got.plane_depths[6] = 2
    for plane in (2, 3):
        for x in got.planes[plane]:
            x[:, 6] = math.nan
    assert_equal(reference, got)
    got.plane_depths[6] = 3
    assert not compare(reference, got)


def test_usage():
    reference, got = pair()
    got.usage.segments_wasted = 3
    assert_equal(reference, got)
    got.usage.segments_executed += 1
    assert "segments_executed" in compare(reference, got).problems[0]
    assert_equal(reference, got, executed=got.usage.segments_executed)
    assert_equal(reference, got, usage=("decode_tokens",))


def test_scores():
    config = tiny_config()
    model = Model(config, random_weights(config, 2, torch.float32))
    reference = score(model, PROMPT, [1, 2, 3], exit_threshold=0.5)
    got = SimpleNamespace(logprobs=tuple(reference.logprobs), depths=tuple(reference.depths), greedy=False)
    assert_equal(reference, got)
    got.greedy = True
    assert "greedy" in compare(reference, got).problems[0]
    second = reference.logits[1].topk(2)
    reference.logits[1][second.indices[1]] = second.values[0] - 5e-5
    assert compare(reference, got).near_ties
    got.depths = (got.depths[0], got.depths[1] % 4 + 1, got.depths[2])
    assert not compare(reference, got)


def test_another_kept_set_excuses_a_processed_logprob():
    reference, got = pair(torch.float32, SAMPLED)
    got.logprobs[1] += 0.01
    assert not compare(reference, got)
    reference.draws[1] = dataclasses.replace(reference.draws[1], cut_gap=1e-5)
    verdict = compare(reference, got)
    assert verdict and len(verdict.near_ties) == 1 and verdict.divergence is None


def test_a_campaign_allows_half_a_percent_of_near_ties():
    good, tie, bad = Verdict(), Verdict(near_ties=["tie"]), Verdict(problems=["wrong"])
    assert_campaign([good] * 199 + [tie])
    with pytest.raises(AssertionError, match="1 near-ties"):
        assert_campaign([good] * 198 + [tie])
    with pytest.raises(AssertionError, match="case 1: wrong"):
        assert_campaign([good, bad])
