"""Arms with exit heads and profiles: read, run, told in the Record, frozen, compared and reported."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from anydepth import LLM, Sampling
from anydepth.cli import app
from anydepth.diagnose.sides import Side, Workplace
from anydepth.eval.arms import Arm, Study
from anydepth.eval.backends.engine import EngineBackend
from anydepth.eval.backends.load import load_backend
from anydepth.eval.compare.compare import compare
from anydepth.eval.compare.rules import judge
from anydepth.eval.compare.sequences import compare_sequences
from anydepth.eval.protocol import study_of
from anydepth.eval.report.report import report
from anydepth.eval.run import in_force, run
from anydepth.eval.show import show_arms
from anydepth.eval.study import Backends, Options, freeze_study, run_study
from anydepth.eval.task import load_task
from anydepth.record import Record
from tests.eval.made_heads import CAREFUL, EAGER, write_heads, write_profile
from tests.eval.made_records import answer, write_arm
from tests.random_nano import write_random_nano

TOML = """\
[study]
task = "nano"
model = "{model}"
limit = 4
[[arm]]
name = "plain"
max_tokens = 8
[[arm]]
name = "never"
policy = "never"
heads = "heads"
max_tokens = 8
[[arm]]
name = "eager"
policy = "confidence"
profile = "eager"
heads = "heads"
fill = "project"
max_tokens = 8
[[arm]]
name = "careful"
policy = "confidence"
profile = "careful"
heads = "heads"
fill = "project"
max_tokens = 8
[[arm]]
name = "probe"
policy = "probe"
profile = "own.toml"
heads = "heads"
fill = "project"
max_tokens = 8
"""


@pytest.fixture
def folder(tmp_path):
    model = write_random_nano(tmp_path / "model", kind="layered")
    write_heads(tmp_path / "heads", model)
    write_profile(tmp_path / "own.toml", CAREFUL)
    (tmp_path / "arms.toml").write_text(TOML.format(model=model))
    return tmp_path


def test_a_record_says_which_heads_and_profile_ran(folder, monkeypatch):
    made = []
    monkeypatch.setattr(
        LLM, "__init__", lambda self, *a, init=LLM.__init__, **o: (made.append(o), init(self, *a, **o))[1]
    )
    study = Study.read(folder / "arms.toml")
    plain, never, eager, careful, probe = run_study(study, out=folder / "out", progress=False)
    assert sorted(sorted(Path(name).stem for name in o["profile"]) for o in made) == [
        [],
        [],
        ["careful", "eager", "own"],
    ]
    assert not {"heads", "head_hash", "profile_hash"} & plain.settings_used.keys()
    hash = json.loads((folder / "heads/heads.json").read_text())["sha256"]
    for record in (never, eager, careful, probe):
        assert (record.settings_used["heads"], record.settings_used["head_hash"]) == ("heads", hash)
        assert record.provenance["model"]["head_hash"] == hash and record.settings_used["exit_layers"][:2] == [1, 2]
        assert record.protocol_hash == plain.protocol_hash
    used = [record.settings_used for record in (eager, careful, probe)]
    assert [settings["profile"] for settings in used] == ["eager", "careful", "own"]
    assert used[0]["profile_thresholds"]["exits"][0] == {"layer": 1, **EAGER}
    assert used[0]["profile_hash"] != used[1]["profile_hash"] == used[2]["profile_hash"]
    assert never.settings_used["profile"] is None and "profile_hash" not in never.settings_used
    assert {depth for sample in eager.samples for depth in sample["depths"][1:]} == {1}
    ids = [{s["id"]: s["output_ids"] for s in record.samples} for record in (plain, never)]
    assert ids[0] == ids[1]


def test_a_record_says_which_tests_kept_rows_of_a_run_that_was_stopped_too(folder):
    """Of all answers, the ones before the end and after it."""
    arm = Arm.parse({"name": "a", "policy": "confidence", "profile": "careful", "heads": str(folder / "heads")})
    backend = load_backend(arm, str(folder / "model"), concurrency=2)
    task = load_task("nano")
    options = {"task": task, "backend": backend, "questions": task.select(limit=6), "concurrency": 2}
    whole = run(arm, out=folder / "whole", **options)
    stats = {name: n for name, n in backend.llm.stats().items() if name.startswith("stayed")}
    assert whole.aggregates["tallies"] == stats and stats["stayed"] >= stats["stayed_by_margin"] > 0
    left = iter("abc")
    with pytest.raises(StopIteration):
        run(arm, out=folder / "part", progress=lambda count: next(left), **options)
    assert len((folder / "part/samples.jsonl").read_text().splitlines()) == 3
    again = run(arm, out=folder / "part", **options)
    assert again.aggregates["tallies"] == stats
    assert {s["id"]: s["tallies"] for s in again.samples} == {s["id"]: s["tallies"] for s in whole.samples}
    never = Arm.parse({"name": "b", "policy": "never"})
    plain = run(never, out=folder / "plain", **options)
    assert "tallies" not in plain.aggregates and "tallies" not in plain.samples[0]
    report([folder], folder / "page")
    _, told = (folder / "page/report.md").read_text().split("how often a policy's tests kept a row")
    assert " stayed | stayed by logit alone " in told and f" {stats['stayed']} | {stats['stayed_by_logit']} " in told


def test_what_differs_between_arms_with_heads(folder):
    records = run_study(Study.read(folder / "arms.toml"), out=folder / "out", progress=False)
    plain, never, eager, careful, probe = records

    def differing(a, b):
        return [factor.name for factor in compare(a, b).factors]

    assert differing(eager, never) == ["exit policy"]
    assert differing(eager, careful) == ["profile"] and differing(careful, probe) == ["exit policy"]
    assert "heads" in [factor.name for factor in compare(eager, plain).without_effect]


def test_full_depth_without_heads_is_counted_in_the_segments_of_the_other_arms(folder):
    """As the one with heads; where heads end other segments, or with segments of its own, it keeps its own."""
    study = Study.read(folder / "arms.toml")
    plain, never, eager, *_ = run_study(study, out=folder / "out", progress=False)
    for name in ("segments", "exit_layers"):
        assert plain.settings_used[name] == never.settings_used[name]
    for name in ("mean_depth", "segments_read_per_question", "segments_executed_per_question"):
        assert plain.aggregates[name] == never.aggregates[name] > eager.aggregates[name]
    report([folder / "out/plain", folder / "out/eager"], folder / "page")
    assert "No proposal" not in (folder / "page/report.md").read_text()
    place = Workplace(model=study.model, task="nano", out=folder / "again", limit=4)
    judge = place.judge(Side.of(plain), Side.of(never))  # replays depths of so many segments
    assert judge.models[0].shape.segments == plain.settings_used["segments"]
    write_heads(folder / "others", folder / "model", exits=(3,))
    for beside, ends in (({"segments": [2, 4]}, [2, 4]), ({}, [4])):
        arms = [{"name": "a", **beside}, *({"name": name, "heads": str(folder / name)} for name in ("heads", "others"))]
        there = Backends(Study.parse({"study": study.head(), "arm": arms}), Options()).check(load_task("nano"))
        assert list(there) == ["a", "heads", "others"] and there["a"]["exit_layers"] == ends


def test_a_frozen_study_keeps_heads_and_profiles(folder):
    study = Study.read(folder / "arms.toml")
    frozen = freeze_study(study)
    assert study_of(frozen) == study and len(frozen["profiles"]) == 3 and len(frozen["heads"]) == 1
    profile = folder / "heads/profiles/careful.toml"
    before = profile.read_text()
    write_profile(profile, CAREFUL | {"margin": 0.06})
    with pytest.raises(ValueError, match=r"frozen with something else: profiles\..*careful.toml was"):
        run_study(study, out=folder / "out", frozen=frozen, progress=False)
    profile.write_text(before)
    write_heads(folder / "heads", folder / "model", kind="norm")
    with pytest.raises(ValueError, match=r"frozen with something else: heads\..* was"):
        run_study(study, out=folder / "out", frozen=frozen, progress=False)
    assert not (folder / "out").exists()
    old = freeze_study(Study.parse({"study": study.head(), "arm": [{"name": "plain"}]}))
    assert not {"heads", "profiles"} & old.keys()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"heads": 3}, "heads is 3; allowed: a folder of exit heads"),
        ({"policy": "probe", "profile": 3}, "profile is 3; allowed: a .toml, or a name beside heads"),
        ({"policy": "never", "profile": "p"}, "profile is 'p', which exit_policy 'never' does not read"),
    ],
)
def test_an_arm_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=f"arm 'a': {message}"):
        Arm.parse({"name": "a", **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"heads": "nowhere"}, "there are no exit heads in nowhere"),
        ({"policy": "probe", "heads": "heads", "profile": "nobody"}, "there is no profile .*nobody.toml"),
        ({"backend": "reference", "heads": "heads"}, "heads is of the engine alone; leave it out of reference arms"),
        ({"backend": "transformers", "policy": "probe", "profile": "p"}, "profile is of the engine alone"),
        ({"policy": "probe", "heads": "heads"}, "given: None, loaded: none"),
    ],
)
def test_a_study_with_an_arm_that_cannot_run_is_refused(folder, given, message, monkeypatch):
    monkeypatch.chdir(folder)
    arms = [{"name": "never"}, {"name": "a", **given}]
    study = Study.parse({"study": Study.read(folder / "arms.toml").head(), "arm": arms})
    with pytest.raises(ValueError, match=f"arm 'a': .*{message}"):
        freeze_study(study)


def test_depths_are_told_in_layers_and_latency_with_its_settings(folder, capsys):
    records = run_study(Study.read(folder / "arms.toml"), out=folder / "out", progress=False)
    found = records[2].aggregates["latency_s"]
    seconds = sorted(sample["latency_s"] for sample in records[2].samples)
    assert found["p50"] == pytest.approx((seconds[1] + seconds[2]) / 2) and found["p50"] <= found["p95"] <= seconds[-1]
    show_arms(records, folder=folder / "out")
    said = capsys.readouterr().out
    assert "latency: of a whole answer, 32 at a time, at most 8 tokens, 1 thread\n" in said
    assert "eager, tokens read after layer 1: 100.0 %" in said
    report([folder / "out"], folder / "page")
    text = (folder / "page/report.md").read_text()
    depths = text.split("## Depths")[1].split("## ")[0]
    assert "| arm | mean layer | layer 1 | layer 2 | layer 4 |" in depths
    assert "| plain | 4.00 | 0.0 | 0.0 | 100.0 |" in depths and "| eager | 1.00 | 100.0 | 0.0 | 0.0 |" in depths
    assert "## Latency" in text and "| at a time | most tokens | threads |" in text
    agreed = next(line for line in text.split("## Agreement")[1].splitlines() if line.startswith("| eager − plain"))
    pair = compare(records[2], records[0]).sequences
    assert f"{100 * pair.common_prefix_share:.1f}" in agreed


@pytest.fixture
def generate(folder, capsys):
    prompt = "Ann has 5 . Bob has 3 more than Ann . How many has Bob ?"

    def run(*options):
        arguments = [
            "generate",
            prompt,
            "--model",
            folder / "model",
            "--threads",
            1,
            "--json",
            "--ignore-eos",
            *options,
        ]
        app([str(argument) for argument in arguments], standalone_mode=False)
        return json.loads(capsys.readouterr().out.splitlines()[-1])["result"]["outputs"][0]

    return run


def test_a_profile_alone_says_which_policy_reads_it(folder, generate):
    write_profile(folder / "heads/profiles/likely.toml", {"probe": 0.5})
    heads = ("--heads", folder / "heads", "--profile", "likely")
    asked = generate(*heads, "--exit-policy", "probe")
    assert generate(*heads)["depths"] == asked["depths"] and len(set(asked["depths"][1:])) > 1
    assert set(generate(*heads, "--depth", 2)["depths"][1:]) == {2}
    with pytest.raises(ValueError, match=r"--profile eager may be used by confidence and probe, .* give --exit-policy"):
        generate("--heads", folder / "heads", "--profile", "eager")


def test_force_final_exit_is_the_plain_model(folder, generate):
    heads = ("--heads", folder / "heads", "--profile", "eager")
    plain = generate()["token_ids"]
    assert generate(*heads, "--exit-policy", "confidence")["token_ids"] != plain
    for fill in ("full", "deferred", "project"):
        forced = generate(*heads, "--fill", fill, "--force-final-exit")
        assert forced["token_ids"] == plain and len(set(forced["depths"])) == 1
    with pytest.raises(ValueError, match=r"--force-final-exit .*, and --exit-policy, --min-depth says another"):
        generate(*heads, "--force-final-exit", "--exit-policy", "probe", "--min-depth", 2)


CHOICES = """
from anydepth.eval.task import Grade, Question, Task


class Letters(Task):
    splits = ("test",)

    def questions(self, split):
        words = ["5", "8", "Ann", "Bob"]
        return [
            Question(id=f"q{n}", prompt=f"Ann has {n} .", gold=0, choices=tuple(f" {w}" for w in words))
            for n in range(3)
        ]

    def grade(self, question, text):
        return Grade(prediction={"likeliest": text}, score=float(text == " 5"))
"""


def test_choices_that_a_head_does_not_list_are_impossible_and_json_stays_valid(folder):
    tokenizer = LLM(folder / "model").tokenizer
    five, eight, other, another = (tokenizer.encode(word)[0] for word in ("5", "8", ".", "?"))
    write_heads(folder / "some", folder / "model", kind="shortlist", listed=[five, eight])
    write_heads(folder / "none", folder / "model", kind="shortlist", listed=[other, another])
    (folder / "letters.py").write_text(CHOICES)
    arms = [{"name": "never"}] + [
        {"name": f"{heads}-{policy}", "heads": str(folder / heads), "policy": policy, "profile": "eager"}
        for heads in ("some", "none")
        for policy in ("confidence", "probe")
    ]
    given = {"study": {"task": str(folder / "letters.py"), "model": str(folder / "model")}, "arm": arms}
    never, *early = run_study(Study.parse(given), out=folder / "out", progress=False)
    for record in early:
        lines = (record.path / "samples.jsonl").read_text().splitlines()
        for line in lines:
            json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert {depth for sample in record.samples for c in sample["choices"] for depth in c["depths"]} == {1}
        listed = record.settings_used["heads"] == "some"
        for sample in record.samples:
            known = [choice["logprobs"][0] is not None for choice in sample["choices"]]
            assert known == ([True, True, False, False] if listed else [False] * 4)
            assert (sample["score"] is None) == (not listed) and bool(sample["unscored"]) == (not listed)
            assert sample["text"] in ((" 5", " 8") if listed else ("",))
        found = compare(record, never)
        assert found.choices.possible_differ == 3 and math.isfinite(found.choices.most_logprob_difference)
        json.dumps(found.asdict(), allow_nan=False)
    assert [record.aggregates["unscored"] for record in early] == [0, 0, 3, 3]
    assert all(record == Record.read(record.path) for record in early)
    report([folder / "out"], folder / "page")
    assert "same answers, %" in (folder / "page/report.md").read_text()


def test_scores_of_what_is_not_listed_are_minus_infinity(folder):
    llm = LLM(folder / "model")
    listed = llm.tokenizer.encode("5")[0]
    write_heads(folder / "one", folder / "model", kind="shortlist", listed=[listed, listed + 1])
    llm = LLM(folder / "model", heads=folder / "one", profile="eager", fill="project")
    scores = llm.score([[3, 4, 5]] * 2, [[listed, 7], [7, listed]], Sampling(exit_policy="confidence"))
    assert [[math.isinf(x) for x in score.logprobs] for score in scores] == [[False, True], [True, False]]
    assert not scores[1].greedy


def test_alpacaeval_writes_what_its_judge_reads_with_heads_too(folder, monkeypatch):
    rows = [{"id": f"q{n}", "dataset": "koala", "instruction": f"How many has Ann ? {n}"} for n in range(3)]
    (folder / "alpacaeval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(folder)
    early = "name=early,policy=probe,heads=heads,profile=careful,fill=deferred,max_tokens=8"
    arguments = ["eval", "--task", "alpacaeval", "--data", ".", "--model", "model", "--out", "out", "--arm", early]
    app([*arguments, "--arm", "name=never,max_tokens=8", "--outputs", "judge"], standalone_mode=False)
    written = json.loads(Path("judge/early.json").read_text())
    assert [row["instruction"] for row in written] == [row["instruction"] for row in rows]
    assert {row["generator"] for row in written} == {"model-early"} and all(row["output"] for row in written)


def test_lm_eval_and_diagnose_take_heads_and_a_profiles_path(folder):
    pytest.importorskip("lm_eval")
    from anydepth.eval.lm_eval.model import AnydepthLM

    arm = {"heads": str(folder / "heads"), "policy": "probe", "profile": str(folder / "own.toml"), "fill": "project"}
    lm = AnydepthLM(model=str(folder / "model"), **arm)
    assert lm._settings["profile"] == "own" and lm._settings["policy"] == "probe"
    place = Workplace(model=str(folder / "model"), task="nano", out=folder / "out", limit=2, progress=False)
    side = place.run({**arm, "max_tokens": 4}, "probe")
    assert (side.used["profile"], side.used["heads"]) == ("own", "heads") and len(place.outputs(side)) == 2


def test_a_backend_without_the_arms_heads_is_refused(folder):
    backend = EngineBackend(LLM(folder / "model"))
    arm = Arm.parse({"name": "a", "heads": str(folder / "heads")})
    with pytest.raises(ValueError, match=r"arm 'a' wants the exit heads .*heads', this engine was made with None"):
        in_force(arm, backend, arm.sampling())


def test_the_share_before_answers_part():
    """Half of 8, 9 is in 8, 7; two thirds of 8, 7, 6 in 8, 7; the third pair is the same."""
    pairs = [([8, 9], [8, 7]), ([8, 7], [8, 7, 6]), ([8], [8])]
    made = [(answer(n, ids=one), answer(n, ids=other)) for n, (one, other) in enumerate(pairs)]
    found = compare_sequences(made, segments=4)
    assert found.common_prefix_share == pytest.approx((1 / 2 + 2 / 3 + 1) / 3) and found.tokens_differ == 2


def test_choices_are_not_identical_where_one_is_impossible_in_one_arm_alone(tmp_path):
    def arm(name, *logprobs):
        choices = [{"logprobs": [-1.0, x], "depths": [4, 4]} for x in logprobs]
        return write_arm(tmp_path / name, [answer("q", ids=(), depths=(), choices=choices)])

    one, other, same = arm("one", -2.0, None), arm("other", -2.0, -3.0), arm("same", -2.0, None)
    rule = {"identical": True, "compare": ["one", "other"]}
    assert judge(rule, compare(one, other)).met is False and judge(rule, compare(one, same)).met is True
    assert compare(one, other).choices.most_logprob_difference == 0
