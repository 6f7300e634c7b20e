"""Two arms against each other, on Records made by hand with counts that are known."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from anydepth.eval.compare.compare import compare
from anydepth.eval.compare.factors import environment, factors, kv_kind, policy_words
from anydepth.eval.compare.rules import judge, rule_words
from anydepth.eval.compare.sequences import compare_sequences
from anydepth.eval.compare.words import differing, print_comparison, verdict, where_they_part
from anydepth.record import Record, RecordWriter, publish
from tests.eval.made_records import GATE, PROVENANCE, SETTINGS, answer, write_arm


def scored(folder, scores, **more):
    return write_arm(folder, [answer(id, score) for id, score in enumerate(scores)], **more)


@pytest.fixture
def known(tmp_path):
    """132 gains, 56 losses, 675 both right, 456 both wrong: 1,319 questions."""
    counts = [(1.0, 0.0)] * 132 + [(0.0, 1.0)] * 56 + [(1.0, 1.0)] * 675 + [(0.0, 0.0)] * 456
    a, b = zip(*counts, strict=True)
    return scored(tmp_path / "A", a), scored(tmp_path / "B", b)


def test_the_known_case_to_all_its_digits(known):
    found = compare(*known).asdict()["accuracy"]
    assert (found["n"], found["gains"], found["losses"], found["both"], found["neither"]) == (1319, 132, 56, 675, 456)
    assert found["test"] == "exact McNemar" and f"{found['p']:.4e}" == "2.9488e-08"
    assert [round(found[key], 3) for key in ("difference_pp", "low_pp", "high_pp")] == [5.762, 3.740, 7.773]
    assert found["a"]["accuracy"] == pytest.approx(807 / 1319) and found["a"]["low"] < 807 / 1319 < found["a"]["high"]


def test_the_other_way_round_everything_changes_sign(known):
    found = compare(*reversed(known)).asdict()["accuracy"]
    assert (found["gains"], found["losses"]) == (56, 132) and round(found["difference_pp"], 3) == -5.762
    assert [round(found[key], 3) for key in ("low_pp", "high_pp")] == [-7.773, -3.740]


@pytest.mark.parametrize(("margin", "shown"), [(None, None), (1.0, False), (7.7, False), (8.0, True)])
def test_non_inferiority_is_of_the_lower_limit(known, margin, shown):
    found = compare(*reversed(known), margin_pp=margin)
    assert found.non_inferior is shown
    said = [line for line in verdict(found) if "margin" in line]
    assert len(said) == (margin is not None) and all(("not shown" in line) is not shown for line in said)


def test_order_of_the_samples_does_not_matter(tmp_path, known):
    a, b = known
    shuffled = random.Random(0).sample(b.samples, len(b.samples))
    assert compare(a, write_arm(tmp_path / "C", shuffled, name="B")) == compare(a, b)


def test_not_significant_is_not_called_equal(tmp_path):
    few = compare(scored(tmp_path / "a", [1.0, 0.0, 1.0] * 9), scored(tmp_path / "b", [1.0, 1.0, 0.0] * 9))
    assert "That is not equality" in verdict(few)[0] and "p = 1" in verdict(few)[0]
    same = compare(scored(tmp_path / "c", [1.0] * 9), scored(tmp_path / "d", [1.0] * 9))
    assert verdict(same)[0].startswith("All 9 scored answers are worth the same")
    assert (
        "interval" in verdict(same)[0] and where_they_part(same)[1] == "Token ids and depths are the same throughout."
    )


# --- what is refused ---------------------------------------------------------------------------------------------


def two(tmp_path, **changes):
    """A fine Record and one with changes."""
    answers = [answer(id) for id in range(4)]
    return write_arm(tmp_path / "fine", answers), write_arm(
        tmp_path / "other", changes.pop("answers", answers), **changes
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol": "q" * 64, "max_tokens": 32}, r"different protocols \(max_tokens is 64 and 32\)"),
        ({"protocol": "q" * 64, "provenance": {"model": {"hash": "99"}}}, "the model's hash is abababababab and 99"),
        ({"protocol": "q" * 64}, "worked examples, the chat template"),
        ({"protocol": None}, "without a protocol hash"),
        ({"finish": False}, "other is not complete, 4 of 4 answers are there; run the same"),
        ({"finish": False, "answers": [answer(0)], "questions": 4}, "1 of 4 answers"),
        ({"answers": [answer(id) for id in range(5)]}, r"not have the same questions.*'4' \(0\)"),
        ({"answers": [answer(0), answer(0, index=1)]}, "1 further answers .* say clustered"),
        ({"answers": [answer(id, prompt_ids_sha256="new") for id in range(4)]}, "other prompts for 4 questions"),
    ],
)
def test_refuses_and_says_what_to_do(tmp_path, changes, message):
    fine, other = two(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        compare(fine, Record.read(other.path))
    with pytest.raises(ValueError):
        compare(Record.read(other.path), fine)


def test_refuses_other_kinds_and_missing_samples(tmp_path):
    fine, other = two(tmp_path)
    with RecordWriter(
        tmp_path / "bench", kind="bench", settings_used=SETTINGS, settings_passed={}, provenance=PROVENANCE
    ) as writer:
        bench = writer.finish({})
    with pytest.raises(ValueError, match="is a bench Record"):
        compare(fine, bench)
    published = publish(other.path, tmp_path / "published", samples=False)
    with pytest.raises(ValueError, match="published without samples"):
        compare(fine, Record.read(published, samples=False))
    olds = (write_arm(tmp_path / name, [answer(0)], protocol=None) for name in ("old", "older"))
    with pytest.raises(ValueError, match="without a protocol hash"):
        compare(*olds)
    with pytest.raises(ValueError, match="margin_pp is -1"):
        compare(fine, other, margin_pp=-1)


# --- factors -----------------------------------------------------------------------------------------------------

ONE_POLICY = ["exit policy"]


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        ({}, {}, []),
        ({}, GATE, ONE_POLICY),
        ({}, GATE | {"min_depth": 2, "gate_dtype": "bfloat16"}, ONE_POLICY),
        ({}, {"policy": "fixed", "depth": 2}, ONE_POLICY),
        ({}, {"policy": "fixed", "depth": 4}, []),  # full depth by another name
        ({}, GATE | {"exit_threshold": 1.0}, []),
        ({}, GATE | {"exit_threshold": 1.0, "gate_dtype": "bfloat16"}, ONE_POLICY),  # where 1 can be reached
        (GATE, GATE | {"exit_threshold": 0.2}, ["exit_threshold"]),
        (GATE, GATE | {"exit_threshold": 0.2, "min_depth": 2}, ["exit_threshold", "min_depth"]),
        (GATE, GATE | {"gate_dtype": "bfloat16"}, ["gate_dtype"]),
        ({"policy": "fixed", "depth": 1}, {"policy": "fixed", "depth": 2, "min_depth": 2}, ["depth"]),
        ({"policy": "own.thing:Policy", "profile": "a"}, {"policy": "own.thing:Policy", "profile": "b"}, ["profile"]),
        (GATE, GATE | {"fill": "full"}, ["fill"]),
        ({}, {"fill": "full"}, []),  # nothing is skipped
        ({}, GATE | {"fill": "full"}, ONE_POLICY),
        ({}, {"fill": "shared"}, ["fill"]),  # one plane for all depths, skipped or not
        ({}, GATE | {"dtype": "bfloat16"}, ["exit policy", "dtype"]),
        ({}, {"backend": "transformers", "device": "cuda"}, ["backend", "device"]),
        (GATE, GATE | {"signals": "delayed"}, ["signals"]),
        (GATE, GATE | {"signals": "sync", "lateness": 0}, []),  # older Records do not say it
        (GATE, GATE | {"signals": "exact", "lateness": 1}, ["signals"]),
        (GATE | {"signals": "resident", "lateness": 1}, GATE | {"signals": "exact", "lateness": 2}, ["signals"]),
        (GATE | {"signals": "delayed", "lateness": 0}, GATE | {"signals": "delayed", "lateness": 1}, ["lateness"]),
        (GATE, GATE | {"batch_invariant": False}, []),
        (GATE, GATE | {"batch_invariant": True}, ["batch_invariant"]),
        (GATE | {"backend": "transformers"}, GATE | {"signals": "delayed", "lateness": 1}, ["backend", "signals"]),
        ({}, {"signals": "resident", "lateness": 2}, []),  # no signal, none late
        ({}, {"top_p": 0.9}, []),
        ({"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "seed": 1}, ["seed", "top_p"]),
        ({"name": "x", "concurrency": 1}, {"name": "y", "concurrency": 32, "logprobs": "raw", "split": "test"}, []),
    ],
)
def test_factors_are_counted_once_and_only_where_they_matter(a, b, names):
    for one, other in ((a, b), (b, a)):
        assert [factor.name for factor in factors(SETTINGS | one, SETTINGS | other).counted] == names


def test_what_a_backend_does_not_speak_of_is_no_second_factor():
    silent = {key: value for key, value in SETTINGS.items() if key != "gate_dtype"} | {"backend": "transformers"} | GATE
    assert [factor.name for factor in factors(silent, SETTINGS | GATE).counted] == ["backend"]


def test_settings_without_effect_are_told_apart():
    found = factors(SETTINGS, SETTINGS | {"fill": "full"})
    assert found.without_effect == (("fill", "last_exited", "full"),)


def test_signals_in_words():
    late = GATE | {"signals": "delayed", "lateness": 2}
    (found,) = factors(SETTINGS | GATE, SETTINGS | late).counted
    assert found == ("signals", "sync", "delayed, 2 turns late")
    (found,) = factors(SETTINGS | late | {"lateness": 0}, SETTINGS | late).counted
    assert found == ("lateness", "0", "2")


def test_policies_in_words():
    assert policy_words(SETTINGS) == "never"
    assert policy_words(SETTINGS | GATE | {"min_depth": 2}) == "gate_cdf 0.5, min_depth 2"
    assert policy_words(SETTINGS | {"policy": "fixed", "depth": 3}) == "fixed 3"
    assert policy_words(SETTINGS | {"policy": "trace", "trace": [4] * 64}) == "trace 64 entries"


def test_a_second_factor_is_warned_of_and_other_conditions_named(tmp_path):
    a = write_arm(tmp_path / "a", [answer(0)], **GATE)
    b = write_arm(tmp_path / "b", [answer(0)], dtype="bfloat16", provenance={"threads": 2})
    said = differing(compare(a, b))
    assert said[0] == "Differs in: exit policy (gate_cdf 0.5 against never); dtype (float32 against bfloat16)"
    assert (
        said[1].startswith("WARNING: 2 factors") and said[2] == "Made under different conditions: threads (1 against 2)"
    )
    assert not any("WARNING" in line for line in differing(compare(a, a)))
    assert environment(PROVENANCE, PROVENANCE | {"packages": {"torch": "3"}})[0].name == "torch"


# --- where answers part ways -------------------------------------------------------------------------------------

EARLY = (4, 2, 2, 2)
APPROXIMATE, EXACT = ("last_exited", "last_exited"), ("exact", "exact")


@pytest.mark.parametrize(
    ("b", "depths", "kv", "token", "depth", "cause"),
    [
        # the same tokens and depths before: the step itself
        ((7, 8, 5, 1), EARLY, APPROXIMATE, 2, None, "same_depth"),
        ((7, 8, 5, 1), (4, 2, 3, 2), APPROXIMATE, 2, 2, "another_depth"),
        # an earlier depth differs: another K/V, unless every depth is computed whatever was read
        ((7, 8, 5, 1), (4, 3, 2, 2), APPROXIMATE, 2, 1, "another_context"),
        ((7, 8, 5, 1), (4, 3, 2, 2), EXACT, 2, 1, "same_depth"),
        ((7, 8, 5, 1), (4, 3, 3, 2), EXACT, 2, 1, "another_depth"),
        # equal depths, but what they skipped is filled otherwise: from the first skip on, or from the prompt on
        ((7, 8, 5, 1), EARLY, ("exact", "last_exited"), 2, None, "another_context"),
        ((7, 5, 9, 1), EARLY, ("last_exited", "exact"), 1, None, "same_depth"),
        ((7, 5, 9, 1), EARLY, ("shared", "exact"), 1, None, "another_context"),
        # the first token comes from the prompt; only one goes on
        ((6, 8, 9, 1), EARLY, APPROXIMATE, 0, None, "same_depth"),
        ((7, 8, 9), (4, 2, 2), APPROXIMATE, 3, 3, "same_depth"),
        # only depths differ, or nothing
        ((7, 8, 9, 1), (4, 2, 2, 3), APPROXIMATE, None, 3, None),
        ((7, 8, 9, 1), EARLY, APPROXIMATE, None, None, None),
    ],
)
def test_first_divergence_and_what_came_before(b, depths, kv, token, depth, cause):
    pair = answer(0, ids=(7, 8, 9, 1), depths=EARLY), answer(0, ids=b, depths=depths)
    found = compare_sequences([pair], segments=4, kv=kv)
    assert (found.tokens_differ, found.depths_differ) == (token is not None, depth is not None)
    assert found.differ == (token is not None or depth is not None)
    assert found.first_token == (None if token is None else (token,) * 5)
    assert found.first_depth == (None if depth is None else (depth,) * 5)
    counts = {name: getattr(found, name) for name in ("another_depth", "same_depth", "another_context")}
    assert counts == {name: int(name == cause) for name in counts}


def test_a_readout_at_full_depth_leaves_nothing_to_fill():
    one, other = (answer(0, ids=ids, depths=(4, 4, 2, 2)) for ids in ((7, 8, 9, 1), (7, 8, 5, 1)))
    found = compare_sequences([(one, other)], segments=4, kv=("exact", "last_exited"))
    assert found.same_depth == 1 and found.another_context == 0


def test_indices_are_spread_and_shared_tokens_counted():
    def made(token, depths):
        return answer(0, ids=[7] * token + [8] * (10 - token), depths=[4, *[depths] * 9])

    pairs = [(made(10, 2), made(token, 1)) for token in (1, 3, 5, 7, 9)]
    found = compare_sequences(pairs, segments=4, kv=APPROXIMATE)
    assert found.first_token == (1, 3, 5, 7, 9) and found.first_depth == (1,) * 5
    assert found.depth_first_in_same_context == 5 and found.another_context == 4 and found.another_depth == 1
    assert found.shared_tokens == 0 + 2 + 4 + 6 + 8 and found.depth_difference == 1.0


def test_extra_segments_a_token_are_of_shared_prefixes_and_of_whole_answers():
    """Three answers. The first parts at its third token: 2 decode tokens before it, one of them read a segment deeper.
    The second has the same tokens, all three read deeper. The third is the same but for what was executed."""
    a = [
        answer(0, ids=(7, 8, 9, 5, 1), depths=(4, 2, 3, 4, 4)),
        answer(1, ids=(7, 8, 9, 1), depths=(4, 2, 2, 2)),
        answer(2, ids=(7, 8, 9, 1), depths=(4, 1, 1, 1), executed=6),
    ]
    b = [
        answer(0, ids=(7, 8, 9, 6, 1), depths=(4, 2, 2, 1, 1)),
        answer(1, ids=(7, 8, 9, 1), depths=(4, 1, 1, 1)),
        answer(2, ids=(7, 8, 9, 1), depths=(4, 1, 1, 1)),
    ]
    found = compare_sequences(list(zip(a, b, strict=True)), segments=4, kv=APPROXIMATE)
    assert (found.shared_tokens, found.depth_difference) == (2 + 3 + 3, pytest.approx((1 + 3 + 0) / 8))
    assert (found.same_tokens, found.executed_difference) == (3 + 3, pytest.approx((3 + 3) / 6))
    nothing = compare_sequences(list(zip(a[:1], b[:1], strict=True)), segments=4, kv=APPROXIMATE)
    assert (nothing.same_tokens, nothing.executed_difference) == (0, None)


def test_what_was_executed_more_is_said_of_equal_answers_too(tmp_path):
    a = write_arm(tmp_path / "a", [answer(0, executed=6)], **GATE, signals="exact", lateness=1)
    b = write_arm(tmp_path / "b", [answer(0, executed=4)], **GATE)
    said = where_they_part(compare(a, b))
    assert said[1:] == [
        "Token ids and depths are the same throughout.",
        "In the answers with the same tokens throughout, A executes 1.00 segments more a token.",
    ]


IDENTICAL = {"name": "=", "compare": ["A", "B"], "identical": True}


@pytest.mark.parametrize(
    ("change", "met", "because"),
    [
        ({"executed": 9, "text": "another"}, True, "token ids and depths are the same in all 2 answers"),
        ({"ids": (7, 9, 1)}, False, "token ids differ in 1 and depths in 0 of 2 answers"),
        ({"depths": (4, 4, 3)}, False, "token ids differ in 0 and depths in 1 of 2 answers"),
    ],
)
def test_identical_means_every_token_and_depth(tmp_path, change, met, because):
    """Also where nothing is scored: what an answer is worth plays no part."""
    for score in (1.0, None):
        a = write_arm(tmp_path / f"a{score}", [answer(0, score, **change), answer(1, score)])
        b = write_arm(tmp_path / f"b{score}", [answer(0, score), answer(1, score)])
        assert judge(IDENTICAL, compare(a, b)) == (met, (because,))
    assert rule_words(IDENTICAL) == "A against B: identical token ids and depths"


def test_identical_choices_have_the_same_logprobs_and_depths(tmp_path):
    def made(name, logprob, depth):
        choices = [{"logprobs": [logprob], "depths": [depth]}]
        return write_arm(tmp_path / name, [answer(0, ids=(), depths=(), decode_tokens=1, choices=choices)])

    a = made("a", -1.0, 2)
    assert judge(IDENTICAL, compare(a, made("b", -1.0, 2))).met is True
    assert judge(IDENTICAL, compare(a, made("c", -1.0000001, 2))).met is False
    assert judge(IDENTICAL, compare(a, made("d", -1.0, 3))).met is False


def test_what_the_kv_depends_on():
    never, early = SETTINGS, SETTINGS | GATE
    assert kv_kind(never) == kv_kind(early | {"fill": "full"}) == kv_kind(early | {"fill": "deferred"}) == "exact"
    assert kv_kind(early) == "last_exited" and kv_kind(never | {"fill": "shared"}) == "shared"


# --- scores that are not right or wrong, missing, or several ------------------------------------------------------


def test_partial_credit_has_a_mean_difference_instead_of_mcnemar(tmp_path):
    scores = [i % 5 / 4 for i in range(200)]
    a, b = scored(tmp_path / "a", scores), scored(tmp_path / "b", [max(0.0, score - 0.25) for score in scores])
    found = compare(a, b).asdict()["accuracy"]
    assert found["test"] == "score test of the mean difference" and found["difference_pp"] == pytest.approx(20.0)
    assert found["gains"] == 160 and found["losses"] == 0 and found["p"] < 1e-6
    assert found["low_pp"] < 20 < found["high_pp"] < 25 and "both" not in found


def test_unscored_answers_are_left_out_of_both_and_counted(tmp_path):
    a = scored(tmp_path / "a", [1.0, 0.0, None, 1.0, None])
    b = scored(tmp_path / "b", [0.0, 0.0, 1.0, None, None])
    found = compare(a, b)
    assert found.unscored == (2, 2, 3) and found.outcome.n == 2 and found.outcome.gains == 1
    assert found.outcome.a["accuracy"] == 0.5 and found.answers == 5
    nothing = compare(scored(tmp_path / "c", [None]), scored(tmp_path / "d", [1.0]))
    assert nothing.outcome is None and "none has a score in both" in verdict(nothing)[0]
    print_comparison(nothing)


def test_several_answers_a_question_are_one_observation(tmp_path):
    def made(name, right):
        return write_arm(
            tmp_path / name,
            [answer(id, float(right(id)), index=index) for id in range(30) for index in range(8)],
            n=8,
        )

    a, b = made("a", lambda id: id % 3 > 0), made("b", lambda id: id % 2)
    found = compare(a, b, clustered=True)
    once = compare(
        scored(tmp_path / "c", [float(id % 3 > 0) for id in range(30)]),
        scored(tmp_path / "d", [float(id % 2) for id in range(30)]),
    )
    assert found.outcome.test.startswith("score test, questions as clusters") and found.outcome.result.questions == 30
    # eight equal answers say no more than one does
    assert found.outcome.result.p > 0.8 * once.outcome.result.p
    width, alone = (x.outcome.result.interval for x in (found, once))
    assert width.high - width.low > 0.8 * (alone.high - alone.low)


def test_choices_by_likelihood(tmp_path):
    def made(name, second, depth):
        choices = [{"logprobs": [-1.0, -0.5], "depths": [4, depth]}, {"logprobs": [second], "depths": [4]}]
        return write_arm(
            tmp_path / name, [answer(id, ids=(), choices=choices, segments_read=12, decode_tokens=3) for id in range(3)]
        )

    found = compare(made("a", -1.75, 4), made("b", -1.25, 2))
    assert found.sequences is None and found.choices.chosen_differ == 3 and found.choices.depths_differ == 3
    assert found.choices.most_logprob_difference == 0.5
    assert "logprobs is 0.5" in where_they_part(found)[1]
    with pytest.raises(ValueError, match="choices of other lengths"):
        compare(made("c", -1.0, 4), write_arm(tmp_path / "d", [answer(id, choices=[], ids=()) for id in range(3)]))


# --- work ---------------------------------------------------------------------------------------------------------


def test_work_and_lengths_have_paired_intervals(tmp_path):
    draw = random.Random(1)
    lengths = [draw.randrange(5, 40) for _ in range(300)]
    a = [answer(i, ids=range(n), depths=[4] + [draw.choice((1, 2, 3))] * (n - 1)) for i, n in enumerate(lengths)]
    b = [answer(i, ids=range(n + draw.randrange(3))) for i, n in enumerate(lengths)]
    b[0]["finish_reason"] = "length"
    found = compare(write_arm(tmp_path / "a", a, **GATE), write_arm(tmp_path / "b", b))
    reads = np.array([[sample["segments_read"] for sample in side] for side in (a, b)], dtype=float)
    assert found.read.ratio.value == pytest.approx(reads[0].mean() / reads[1].mean())
    drawn = reads[:, np.random.default_rng(0).integers(0, 300, (4000, 300))].mean(axis=2)
    low, high = np.quantile(drawn[0] / drawn[1], [0.025, 0.975])
    width = high - low
    assert abs(found.read.ratio.low - low) < 0.1 * width and abs(found.read.ratio.high - high) < 0.1 * width
    more = np.array([len(y["output_ids"]) - len(x["output_ids"]) for x, y in zip(a, b, strict=True)])
    assert found.tokens.difference.value == pytest.approx(-more.mean())
    assert found.tokens.difference.high - found.tokens.difference.low == pytest.approx(
        2 * 1.959964 * more.std(ddof=1) / 300**0.5
    )
    assert found.length_stops == (0, 1)


def test_answers_that_execute_nothing_have_no_ratio(tmp_path):
    a, b = two(tmp_path, answers=[answer(id, ids=(1,)) for id in range(4)])
    assert compare(a, b).read.ratio is None and compare(b, a).executed.ratio is None


# --- what is said --------------------------------------------------------------------------------------------------


def test_printed_and_as_json(known, capsys):
    found = compare(*known, margin_pp=1.0)
    again = json.loads(json.dumps(found.asdict()))
    assert again["accuracy"]["gains"] == 132 and again["non_inferior"] is True and again["margin_pp"] == 1.0
    print_comparison(found)
    said = capsys.readouterr().out
    for part in ("61.18", "55.42", "+5.76 pp", "+3.74 to +7.77", "132", "A is more accurate than B", "p = 2.9e-08"):
        assert part in said, said
    assert "188 of 1319 answers differ" in said
