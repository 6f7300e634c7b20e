"""From prompts to profiles and a certificate that an LLM keeps to; what the table says is what the engine does."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from anydepth import LLM, Sampling
from anydepth.calibrate import work
from anydepth.calibrate.answers import full_depth_answers
from anydepth.calibrate.certify import table_losses
from anydepth.calibrate.gather import gate_temperature, gather
from anydepth.calibrate.job import Job
from anydepth.calibrate.prompts import choose_prompts, prompt_id
from anydepth.calibrate.run import calibrate_heads, check_profile
from anydepth.calibrate.scores import LOSSES_FILE, engine_losses, engine_scores, kept_engine_losses
from anydepth.calibrate.table import TESTS, agrees, walk
from anydepth.certificate import Certificate
from anydepth.cli import app
from anydepth.exits.base import known_profiles
from anydepth.exits.load import load_policy
from anydepth.models.heads import Head
from anydepth.profile import Exit, Profile
from anydepth.record import files_hash
from anydepth.train.head_data import Source
from anydepth.train.prepared import held_out
from tests.calibrate.making import EXITS, quiet, write_model, write_prompts
from tests.train.test_heads import plain_states


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = write_model(tmp_path_factory.mktemp("llama"))
    write_prompts(path / "prompts.jsonl", 800, seed=1)
    write_prompts(path / "few.jsonl", 60, seed=2)
    return path


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder, heads=folder / "heads")


@pytest.fixture(scope="module")
def answers(llm, folder):
    prompts = [prompt for prompt, _ in Source(path=folder / "few.jsonl", own_answers=True).read()]
    return full_depth_answers(llm, prompts, folder / "few", tokens=9, report=quiet)


def job(folder: Path, policy: str = "probe", *, data: str = "prompts.jsonl", **changes) -> Job:
    given = {"levels": (0.9, 0.7, 0.5), "answer_tokens": 9, "epsilon": 0.5, **changes}
    sources = (Source(path=folder / data, own_answers=True),)
    return Job(model=str(folder), heads=folder / "heads", policy=policy, data=sources, **given)


@pytest.fixture(scope="module")
def lax(llm, answers) -> Profile:
    """Thresholds that a part of the rows passes at every exit."""
    rows, exits = gather(llm.checkpoint.model, answers, temperature=1.3, report=quiet), []
    for e, layer in enumerate(EXITS):
        limits = {test: float(np.quantile(rows.score(test, e), 0.2)) for test in (*TESTS, "probe")}
        exits.append(Exit(layer=layer, **limits | {"entropy": -limits["entropy"]}))
    return Profile(name="lax", exits=tuple(exits), gate_temperature=1.3)


# -- prompts and answers ---------------------------------------------------------------------------------------------


def test_prompts_that_were_trained_on_are_left_out_and_the_sets_share_none(folder):
    trained, other = (Source(path=folder / name, own_answers=True) for name in ("rows.jsonl", "few.jsonl"))
    about = json.loads((folder / "heads/heads.json").read_text())
    hashes = {source["sha256"] for source in about["data"]["sources"]}
    assert hashes == {files_hash([trained.path])}
    found = choose_prompts([trained, other], trained_on=hashes, seed=3)
    mine, foreign = ({prompt for prompt, _ in source.read()} for source in (trained, other))
    chosen = {*found.fit, *found.certify}
    assert chosen == {p for p in mine if held_out(p)} | foreign and not {*found.fit} & {*found.certify}
    assert 0.15 < len(found.fit) / len(chosen) < 0.5 and len(chosen) == len(found.fit) + len(found.certify)
    assert choose_prompts([other, trained], trained_on=hashes, seed=3).fit == found.fit
    assert choose_prompts([trained, other], trained_on=hashes, seed=4).fit != found.fit


def test_a_limit_takes_its_share_of_what_was_trained_on_and_of_other_files(tmp_path):
    """Training held out the prompts of the lowest ids, so a ranking by id would take those first."""
    trained = Source(path=write_prompts(tmp_path / "trained.jsonl", 2000, seed=0), own_answers=True)
    other = Source(path=write_prompts(tmp_path / "other.jsonl", 200, seed=1), own_answers=True)
    mine, foreign = ({prompt for prompt, _ in source.read()} for source in (trained, other))
    usable = {prompt for prompt in mine if held_out(prompt)}
    assert 150 < len(usable) < 250 and len(foreign - mine) > 150
    found = choose_prompts([trained, other], trained_on={files_hash([trained.path])}, limit=100)
    chosen = {*found.fit, *found.certify}
    assert len(chosen) == 100 and 30 < len(chosen & usable) < 70
    more = choose_prompts([trained, other], trained_on={files_hash([trained.path])}, limit=200)
    assert chosen < {*more.fit, *more.certify}


def test_too_few_prompts_are_refused(tmp_path):
    source = Source(path=write_prompts(tmp_path / "one.jsonl", 1), own_answers=True)
    with pytest.raises(ValueError, match="1 prompts are left that the heads were not trained on"):
        choose_prompts([source], trained_on=())
    with pytest.raises(ValueError, match="0 prompts are left"):
        choose_prompts([source], trained_on={files_hash([source.path])} if not held_out(source.read()[0][0]) else ())


def test_answers_are_full_depths_and_are_made_once(llm, answers, folder, tmp_path):
    prompts = [prompt for prompt, _ in Source(path=folder / "few.jsonl", own_answers=True).read()]
    plain = LLM(folder).chat([[{"role": "user", "content": prompt}] for prompt in prompts], Sampling(max_tokens=9))
    assert [answer.answer_ids for answer in answers] == [output.token_ids for output in plain]
    assert [answer.id for answer in answers] == list(map(prompt_id, prompts))
    shutil.copytree(folder / "few", tmp_path / "few")
    lines = (tmp_path / "few/answers.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "few/answers.jsonl").write_bytes(b"".join(lines[:-2]) + lines[-2][:20])  # killed in the midst of a line
    told = []
    assert full_depth_answers(llm, prompts, tmp_path / "few", tokens=9, report=told.append) == answers
    assert sorted((tmp_path / "few/answers.jsonl").read_bytes().splitlines(keepends=True)) == sorted(lines)
    with pytest.raises(ValueError, match="answers of another answer_tokens"):
        full_depth_answers(llm, prompts, tmp_path / "few", tokens=8, report=quiet)
    (tmp_path / "few/answers.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 1 is no answer"):
        full_depth_answers(llm, prompts, tmp_path / "few", tokens=9, report=quiet)


def test_prompts_too_long_for_an_answer_are_left_out(llm, tmp_path):
    told = []
    made = full_depth_answers(llm, ["a " * 80, "a b"], tmp_path, tokens=3, report=told.append)
    assert [answer.id for answer in made] == [prompt_id("a b")] and "1 prompts are too long" in told[0]


# -- the table -------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("policy", ["confidence", "probe"])
def test_the_table_is_what_the_policy_decides_on_the_same_states(llm, answers, lax, policy, monkeypatch):
    """States of each answer alone; rows are its tokens from the second on. The first head declines half of them."""
    model = llm.checkpoint.model
    monkeypatch.setattr(model, "answers", lambda k, h, z: (h[:, 0] > 0) | (k > 1))
    rows = gather(model, answers[:9], temperature=1.3, report=quiet)
    walked = walk(rows, lax, policy)
    decides = load_policy(policy, profiles=known_profiles([lax], model.shape))
    ask, bounds, segments = Sampling(exit_policy=policy, profile="lax"), (1, len(EXITS) + 1), len(EXITS) + 1
    wanted, right = [], []
    for answer in answers[:9]:
        states = plain_states(model, [*answer.prompt_ids, *answer.answer_ids[:-1]])
        for n in range(1, len(answer.answer_ids)):
            state = decides.start(torch.tensor([decides.parameters(ask, bounds, segments)], dtype=torch.float64))
            for depth, layer in enumerate((*EXITS, 4), start=1):
                h = states[layer - 1][len(answer.prompt_ids) + n - 1][None]
                if depth == segments:
                    break
                may = model.answers(depth, h, model.listed(depth, h))
                leave, state = decides.decide(state, torch.tensor([depth]), decides.seen(model, depth, h))
                if bool(leave) and bool(may):
                    break
            wanted.append(depth - 1)
            right.append(int(model.readout(depth, h).argmax()) == answer.answer_ids[n])
    assert walked.left_R.tolist() == wanted and len({*wanted}) > 2
    assert agrees(rows, walked).tolist() == right
    assert rows.question_R.tolist() == [q for q, a in enumerate(answers[:9]) for _ in a.answer_ids[1:]]


@pytest.mark.parametrize("fill", ["full", "deferred"])
@pytest.mark.parametrize("policy", ["confidence", "probe"])
def test_the_engine_does_what_the_table_says(llm, answers, lax, policy, fill):
    rows = gather(llm.checkpoint.model, answers, temperature=1.3, report=quiet)
    walked, scores = walk(rows, lax, policy), engine_scores(llm, answers, lax, policy, fill=fill, report=quiet)
    assert [d - 1 for score in scores if score for d in score.depths] == walked.left_R.tolist()
    said = [right for score in scores if score for right in score.argmax]
    assert said == agrees(rows, walked).tolist() and 0 < sum(said) < len(said)
    assert all(score.greedy == all(score.argmax) for score in scores if score)
    assert engine_losses(scores) == pytest.approx(table_losses(rows, lax, policy)) and len(scores) == len(answers)


def test_fill_project_is_another_model(llm, answers, lax):
    full, project = (engine_scores(llm, answers, lax, "probe", fill=fill, report=quiet) for fill in ("full", "project"))
    assert [s.logprobs for s in project if s] != [s.logprobs for s in full if s]


def test_an_answer_of_one_token_has_no_rows_and_no_loss(llm, answers, lax):
    short = [replace(answers[0], answer_ids=answers[0].answer_ids[:1]), *answers[1:3]]
    rows = gather(llm.checkpoint.model, short, report=quiet)
    assert 0 not in rows.question_R and rows.questions == 3 and table_losses(rows, lax, "probe")[0] == 0
    assert engine_losses(engine_scores(llm, short, lax, "probe", fill="full", report=quiet))[0] == 0
    with pytest.raises(ValueError, match="no answer has a second token"):
        gather(llm.checkpoint.model, short[:1], report=quiet)


def test_a_shortlist_of_one_token_has_an_endless_margin(llm, answers, monkeypatch):
    model = llm.checkpoint.model
    head = model.heads[1]
    one = {**head.tensors, "table": head.tensors["table"][:, -1:].contiguous(), "ids": head.tensors["ids"][-1:]}
    monkeypatch.setitem(model.heads, 1, Head("shortlist", one))
    found = gather(model, answers[:5], report=quiet)
    assert np.isinf(found.margin_RE[:, 0]).all() and (found.entropy_RE[:, 0] == 0).all()
    assert np.isfinite(found.margin_RE[:, 1:]).all()


def test_packs_and_chunks_change_nothing(llm, answers, monkeypatch):
    whole = gather(llm.checkpoint.model, answers, report=quiet)
    monkeypatch.setattr("anydepth.calibrate.gather._PACK_TOKENS", 40)
    monkeypatch.setattr("anydepth.calibrate.gather._CHUNK_BYTES", 300)
    again = gather(llm.checkpoint.model, answers, report=quiet)
    np.testing.assert_allclose(again.entropy_RE, whole.entropy_RE, atol=1e-5)
    np.testing.assert_array_equal(again.agrees_RE, whole.agrees_RE)
    part = whole.of(2, 5)
    assert part.questions == 3 and set(part.question_R) <= {0, 1, 2}
    np.testing.assert_array_equal(part.margin_RE, whole.margin_RE[(whole.question_R >= 2) & (whole.question_R < 5)])
    assert 0.25 <= gate_temperature(llm.checkpoint.model, answers) <= 8


# -- the whole -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def probes(folder):
    found = calibrate_heads(job(folder), folder / "out", answers=folder / "made", report=quiet)
    return found, folder / "out"


@pytest.mark.parametrize("policy", ["confidence", "probe"])
def test_the_same_data_and_seed_give_the_same_bytes(folder, tmp_path, policy):
    outs, mine = [tmp_path / "a", tmp_path / "b"], job(folder, policy, data="few.jsonl", least_rows=10)
    for out in outs:
        calibrate_heads(mine, out, report=quiet)
    first, second = ({path.name: path.read_bytes() for path in (out / "profiles").iterdir()} for out in outs)
    assert first == second and len(first) >= 2
    assert (outs[0] / "calibration.json").read_bytes() == (outs[1] / "calibration.json").read_bytes()
    other = calibrate_heads(replace(mine, seed=1), tmp_path / "c", answers=outs[0] / "answers", report=quiet)
    assert other["fitted_on"] != json.loads((outs[0] / "calibration.json").read_text())["fitted_on"]


def test_a_certificate_is_made_and_an_llm_keeps_to_it(folder, probes):
    found, out = probes
    certificate = Certificate.read(out / "certificate.json")
    assert (
        certificate.chosen != "never" and "of an answer's tokens, on average, early exit says" in found["certificate"]
    )
    assert certificate.head_hash == files_hash([folder / "heads/heads.safetensors"]) and certificate.n >= 500
    assert (certificate.loss, certificate.policy["exit_policy"]) == ("disagree_tokens", "probe")
    names = [point["profile"] for point in certificate.grid]
    assert names == [name for name in ("probe-0.9", "probe-0.7", "probe-0.5") if name in found["profiles"]]
    risks = [found["profiles"][name]["risk"] for name in names]
    assert [{**risk, "n": p["n"]} for risk, p in zip(risks, certificate.points)] == risks
    chosen = certificate.chosen["profile"]
    options = {"heads": folder / "heads", "profile": [out / "profiles" / f"{name}.toml" for name in names]}
    held, free = LLM(folder, certificate=out / "certificate.json", **options), LLM(folder, **options)
    ask = Sampling(exit_policy="probe", profile=chosen, max_tokens=9)
    for sampling in (Sampling(max_tokens=9), ask):
        assert held.generate("a b c", sampling)[0].depths == free.generate("a b c", ask)[0].depths
    for other in (Sampling(exit_policy="confidence", profile=chosen), Sampling(exit_policy="never")):
        with pytest.raises(ValueError, match=r"exit_policy is '(confidence|never)', certified is 'probe'"):
            held.generate("a b c", other)
    with pytest.raises(ValueError, match="fill is 'project', not 'full'"):
        LLM(folder, certificate=certificate, fill="project", **options)
    with pytest.raises(ValueError, match=f"is for profile '{chosen}', which is not loaded"):
        LLM(folder, certificate=certificate, heads=folder / "heads")


def test_a_certificate_is_of_the_dtype_in_which_the_model_is_served(folder, probes, tmp_path):
    mine = job(folder, dtype="bfloat16", device="cpu:0")
    assert mine.command == f"{job(folder).command} --dtype bfloat16 --device cpu:0"
    hub = replace(mine, model="org/name", revision="v1").command
    assert hub.startswith("anydepth calibrate --model org/name ") and hub.endswith(" --revision v1")
    calibrate_heads(mine, tmp_path, report=quiet)
    certificate = Certificate.read(tmp_path / "certificate.json")
    options = {"heads": folder / "heads", "profile": tmp_path / f"profiles/{certificate.chosen['profile']}.toml"}
    held = LLM(folder, certificate=certificate, dtype="bfloat16", **options)
    assert certificate.dtype == "bfloat16" and held.generate("a b c")
    with pytest.raises(ValueError, match="dtype is 'float32', not 'bfloat16'"):
        LLM(folder, certificate=certificate, **options)
    with pytest.raises(ValueError, match="answers of another dtype"):
        calibrate_heads(mine, tmp_path / "other", answers=folder / "made", report=quiet)


def test_a_profile_that_was_changed_is_not_the_certified_one(folder, probes, tmp_path):
    certificate = Certificate.read(probes[1] / "certificate.json")
    path = tmp_path / f"{certificate.chosen['profile']}.toml"
    text = (probes[1] / "profiles" / path.name).read_text()
    path.write_text("# only a comment\n" + text)
    LLM(folder, certificate=certificate, heads=folder / "heads", profile=path)
    path.write_text(text.replace("probe = 0.", "probe = 0.0"))
    with pytest.raises(ValueError, match="was changed after it was certified"):
        LLM(folder, certificate=certificate, heads=folder / "heads", profile=path)


def test_the_report_says_what_made_it(folder, probes):
    found, out = probes
    assert json.loads((out / "calibration.json").read_text()) == found
    (source,) = found["sources"]
    assert source["sha256"] == files_hash([folder / "prompts.jsonl"]) and source["usable"] == 800
    for name, told in found["profiles"].items():
        text = (out / "profiles" / f"{name}.toml").read_text()
        assert text.startswith("# anydepth calibrate --model ") and source["sha256"] in text and "--seed 0" in text
        assert str(folder) not in text
        assert Profile.read(out / "profiles" / f"{name}.toml").hash == told["hash"]
        assert told["fit"]["questions"] + told["certify"]["questions"] == 800
        assert told["certify"]["agreement"] > 0.5 and told["certify"]["mean_layers"] < 4


def test_project_is_certified_by_the_engine(folder, probes, tmp_path, monkeypatch):
    """By whatever the engine says: here its losses are doubled on the way."""
    monkeypatch.setattr(work, "kept_engine_losses", lambda *a, **o: [2 * x for x in kept_engine_losses(*a, **o)])
    mine = job(folder, fill="project", epsilon=0.9)
    found = calibrate_heads(mine, tmp_path / "out", answers=folder / "made", report=quiet)
    certificate = Certificate.read(tmp_path / "out/certificate.json")
    assert certificate.fill == "project" and certificate.chosen != "never"
    for name, told in found["profiles"].items():
        full = probes[0]["profiles"][name]
        assert told["exits"] == full["exits"]
        assert (
            told["risk"]["losses"] == pytest.approx(2 * full["risk"]["losses"], rel=0.1) and full["risk"]["losses"] > 5
        )
    profile = tmp_path / f"out/profiles/{certificate.chosen['profile']}.toml"
    LLM(folder, certificate=certificate, heads=folder / "heads", fill="project", profile=profile)


def test_a_certification_that_is_killed_goes_on_from_the_questions_it_had(folder, tmp_path):
    """Killed at the 300th of some 545 scores, and the last line cut."""
    code = """
import os, signal, sys
import torch
from anydepth.calibrate import scores
from tests.calibrate.test_run import calibrate_heads, job, Path
torch.set_num_threads(1)
folder, out = map(Path, sys.argv[1:])
left, wrong = 300, scores._wrong
def killing(score):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return wrong(score)
scores._wrong = killing
calibrate_heads(job(folder, fill="project", epsilon=0.9), out, answers=folder / "made")
"""
    mine = job(folder, fill="project", epsilon=0.9)
    whole, killed, told = tmp_path / "whole", tmp_path / "killed", []
    found = calibrate_heads(mine, whole, answers=folder / "made", report=quiet)
    done = subprocess.run([sys.executable, "-c", code, folder, killed], stdout=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL and not (killed / "certificate.json").exists()
    path = killed / LOSSES_FILE
    kept = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(kept[:-1]) + kept[-1][:30])
    assert calibrate_heads(mine, killed, answers=folder / "made", report=told.append) == found
    assert (killed / "certificate.json").read_bytes() == (whole / "certificate.json").read_bytes()
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(kept) == 299 and lines[:298] == kept[:298] and len(lines) == len({*lines})
    assert {*lines} == {*(whole / LOSSES_FILE).read_bytes().splitlines(keepends=True)}
    assert told[-1] == found["certificate"] and any("answers were scored before" in line for line in told)


def test_kept_losses_are_of_these_thresholds_answers_and_fill(llm, answers, lax, tmp_path):
    path, told = tmp_path / "losses.jsonl", []

    def losses(profile=lax, policy="probe", fill="project", mine=answers):
        told.clear()
        return kept_engine_losses(llm, mine, profile, policy, fill=fill, path=path, report=told.append)

    first = losses()
    assert first == engine_losses(engine_scores(llm, answers, lax, "probe", fill="project", report=quiet))
    assert losses(profile=replace(lax, name="other")) == first
    scored = sum(len(answer.answer_ids) > 1 for answer in answers)
    assert told == [f"other, fill project: {scored} answers were scored before"]
    another = replace(answers[0], answer_ids=(*answers[0].answer_ids[:-1], 3))
    for change in (
        {"profile": replace(lax, exits=lax.exits[:1])},
        {"profile": replace(lax, head_hash="h")},
        {"policy": "confidence"},
        {"fill": "full"},
        {"mine": [another]},
    ):
        losses(**change)
        assert not any("before" in line for line in told), change
    path.write_text("{}\n")
    with pytest.raises(ValueError, match=r"losses\.jsonl, line 1 is no loss"):
        losses()


def test_under_project_nothing_is_scored_after_the_first_failure(folder, tmp_path):
    told, mine = [], job(folder, fill="project", epsilon=0.001, answer_tokens=9)
    found = calibrate_heads(mine, tmp_path / "out", answers=folder / "made", report=told.append)
    certificate = Certificate.read(tmp_path / "out/certificate.json")
    assert certificate.chosen == "never" and len(certificate.grid) == 1 < len(found["profiles"])
    assert {line.split(",")[0] for line in told if "scored" in line} == {certificate.grid[0]["profile"]}


def test_nothing_is_certified_that_was_not_shown(folder, tmp_path):
    found = calibrate_heads(job(folder, epsilon=0.001), tmp_path / "out", answers=folder / "made", report=quiet)
    assert Certificate.read(tmp_path / "out/certificate.json").chosen == "never"
    assert found["certificate"].startswith("nothing certified")


def test_few_prompts_give_profiles_but_no_certificate(folder, tmp_path):
    told = []
    mine = job(folder, data="few.jsonl", least_rows=10)
    found = calibrate_heads(mine, tmp_path / "out", answers=folder / "made", report=told.append)
    assert found["profiles"] and found["certificate"] is None and not (tmp_path / "out/certificate.json").exists()
    assert told[-1].startswith("No certificate: there are ") and "it needs 500" in told[-1]
    with pytest.raises(ValueError, match=r"something is altered: .*least_rows was 10 and is 9"):
        calibrate_heads(replace(mine, least_rows=9), tmp_path / "out", answers=folder / "made", report=quiet)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "gate_cdf"}, "unknown policy that has profiles 'gate_cdf'"),
        ({"fill": "shared"}, "unknown fill 'shared'"),
        ({"data": ()}, "no prompts were given"),
        ({"epsilon": 0}, "epsilon is 0; allowed"),
        ({"limit": 0}, "limit is 0; allowed"),
        ({"levels": (0.9, 95.0)}, "level is 95.0; allowed: shares"),
        ({"levels": ()}, "give one or more agreements"),
    ],
)
def test_jobs_that_cannot_be_done(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(job(folder), **changes)


def run(*words: object) -> None:
    app(list(map(str, words)), standalone_mode=False)


def test_the_command(folder, probes, tmp_path, capsys):
    shutil.copytree(folder / "heads", tmp_path / "heads")
    options = ["--model", folder, "--heads", tmp_path / "heads", "--policy", "probe", "--data", folder / "few.jsonl"]
    options += ["--answers", folder / "few", "--answer-tokens", 9, "--out", tmp_path / "out"]
    for name, value, message in (
        ("--dtype", "half", "unknown dtype 'half'"),
        ("--device", "moon", "device is 'moon'"),
        ("--revision", "v1", "revision='v1'"),
    ):
        with pytest.raises(ValueError, match=message):
            run("calibrate", *options, name, value)
    run("calibrate", *options, "--level", 0.5, "--install", "--json")
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["result"]
    assert [*found["profiles"]] == ["probe-0.5"]
    installed = tmp_path / "heads/profiles/probe-0.5.toml"
    assert [*installed.parent.iterdir()] == [installed]
    assert installed.read_bytes() == (tmp_path / "out/profiles/probe-0.5.toml").read_bytes()
    assert LLM(folder, heads=tmp_path / "heads", profile="probe-0.5").generate("a", Sampling(exit_policy="probe"))
    shutil.copytree(folder / "few", tmp_path / "heads/answers")
    into = [*options[:6], "--data", folder / "few.jsonl", "--answer-tokens", 9, "--out", tmp_path / "heads"]
    run("calibrate", *into, "--level", 0.5, "--install")  # where they are made already
    assert installed.read_bytes() == (tmp_path / "out/profiles/probe-0.5.toml").read_bytes()
    run("calibrate", *options[:-1], tmp_path / "a new one", "--check", installed)
    assert (tmp_path / "a new one/check-probe-0.5.json").is_file()
    capsys.readouterr()
    run("calibrate", *options, "--check", installed)
    assert "after layer  asked  left  agrees" in capsys.readouterr().out
    checked = json.loads((tmp_path / "out/check-probe-0.5.json").read_text())
    assert checked["profiles"]["probe-0.5"]["fit"] == found["profiles"]["probe-0.5"]["fit"]


def test_check_refuses_a_profile_of_other_heads(folder, tmp_path):
    (tmp_path / "p.toml").write_text('head_hash = "x"\n[[exit]]\nlayer = 1\nprobe = 0.5\n')
    with pytest.raises(ValueError, match="profile 'p' was made for heads x"):
        check_profile(
            job(folder, data="few.jsonl"), tmp_path / "p.toml", tmp_path, answers=folder / "few", report=quiet
        )
    (tmp_path / "p.toml").write_text("[[exit]]\nlayer = 1\nlogit = 0.5\nmargin = 0\nentropy = 9\n")
    with pytest.raises(ValueError, match=r"p\.toml has no exit with probe, which policy 'probe' needs"):
        check_profile(
            job(folder, data="few.jsonl"), tmp_path / "p.toml", tmp_path, answers=folder / "few", report=quiet
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--heads", "h", "--policy", "probe", "--split", "train"], "--split is for a task's questions"),
        (["--heads", "h", "--policy", "probe", "--set", "a=1", "--loss", "lost"], "--set, --loss is for a task's"),
        (["--heads", "h"], "no policy was given"),
        (["--heads", "h", "--policy", "probe", "--check", "p.toml", "--install"], "--install is for fitting profiles"),
        (
            ["--heads", "h", "--policy", "probe", "--check", "p", "--fill", "project", "--eps", "0.1"],
            "--fill, --eps is",
        ),
        (["--level", "0.9", "--eps", "0.1"], "--level is for fitting profiles"),
        (["--fill", "full", "--eps", "0.1"], "--fill is for fitting profiles"),
        (["--dtype", "bfloat16", "--device", "cuda", "--eps", "0.1"], "--dtype, --device is for fitting profiles"),
        ([], "a task's certificate needs --eps"),
        (["--eps", "0.1", "--data", "a", "--data", "b"], "one folder of data files"),
        (["--eps", "0.1", "--policy", "probe"], "give --profile, the strictest first"),
        (["--eps", "0.1", "--task", "gsm8k", "--heads", "h"], "give --profile, the strictest first"),
        (["--eps", "0.1", "--profile", "a"], "--profile needs --heads"),
        (["--eps", "0.1", "--profile", "a", "--heads", "h"], "profiles are of heads and of a policy"),
    ],
)
def test_mixtures_of_options_are_refused(tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        run("calibrate", "--model", "nano", "--out", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


def test_heads_are_calibrated_on_the_model_that_is_named(tmp_path):
    with pytest.raises(ValueError, match="--heads needs --model, the one that they were made for"):
        run("calibrate", "--heads", "h", "--policy", "probe", "--out", tmp_path / "out")
