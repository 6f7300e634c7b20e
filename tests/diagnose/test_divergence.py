"""Which class a difference falls into, from margins and baseline alone; answers are made by hand."""

from __future__ import annotations

import json
from math import inf

import pytest

from anydepth.diagnose.divergence import (
    DIFFERENT_WORK,
    FAULT,
    GATE_TIE,
    NEAR_TIE,
    Baseline,
    Margins,
    asks_differ,
    diagnose,
    gate_contradiction,
)
from anydepth.types import Output, Usage
from tests.eval.made_records import GATE, SETTINGS

GREEDY = Baseline(concurrency=8, answers=1, positions=3, logit=1e-5, cdf=1e-6)
SAMPLED = Baseline(concurrency=8, answers=1, positions=3, logit=1e-5, probability=1e-7, cdf=1e-6)


class Says:
    """A judge that gives every pair the same margins, and counts how often it was asked."""

    def __init__(self, margins=None, baseline=GREEDY):
        self.says, self.base, self.asked = margins or Margins(), baseline, []

    def margins(self, pairs):
        self.asked += pairs
        return [self.says for _ in pairs]

    def baseline(self):
        return self.base


def answer(ids=(7, 8, 9, 1), depths=None, *, id="q", prompt=(1, 2), reason="stop"):
    return Output(
        request_id=id,
        prompt_ids=prompt,
        token_ids=tuple(ids),
        depths=tuple(depths or [4] * len(ids)),
        text="",
        finish_reason=reason,
        usage=Usage(decode_tokens=len(ids) - 1),
        seed=0,
    )


def only(a, b, margins=None, baseline=GREEDY, **options):
    found = diagnose([a], [b], judge=Says(margins, baseline), segments=4, **options)
    (one,) = found.divergences
    assert found.classes[one.kind] == 1 == sum(found.classes.values())
    return one


OTHER_TOKEN = answer((7, 8, 5, 1))
OTHER_DEPTH = answer(depths=(4, 4, 2, 4))


@pytest.mark.parametrize(
    ("margins", "baseline", "kind"),
    [
        (Margins(token=9e-6), GREEDY, NEAR_TIE),
        (Margins(token=1e-5), GREEDY, FAULT),  # below, not at
        (Margins(token=2.0), GREEDY, FAULT),
        (Margins(top=1e-9, token=2.0), GREEDY, FAULT),  # a tie of two others explains nothing
        (Margins(), GREEDY, FAULT),
        (Margins(token=0.0), Baseline(concurrency=1, answers=1, positions=1, logit=0.0), FAULT),
        (Margins(token=9e-8), SAMPLED, NEAR_TIE),
        (Margins(token=1e-6), SAMPLED, FAULT),  # a probability, not a logit
        (Margins(token=0.3, cut=1e-6), SAMPLED, NEAR_TIE),
        (Margins(token=0.3, mass=1e-8), SAMPLED, NEAR_TIE),
    ],
)
def test_another_token_is_a_near_tie_below_the_baseline_only(margins, baseline, kind):
    assert only(answer(), OTHER_TOKEN, margins, baseline).kind == kind


@pytest.mark.parametrize(
    ("margins", "kind"),
    [
        (Margins(token=0.0, gate=9e-7), GATE_TIE),
        (Margins(token=0.0, gate=1e-6), FAULT),
        (Margins(token=9e-6, gate=9e-7), GATE_TIE),
        (Margins(token=2.0, gate=9e-7), FAULT),  # the depth is a tie, the token at that depth is none
        (Margins(token=0.0, gate=None), FAULT),  # no gate decides
        (Margins(token=0.0, gate=inf), FAULT),
    ],
)
def test_another_depth_is_a_gate_tie_below_the_baseline_only(margins, kind):
    assert only(answer(), OTHER_DEPTH, margins).kind == kind


def test_a_greedy_run_on_a_model_without_a_gate_has_no_gate_ties():
    assert only(answer(), OTHER_DEPTH, Margins(token=0.0, gate=0.0), SAMPLED).kind == GATE_TIE
    gateless = Baseline(concurrency=8, answers=1, positions=3, logit=1e-5)
    assert only(answer(), OTHER_DEPTH, Margins(token=0.0, gate=0.0), gateless).kind == FAULT


@pytest.mark.parametrize("other", [answer((7, 8)), answer((7, 8, 9)), answer(reason="length")])
def test_an_answer_that_ends_elsewhere_is_a_fault_whatever_the_margins(other):
    tie = Margins(top=0.0, token=0.0, gate=0.0)
    assert only(answer(), other, tie).kind == FAULT and only(other, answer(), tie).kind == FAULT


def test_other_work_is_no_fault():
    work = asks_differ({**SETTINGS, **GATE}, {**SETTINGS, **GATE, "exit_threshold": 0.9})
    assert [factor.name for factor in work] == ["exit_threshold"]
    assert only(answer(), OTHER_TOKEN, Margins(token=2.0), work=work).kind == DIFFERENT_WORK


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        ({}, {}, []),
        ({}, {"policy": "fixed", "depth": 2}, ["exit policy"]),
        (GATE, {**GATE, "min_depth": 2}, ["min_depth"]),
        (GATE, {**GATE, "fill": "full"}, ["fill"]),
        (GATE, {**GATE, "gate_dtype": "bfloat16"}, ["gate_dtype"]),
        ({"temperature": 1.0}, {"temperature": 1.0, "seed": 5}, ["seed"]),
        ({"max_tokens": 4}, {}, ["max_tokens"]),
        ({"signals": "sync", **GATE}, {"signals": "exact", **GATE}, []),
        ({"signals": "resident", "lateness": 2, **GATE}, {"signals": "exact", "lateness": 1, **GATE}, []),
        ({"signals": "sync", **GATE}, {"signals": "delayed", **GATE}, ["signals"]),
        ({"signals": "delayed", "lateness": 0, **GATE}, {"signals": "delayed", "lateness": 1, **GATE}, []),
        ({"signals": "sync"}, {"signals": "delayed"}, []),  # never: there is no signal
        ({"dtype": "float64", "concurrency": 1}, {"device": "cuda", "streams": 2, "batch_invariant": True}, []),
    ],
)
def test_only_what_is_asked_for_makes_other_work(a, b, names):
    assert [factor.name for factor in asks_differ({**SETTINGS, **a}, {**SETTINGS, **b})] == names


@pytest.mark.parametrize(
    ("b", "kv", "position", "context"),
    [
        (answer((7, 8, 5, 1)), "last_exited", 2, "same"),
        (answer((7, 8, 9, 5), (4, 2, 4, 4)), "last_exited", 1, "K/V differs after 1"),
        (answer((7, 8, 9, 5), (4, 2, 4, 4)), "exact", 1, "same"),
        (answer((7, 5, 9, 1), (4, 2, 4, 4)), "last_exited", 1, "same"),
        (answer((7, 8, 5, 1), (4, 4, 4, 2)), "last_exited", 2, "same"),
    ],
)
def test_the_first_of_token_and_depth_counts_and_the_context_of_the_token_is_told(b, kv, position, context):
    found = only(answer(), b, kv=(kv, kv))
    assert (found.position, found.context) == (position, context)
    assert found.tokens == (answer().token_ids[position], b.token_ids[position])
    assert found.depths == (4, b.depths[position])


# thresholds (inf, .5, .5, -inf): min_depth 2, max_depth 4
@pytest.mark.parametrize(
    ("depth", "late", "margin"),
    [
        (3, False, 0.0),
        (2, False, 0.1),  # .4 does not reach .5
        (4, False, 0.2),  # .7 does, at round 3
        (1, False, inf),  # below min_depth
        (4, True, 0.0),  # decided at 3, read one round later
        (3, True, 0.1),  # decided at 2
        (2, True, inf),
        (1, True, inf),
    ],
)
def test_how_far_a_gate_is_from_a_depth(depth, late, margin):
    found = gate_contradiction((0.9, 0.4, 0.7), (inf, 0.5, 0.5, -inf), depth, late=late)
    assert found == pytest.approx(margin)


def test_every_round_that_has_to_tip_counts():
    """To run to 4, rounds 2 and 3 must both have stayed below: the tie at 2 does not excuse 3."""
    assert gate_contradiction((0.1, 0.5, 0.9), (0.5, 0.5, 0.5, -inf), 4) == pytest.approx(0.4)
    assert gate_contradiction((0.1, 0.5, 0.9), (0.5, 0.5, -inf, -inf), 4) == inf  # beyond max_depth
    assert gate_contradiction((0.1, 0.5, 0.9), (0.5, 0.5, -inf, -inf), 3) == 0.0  # the tie itself


def test_equal_runs_are_not_replayed():
    judge = Says()
    found = diagnose([answer()], [answer()], judge=judge, segments=4)
    assert not found.divergences and found.baseline is None and not judge.asked and not found.faults


def test_runs_of_other_questions_or_prompts_are_refused():
    with pytest.raises(ValueError, match="not of the same questions"):
        diagnose([answer()], [answer(id="p")], judge=Says(), segments=4)
    with pytest.raises(ValueError, match="'q' has another prompt"):
        diagnose([answer()], [answer(prompt=(1, 3))], judge=Says(), segments=4)


def test_the_result_is_json_without_infinities():
    found = diagnose([answer()], [OTHER_TOKEN], judge=Says(Margins(token=0.5, gate=inf)), segments=4)
    (line,) = json.loads(json.dumps(found.asdict(), allow_nan=False))["divergences"]
    assert line["margins"]["gate"] == "inf" and line["kind"] == FAULT and line["context"] == "same"
