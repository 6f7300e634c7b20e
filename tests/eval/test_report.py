"""The report, from hand-made Records: what it compares, what it says of rules, and what it doesn't hide."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from itertools import combinations

import pytest

from anydepth.certificate import Certificate, question_set_hash
from anydepth.eval.compare.rules import rules_told
from anydepth.eval.numbers import digits, p_value, percent, points, signed
from anydepth.eval.report import plot
from anydepth.eval.report.page import Block, Cell, Table, markdown, tint
from anydepth.eval.report.plot import Box, Point
from anydepth.eval.report.report import report
from anydepth.record import RecordWriter, publish
from tests.eval.made_records import GATE, PROVENANCE, SETTINGS, answer, write_arm

RULE = {"name": "B1 keeps up", "compare": ["B1", "B0"], "non_inferior_margin_pp": 5.0}
SHARP = {"name": "B1 differs", "compare": ["B1", "B0"], "p_below": 0.05, "min_abs_difference_pp": 1.0}


def arm(folder, name, *, right=400, n=500, depth=4, first=0, executed=None, **more):
    """n answers; the first `right` of them are right, counted from `first`. Every decode token is read at `depth`."""
    full = more.get("fill") == "full"
    ids = [7, 8, 9, 1]
    answers = [
        answer(
            f"sums-test-{i}",
            float((i - first) % n < right),
            ids=ids,
            depths=[4, *[depth] * 3],
            executed=12 if full else executed,
            group=i % 3,
        )
        for i in range(n)
    ]
    return write_arm(folder / name, answers, name=name, **more)


def plan(folder, *lines):
    """study.jsonl: (answers there by then, names of arms, rules) a line."""
    folder.mkdir(parents=True, exist_ok=True)
    text = [
        {"planned": "2026", "answers": answers, "study": {"task": "sums"}, "arms": [{"name": n} for n in arms]}
        | {"rules": rules, "study_hash": None}
        for answers, arms, rules in lines
    ]
    (folder / "study.jsonl").write_text("".join(json.dumps(line) + "\n" for line in text))


@pytest.fixture
def study(tmp_path):
    """A0 and B0 at full depth; A1 and B1 leave early, with exact and with approximate K/V; B1-low too early."""
    folder = tmp_path / "study"
    arm(folder, "A0", backend="transformers", fill="full")
    arm(folder, "A1", backend="transformers", fill="full", depth=2, right=399, **GATE)
    arm(folder, "B0")
    arm(folder, "B1", depth=2, right=398, **GATE)
    arm(folder, "B1-low", depth=1, right=300, **{**GATE, "exit_threshold": 0.1})
    plan(folder, (0, ["A0", "A1", "B0", "B1", "B1-low", "B1-high"], [RULE, SHARP]))
    return folder


def made(folders, out, **options):
    """(result, HTML, Markdown)"""
    result = report(folders if isinstance(folders, list) else [folders], out, **options)
    return result, (out / "report.html").read_text(), (out / "report.md").read_text()


def test_a_change_is_split_into_the_decision_and_the_kv(study, tmp_path):
    arm(study, "B1x", depth=2, right=399, fill="deferred", **GATE)
    _, _, text = made(study, tmp_path / "out")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| B1 | B0 ")]
    whole, decision, kv = (float(rows[-1][n].split()[0].replace("−", "-")) for n in (2, 4, 5))
    assert rows[-1][3] == "B1x" and whole == pytest.approx(decision + kv, abs=0.011) and kv == -0.2


def test_everything_is_on_one_page_that_needs_nothing_else(study, tmp_path):
    _, html, text = made(study, tmp_path / "out")
    assert not re.search(r"(src|href)=\"(?!#)|https?:|@import|<script|url\((?!#)", html)
    assert "<svg" in html and "](pareto.png)" in text
    assert (tmp_path / "out/pareto.png").read_bytes().startswith(b"\x89PNG")
    for title in (
        "Proposal",
        "Accuracy against work",
        "Arms",
        "Rules",
        "Pairs",
        "Effect of approximate K/V",
        "Depths",
    ):
        assert f"<h2>{title}</h2>" in html and f"## {title}\n" in text
    assert "80.0 (76.3–83.3)" in text  # Wilson, of 400 in 500
    assert "<h1>What leaving early costs looped on sums</h1>" in html


def test_the_same_files_give_the_same_bytes(study, tmp_path):
    made(study, tmp_path / "one")
    made(study, tmp_path / "two")
    for name in ("report.html", "report.md", "pareto.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def pairs_of(result, section=0):
    return {(pair["a"], pair["b"]): pair for pair in result["sections"][section]["pairs"]}


def test_each_arm_is_held_against_the_full_depth_arm_it_differs_least_from(study, tmp_path):
    result, _, text = made(study, tmp_path / "out")
    pairs = pairs_of(result)
    assert {pair for pair, found in pairs.items() if found["why"] == "baseline"} == {
        ("A1", "A0"),
        ("B0", "A0"),
        ("B1", "B0"),
        ("B1-low", "B0"),
    }
    assert all(len(found["factors"]) == 1 for found in pairs.values() if found["why"] == "baseline")
    kv = pairs["B1", "A1"]
    assert kv["why"] == "K/V" and {factor["name"] for factor in kv["factors"]} == {"backend", "fill"}
    assert "| B1 − A1 | last_exited − full | −0.20" in text and "backend (engine against transformers)" in text
    named = pairs_of(made(study, tmp_path / "named", baseline="B0")[0])
    assert ("A1", "B0") in named and ("B0", "A0") not in named
    with pytest.raises(ValueError, match="unknown arm 'B2'"):
        report([study], tmp_path / "x", baseline="B2")


def test_p_values_stand_beside_those_adjusted_over_all_pairs(study, tmp_path):
    pairs = pairs_of(made(study, tmp_path / "out")[0])
    p = {pair: found["accuracy"]["p"] for pair, found in pairs.items()}
    least = min(p, key=p.get)
    assert least == ("B1-low", "B0") and pairs[least]["p_holm"] == pytest.approx(5 * p[least])
    assert len(pairs) == 5 and all(found["p_holm"] >= p[pair] for pair, found in pairs.items())
    assert pairs["B1", "B0"]["p_holm"] == 1.0 and p["B1", "B0"] == 0.5


def test_rules_have_verdicts_and_reasons(study, tmp_path):
    result, html, _ = made(study, tmp_path / "out")
    rules = {rule["rule"]["name"]: rule for rule in result["sections"][0]["rules"]}
    assert rules["B1 keeps up"]["met"] is True and rules["B1 differs"]["met"] is False
    assert all(rule["since"] == "set beforehand" for rule in rules.values())
    assert rules["B1 differs"]["because"][0] == "p = 0.5 (exact McNemar) is not below 0.05"
    assert "non-inferior at a margin of 5 pp" in html


def test_a_rule_changed_added_or_dropped_after_answers_is_shown_as_such(study, tmp_path):
    softer = {**SHARP, "p_below": 0.9, "min_abs_difference_pp": 0.1}
    new = {"name": "new", "compare": ["B1", "B9"], "p_below": 0.5}
    arms = ["A0", "A1", "B0", "B1", "B1-low"]
    plan(study, (0, arms, [RULE]), (0, arms, [RULE, SHARP]), (700, arms, [RULE, softer]), (900, arms, [softer, new]))
    result, html, text = made(study, tmp_path / "out")
    told = [(rule["rule"]["name"], rule["since"], rule["met"]) for rule in result["sections"][0]["rules"]]
    assert told == [
        ("B1 differs", "changed after 700 answers", True),
        ("new", "added after 900 answers", None),
        ("B1 keeps up", "set beforehand, dropped after 900 answers", True),
        ("B1 differs", "set beforehand, replaced after 700 answers", False),
    ]
    assert "B9 was not run" in text and html.count("changed after 700 answers") == 2  # in its table and as a deviation


def test_a_study_whose_first_plan_had_answers_has_no_rule_beforehand():
    assert [told.since for told in rules_told([{"answers": 5, "rules": [RULE]}])] == ["added after 5 answers"]
    assert rules_told([]) == []


HALF = {"policy": "gate_cdf", "exit_threshold": 0.5}


@pytest.fixture
def late_study(tmp_path):
    """B1 as it is and in every mode of signals: B2 reads a segment deeper, B3 as B2, B4e executes more, B4r as B1."""
    folder = tmp_path / "study"
    arm(folder, "A1", backend="transformers", fill="full", depth=1, right=398, **HALF)
    arm(folder, "B0")
    arm(folder, "B1", depth=1, right=398, **HALF)
    arm(folder, "B2", depth=2, right=400, signals="delayed", lateness=0, **HALF)
    arm(folder, "B3", depth=2, right=400, signals="delayed", lateness=1, **HALF)
    arm(folder, "B4e", depth=1, right=398, executed=6, signals="exact", lateness=1, **HALF)
    arm(folder, "B4r", depth=1, right=398, signals="resident", lateness=1, **HALF)
    rules = [
        {"name": "B2 differs", "compare": ["B2", "B1"], "p_below": 0.05, "min_abs_difference_pp": 1.0},
        *({"name": f"{a} = {b}", "compare": [a, b], "identical": True} for a, b in EQUAL),
        {"name": "B2 = B1", "compare": ["B2", "B1"], "identical": True},
    ]
    plan(folder, (0, ["A1", "B0", "B1", "B2", "B3", "B4e", "B4r"], rules))
    return folder


EQUAL = [("B3", "B2"), ("B4e", "B1"), ("B4r", "B1")]


def test_late_arms_stand_beside_the_arm_that_they_differ_from_in_signals_alone(late_study, tmp_path):
    result, _, text = made(late_study, tmp_path / "out")
    block = text.partition("## Late signals")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in block.splitlines() if line.startswith("| B")]
    assert [row[0] for row in rows] == ["| B2 − B1", "| B3 − B2", "| B4e − B1", "| B4r − B1"]
    assert [row[1] for row in rows][:2] == ["delayed − sync", "delayed, 1 turn late − delayed"]
    assert [row[2:4] for row in rows] == [["0 of 500", "500 of 500"], *[["0 of 500"] * 2] * 3]
    assert rows[0][4].startswith("+0.40 (") and rows[0][5] == "2 / 0" and rows[0][6] == "0.5"
    assert [row[7:9] for row in rows] == [["6.0", "3.0"], ["6.0", "6.0"], ["6.0", "3.0"], ["3.0", "3.0"]]
    assert [row[9].split(" (")[0] for row in rows] == ["+1.00", "0.00", "0.00", "0.00"]
    assert [row[10].split(" (")[0] for row in rows] == ["+1.00", "0.00", "+1.00", "0.00"]
    assert "1,500 tokens" in rows[0][9] and "delayed, 1 turn late" in text.partition("## Arms")[2]
    met = {rule["rule"]["name"]: rule["met"] for rule in result["sections"][0]["rules"]}
    assert met == {"B2 differs": False, "B2 = B1": False} | {f"{a} = {b}": True for a, b in EQUAL}


def test_what_is_to_be_equal_is_no_test_of_accuracy(late_study, tmp_path):
    """Arms that are to equal another one take part in no correction, and have neither baseline nor K/V pair."""
    result, _, text = made(late_study, tmp_path / "out")
    pairs = {(pair["a"], pair["b"]): pair for pair in result["sections"][0]["pairs"]}
    tested = {("A1", "B0"), ("B1", "B0"), ("B2", "B0"), ("B1", "A1"), ("B2", "B1")}
    assert {key for key, pair in pairs.items() if pair["p_holm"] is not None} == tested
    assert pairs.keys() == tested | {*EQUAL}
    assert "over the 5 pairs" in text


def test_a_late_arm_that_is_not_equal_is_marked(late_study, tmp_path):
    shutil.rmtree(late_study / "B4r")
    arm(late_study, "B4r", depth=2, right=398, signals="resident", lateness=1, **HALF)
    result, html, _ = made(late_study, tmp_path / "out")
    assert '<td class="bad">500 of 500</td>' in html
    rule = next(rule for rule in result["sections"][0]["rules"] if rule["rule"]["name"] == "B4r = B1")
    assert rule["met"] is False
    assert rule["because"] == ["token ids differ in 0 and depths in 500 of 500 answers"]


def test_what_would_be_the_same_point_again_is_not_drawn(late_study, tmp_path):
    _, html, text = made(late_study, tmp_path / "out")
    drawn = html.partition("<svg")[2].partition("</svg>")[0]
    assert ">B1<" in drawn and ">B2<" in drawn and not any(f">{name}<" in drawn for name in ("B3", "B4e", "B4r"))
    assert "not drawn again" in text
    arm(tmp_path / "plain", "B0")
    assert "not drawn again" not in made(tmp_path / "plain", tmp_path / "out")[2]


def test_delayed_is_never_proposed(late_study, tmp_path):
    """Its answers come of another policy than the one it names."""
    shutil.rmtree(late_study / "B1")
    arm(late_study, "B1", depth=1, right=300, **HALF)
    result, _, _ = made(late_study, tmp_path / "out")
    assert result["sections"][0]["proposal"]["arm"] is None


def test_signals_of_older_records_are_synchronous(late_study, tmp_path):
    header = late_study / "B1" / "record.json"
    assert "signals" not in json.loads(header.read_text())["settings_used"]
    arm(late_study, "new", depth=1, right=398, signals="sync", lateness=0, **HALF)
    result, _, _ = made(late_study, tmp_path / "out")
    assert ("B4r", "B1") in {(pair["a"], pair["b"]) for pair in result["sections"][0]["pairs"]}


def test_arms_not_run_or_not_complete_are_marked(study, tmp_path):
    write_arm(study / "B1-high", [answer("sums-test-0")], finish=False, questions=500, **GATE)
    arms = ["A0", "A1", "B0", "B1", "B1-low", "B1-high", "B1x"]
    plan(study, (0, [*arms, "gone"], []), (300, [*arms, "late"], []))
    result, html, text = made(study, tmp_path / "out")
    found = result["sections"][0]
    assert found["not_run"] == ["B1x", "late"] and "B1-high" not in {arm["name"] for arm in found["arms"]}
    assert "| B1-high | 1 of 500 answers |" in text and "| B1x | not run |" in text and "not run" in html
    for said in (
        "B1x was planned and not run.",
        "gone was dropped in the plan after 300 answers.",
        "late was added in the plan after 300 answers.",
        "Not complete, so in no comparison: B1-high.",
    ):
        assert said in found["deviations"]
    assert not any("B1-high" in pair for pair in pairs_of(result))


def test_different_conditions_are_named(study, tmp_path):
    dirty = {"anydepth": {"version": "0.1.0", "commit": "beef" * 10, "dirty": True}}
    arm(study, "B2", provenance={**dirty, "threads": 2, "packages": {"torch": "2.10.0"}, "cpu": "another"})
    said = made(study, tmp_path / "out")[0]["sections"][0]["deviations"]
    assert "Made with changes to anydepth that are in no commit: B2." in said
    for name, value in (("torch", "2.10.0"), ("threads", "2"), ("machine", "another"), ("anydepth", "beef" * 10)):
        assert any(line.startswith(f"Arms differ in {name}:") and f"{value} (B2)" in line for line in said), name


def test_published_headers_show_what_they_have(study, tmp_path):
    for name in ("B0", "B1"):
        publish(study / name, tmp_path / "results" / name, samples=name == "B0")
    result, _, text = made(tmp_path / "results", tmp_path / "out")
    found = result["sections"][0]
    assert [a["name"] for a in found["arms"]] == ["B0", "B1"] and found["pairs"] == []
    assert "Published without samples, so in no comparison: B1." in found["deviations"]
    assert "| B1 | 500 | 79.6 (75.8–82.9) |" in text and found["proposal"]["arm"] is None


def test_records_of_other_protocols_are_apart(study, tmp_path):
    arm(study, "other", protocol="q" * 64, max_tokens=32)
    arm(study, "old", protocol=None)
    arm(study, "older", protocol=None)
    result, html, text = made(study, tmp_path / "out")
    assert [len(section["arms"]) for section in result["sections"]] == [5, 2, 1]
    assert "3 protocols" in result["deviations"][0] and text.count("\n## looped on sums") == 3
    assert not any({"other", "old", "older"} & {*pair} for i in range(3) for pair in pairs_of(result, i))
    assert (tmp_path / "out/pareto-3.png").exists() and html.count("<svg") == 3
    assert result["sections"][1]["deviations"] == [
        "Without a protocol hash (older Records), so in no comparison: old, older."
    ]
    assert [section["not_run"] for section in result["sections"]] == [["B1-high"], [], []]


def test_arms_of_one_name_get_their_folders_names(study, tmp_path):
    arm(tmp_path / "again", "B1", depth=2, **GATE)
    names = [a["name"] for a in made([study, tmp_path / "again", study], tmp_path / "out")[0]["sections"][0]["arms"]]
    assert "study/B1" in names and "again/B1" in names and "A0" in names and len(names) == 6


def test_it_proposes_the_cheapest_non_inferior_arm_and_does_not_decide(study, tmp_path):
    arm(study, "B1-deep", depth=3, **{**GATE, "exit_threshold": 0.9})
    result, html, _ = made(study, tmp_path / "out", margin_pp=2.0)
    proposal = result["sections"][0]["proposal"]
    said = " ".join(proposal["lines"])
    assert proposal["arm"] == "B1" and said.startswith("Proposed: gate_cdf 0.5 (arm B1), which executes 50 %")
    assert "cheapest of 3 early arms" in said and "questions of the test split" in said and "decision is yours" in said
    assert "No certificate is among the files" in said and '<tr class="lead-row">\n<td>B1</td>' in html
    strict = made(study, tmp_path / "strict", margin_pp=0.1, baseline="B0")[0]["sections"][0]["proposal"]
    assert strict["arm"] is None and "full depth is the proposal" in strict["lines"][0]


@pytest.mark.parametrize(("certified_on", "where"), [(None, "on other questions than these"), ([0], "on these very")])
def test_a_certificate_among_the_files_is_said_first(study, tmp_path, certified_on, where):
    ids = [f"sums-test-{i}" for i in range(500)] if certified_on else ["x"]
    certificate = Certificate(
        model_hash="ab" * 32,
        head_hash=None,
        policy={"exit_policy": "gate_cdf", "segments": 4},
        fill="last_exited",
        signals="sync",
        dtype="float32",
        gate_dtype="float32",
        sampling={"temperature": 0.0, "top_k": None, "top_p": 1.0},
        protocol_hash="p",
        loss="lost",
        grid=({"exit_threshold": 0.5, "min_depth": 1},),
        n=600,
        eps=0.05,
        delta=0.1,
        method="ltt",
        points=({"n": 600, "losses": 3.0, "unscored": 0, "p": 0.001},),
        chosen={"exit_threshold": 0.5, "min_depth": 1},
        fitted_on=None,
        certified_on=question_set_hash(ids),
        seed=0,
        made_by={},
    )
    certificate.write(study / "certificate.json")
    lines = made(study, tmp_path / "out")[0]["sections"][0]["proposal"]["lines"]
    assert lines[0].startswith("Certified: gate_cdf exit_threshold 0.5, min_depth 1") and where in lines[0]
    assert "at most 5 % of questions full depth is right and early exit wrong, with 90 % confidence" in lines[0]
    assert not any("No certificate" in line for line in lines)


def test_a_header_that_its_samples_do_not_bear_out_is_refused(study, tmp_path):
    path = next(study.glob("*/record.json"))
    header = json.loads(path.read_text())
    header["aggregates"]["accuracy"] = 0.999
    path.write_text(json.dumps(header))
    with pytest.raises(ValueError, match=r"record\.json says accuracy is 0\.999, its samples make it"):
        made(study, tmp_path / "out")


def test_many_groups_are_summed_up(tmp_path):
    draw = random.Random(3)
    for name, more in (("B0", {}), ("B1", GATE)):
        answers = [
            answer(i, float(draw.random() < 0.7 and not (name == "B1" and i % 57 == 9)), group=f"subject {i % 57}")
            for i in range(57 * 6)
        ]
        write_arm(tmp_path / "s" / name, answers, **more)
    _, html, text = made(tmp_path / "s", tmp_path / "out")
    assert "<details><summary>Right answers of all 57 groups" in html and "subject 33 (n 6)" in html
    assert "subject 33 (n 6)" not in text and "0.0 (subject 9)" in text and "(subject 9, against B0)" in text


def test_extractors_and_the_tasks_own_figures(tmp_path):
    answers = [
        answer(i, 0.0, scores={"strict": 0.0, "tolerant": 1.0}, prediction={"strict": None, "tolerant": "8"})
        for i in range(4)
    ]
    write_arm(tmp_path / "s" / "B0", answers, metrics={"prompt_strict": 0.25})
    _, _, text = made(tmp_path / "s", tmp_path / "out")
    assert "| B0 | 0.0 (0.0–49.0) | 100.0 (51.0–100.0) | +100.00 | 4 | 0 |" in text
    assert "| B0 | 0.2500 |" in text and "# looped on sums" in text  # nothing leaves early here


def test_an_exact_arm_that_saves_nothing_is_no_proposal_but_may_be_non_inferior(tmp_path):
    arm(tmp_path / "s", "B0", fill="full")
    arm(tmp_path / "s", "A1", fill="full", depth=2, **GATE)
    result, _, text = made(tmp_path / "s", tmp_path / "out")
    assert result["sections"][0]["proposal"]["arm"] is None and "No proposal: no arm that saves" in text
    assert "A1 executes 100 % of B0’s segments and is non-inferior to it" in text


def test_answers_of_one_token_execute_nothing(tmp_path):
    for name, more in (("B0", {}), ("B1", GATE)):
        write_arm(tmp_path / "s" / name, [answer(i, ids=(1,)) for i in range(9)], **more)
    assert "B1 executes – % of B0’s segments" in made(tmp_path / "s", tmp_path / "out")[2]


def test_answers_without_any_score_still_make_a_report(tmp_path):
    for name, more in (("B0", {}), ("B1", GATE)):
        write_arm(tmp_path / "s" / name, [answer(i, None) for i in range(5)], **more)
    result, html, text = made(tmp_path / "s", tmp_path / "out")
    assert "<svg" not in html and "nothing is scored" in text and result["files"]["pictures"] == []


BENCH_ROW = {
    "name": "gate",
    "concurrency": 8,
    "tokens_per_s": 1234.5,
    "tokens_per_s_low": 1200.0,
    "tokens_per_s_high": 1300.0,
    "questions_per_s": 12.0,
    "mean_depth": 1.5,
    "s": 1.6,
    "s_max": 2.0,
    "s_max_flops": 2.2,
    "share_of_bound": 0.8,
    "time_saved_share": 0.75,
    "roofline_share": 0.4,
    "peak_memory_bytes": 300 * 2**20,
    "peak_memory_of": "process",
    "repetitions_differ": {"differ": 3, "requests": 64},
    "first_token_s_p50": 0.01,
    "first_token_s_p95": 0.02,
    "inter_token_s_p50": 0.002,
    "inter_token_s_p95": 0.003,
    "inter_token_s_p99": None,
}


def test_throughput_stands_beside_its_bounds(tmp_path):
    settings = {"model": "looped", "prompts": 12, "repetitions": 3, "baseline": "never"}
    with RecordWriter(
        tmp_path / "bench", kind="bench", settings_used=settings, settings_passed={}, provenance=PROVENANCE
    ) as writer:
        writer.append({"id": "x", "answer_index": 0})
        writer.finish({"rows": [BENCH_ROW], "batch_variance": [], "arrivals": []})
    result, html, text = made(tmp_path, tmp_path / "out")
    assert "1,234 (1,200–1,300)" in text and "1.60 × | 2.00 × (FLOPs 2.20 ×) | 80 | 75 | 40 | 300 (process)" in text
    assert "| gate | 8 | 10.0 | 20.0 | 2.0 | 3.0 | – |" in text and '<td class="bad">3 of 64</td>' in html
    assert result["benches"] == 1 and "<h1>Throughput of looped</h1>" in html


def test_each_mode_of_signals_is_timed_against_delayed(tmp_path):
    alike = {"fill": "last_exited", "policy": "gate_cdf", "exit_threshold": 0.5}
    modes = {"sync": {}, "exact": {"signals": "exact", "lateness": 1}, "delayed": {"signals": "delayed", "lateness": 1}}
    cells = [{"name": name, **alike, **mode} for name, mode in modes.items()]
    cells += [{"name": "never", "fill": "last_exited", "policy": "never"}]
    speeds = {"sync": (2000.0, 2.5), "exact": (990.0, 2.0), "delayed": (1000.0, 2.0), "never": (900.0, 1.0)}
    rows = [
        BENCH_ROW
        | {"name": name, "tokens_per_s": speed, "s_max": bound, "segments_executed_per_question": 10 * bound}
        | {"peak_memory_bytes": int(speed) * 2**20}
        for name, (speed, bound) in speeds.items()
    ]
    settings = {"model": "looped", "prompts": 12, "repetitions": 3, "baseline": "never", "cells": cells}
    with RecordWriter(
        tmp_path / "bench", kind="bench", settings_used=settings, settings_passed={}, provenance=PROVENANCE
    ) as writer:
        writer.append({"id": "x", "answer_index": 0})
        writer.finish({"rows": rows, "batch_variance": [], "arrivals": []})
    text = made(tmp_path, tmp_path / "out")[2]
    assert "| sync / delayed | 8 | 2.000 × (of medians) | 1.250 × | 25.0 | 20.0 | +1000.0 |" in text
    assert "| exact / delayed | 8 | 0.990 × (of medians) | 1.000 × | 20.0 | 20.0 | −10.0 |" in text
    assert "never / delayed" not in text


def test_what_models_and_arms_are_called_cannot_become_markup(tmp_path):
    write_arm(tmp_path / "s" / "x", [answer(0)], name="<b>|", model="<script>")
    _, html, text = made(tmp_path / "s", tmp_path / "out")
    assert "<script>" not in html and "<b>" not in html.replace("<b>100.0", "") and "<b>\\|" in text


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("B1/samples.jsonl", b"{}\n{]\n", r"B1: the samples have the sha256"),
        ("B1/record.json", b'{"schema_version": 2}', r"B1/record.json has schema_version 2; this anydepth reads 1"),
        ("study.jsonl", b"{}\nnot json\n", r"study.jsonl, line 2 is not JSON"),
        ("certificate.json", b"{}", r"certificate.json is no certificate"),
    ],
)
def test_a_file_that_is_wrong_stops_it_by_name(study, tmp_path, file, content, message):
    (study / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        report([study], tmp_path / "out")
    assert not (tmp_path / "out" / "report.html").exists()


def test_a_damaged_line_of_an_unfinished_run_is_named(study, tmp_path):
    write_arm(study / "B2", [answer("sums-test-0")], finish=False)
    with (study / "B2" / "samples.jsonl").open("ab") as file:
        file.write(b"{]\n")
    with pytest.raises(ValueError, match=r"B2/samples.jsonl, line 2 is not JSON"):
        report([study], tmp_path / "out")


def test_folders_without_anything_to_report_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        report([tmp_path / "none"], tmp_path / "out")
    with pytest.raises(ValueError, match="has no Record"):
        report([tmp_path], tmp_path / "out")
    RecordWriter(
        tmp_path / "t", kind="train", settings_used=SETTINGS, settings_passed={}, provenance=PROVENANCE
    ).close()
    with pytest.raises(ValueError, match="only Records of kind train"):
        report([tmp_path], tmp_path / "out")
    with pytest.raises(ValueError, match="margin_pp is 100"):
        report([tmp_path], tmp_path / "out", margin_pp=100)


# --- speed ---------------------------------------------------------------------------------------------------------


def many(folder, *, arms, questions, tokens):
    draw = random.Random(0)
    base = [[draw.randrange(50_000) for _ in range(tokens)] for _ in range(questions)]
    for number in range(arms):
        answers = []
        for i, ids in enumerate(base):
            cut = draw.randrange(1, tokens) if number else tokens
            depths = [4, *(draw.randrange(1, 5) if number else 4 for _ in ids[1:])]
            answers.append(
                answer(i, float(draw.random() < 0.6), ids=[*ids[:cut], *[5] * (tokens - cut)], depths=depths)
            )
        more = {**GATE, "exit_threshold": number / arms, "fill": ("full", "last_exited")[number % 2]} if number else {}
        write_arm(folder / f"arm-{number:02}", answers, **more)


def processor_seconds(folder, out):
    start = time.process_time()
    report([folder], out)
    return time.process_time() - start


def test_pairs_cost_no_more_than_their_tokens(tmp_path):
    """In processor time, a thirtieth of the whole: 6 Records of 150 questions."""
    many(tmp_path / "s", arms=6, questions=150, tokens=110)
    assert processor_seconds(tmp_path / "s", tmp_path / "out") < 6


@pytest.mark.slow
def test_twenty_records_of_1319_questions_take_under_twenty_seconds(tmp_path):
    many(tmp_path / "s", arms=20, questions=1319, tokens=110)
    assert processor_seconds(tmp_path / "s", tmp_path / "out") < 20


# --- look ----------------------------------------------------------------------------------------------------------


def lightness(colour):
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_deeper_is_darker_at_any_number_of_segments():
    for segments in (2, 4, 8):
        shades = [lightness(tint(depth, segments)) for depth in range(1, segments + 1)]
        assert shades == sorted(shades, reverse=True) and len(set(shades)) == segments and min(shades) > 150
    assert tint(1, 1) == tint(1, 4)


def test_numbers_and_dashes():
    assert percent(0.9933) == "99.3" and percent(None) == "–" and digits(1234.5, 0) == "1,234"
    assert points(-0.0576) == "−5.76" and signed(-0.0001, 2) == "0.00" and signed(0.26) == "+0.3"
    assert p_value(2.9488e-8) == "2.9e-08" and p_value(0.5) == "0.5" and p_value(None) == "–"


def test_tables_become_markdown():
    table = Table(head=("arm", "a|b"), rows=(("x", Cell("1", "0–2")),))
    text = markdown([Block(title="T", note="n", tables=(table,), lines=("so",))], level=3)
    assert text == "### T\n\nn\n\n| arm | a\\|b |\n|---|---:|\n| x | 1 (0–2) |\n\n- so\n"


POINTS = [
    Point(
        label=f"{series}-{i}",
        x=20 + 3 * i,
        accuracy=0.5 + 0.02 * i,
        low=0.45 + 0.02 * i,
        high=0.56 + 0.02 * i,
        series=series,
    )
    for series in ("full", "last_exited", "deferred")
    for i in range(7)
]


def test_the_picture_is_the_same_every_time_and_takes_the_pages_colours():
    one, two = (plot.pareto(POINTS, x_label="segments") for _ in range(2))
    assert plot.png(one) == plot.png(two) and plot.png(one).startswith(b"\x89PNG")
    drawn = plot.svg(one, title="accuracy")
    assert drawn == plot.svg(two, title="accuracy") and drawn.startswith('<svg role="img" aria-label="accuracy"')
    assert "var(--ink)" in drawn and plot.INK not in drawn and "http" not in drawn
    for point in POINTS:
        assert f">{point.label}</text>" in drawn.replace("\n", "")
    with pytest.raises(ValueError, match="no point"):
        plot.pareto([], x_label="segments")


LONG = ("gate_cdf, min_depth 2 · engine · last_exited", "gate_cdf · engine · last_exited · delayed, 1 turn late")


@pytest.mark.parametrize(
    ("names", "columns"),
    [(("full depth", "gate_cdf", "fixed"), 3), (("full depth", "gate_cdf", *LONG), 2), ((*LONG, 2 * LONG[0]), 1)],
)
def test_the_legend_stays_inside(names, columns):
    points = [
        Point(label=str(i), x=10.0 * i, accuracy=0.9, low=0.8, high=0.95, series=name, hollow=False)
        for i, name in enumerate(names)
    ]
    assert plot.legend_columns(names) == columns
    figure = plot.pareto(points, x_label="work")
    plot.png(figure)
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0


def test_labels_stay_inside_and_cover_nothing():
    draw = random.Random(5)
    area = Box(0, 0, 1500, 900)
    anchors = [(draw.uniform(300, 700), draw.uniform(500, 800)) for _ in range(22)] + [(1495, 895), (3, 4)]
    taken = [Box(x - 10, y - 10, x + 10, y + 10) for x, y in anchors]
    boxes = plot.place(anchors, [(150.0, 25.0)] * 24, taken, area, unit=2.5)
    for one, other in combinations(boxes, 2):
        assert one.overlap(other) == 0
    for box in boxes:
        assert box.overlap(area) == pytest.approx(150 * 25) and not any(box.overlap(other) for other in taken)
