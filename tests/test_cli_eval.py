"""Commands about results refuse what they would have to ignore, before they run anything."""

from __future__ import annotations

import json

import pytest

from anydepth.cli import app, main
from anydepth.cli_eval import _arm

STUDY = """[study]
task = "nano"
model = "nano"
[[arm]]
name = "never"
"""


def run(*arguments):
    app([str(argument) for argument in arguments], standalone_mode=False)


@pytest.mark.parametrize(
    ("command", "beside", "named"),
    [
        ("eval", ("--limit", 5), "--limit"),
        ("eval", ("--task", "gsm8k", "--seed", 0), "--task, --seed"),
        ("eval", ("--arm", "depth=2"), "--arm"),
        ("bench", ("--arm", "depth=2", "-m", "nano"), "--arm, --model"),
        ("bench", ("-t", "nano"), "--task"),
    ],
)
def test_what_a_study_file_decides_cannot_be_given_beside_it(command, beside, named, tmp_path):
    (tmp_path / "arms.toml").write_text(STUDY)
    with pytest.raises(ValueError, match=f"^{named} stands beside the study's file"):
        run(command, "--out", tmp_path / "out", "--study", tmp_path / "arms.toml", *beside)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [("--out", "out"), ("--freeze", "frozen", "--task", "alpacaeval")])
def test_outputs_for_a_judge_are_of_alpacaeval_and_of_a_run(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--outputs is for answers to alpacaeval"):
        run("eval", *arguments, "--outputs", "judge")
    assert not any(tmp_path.iterdir())


def test_generate_takes_signals(capsys):
    question = "Ann has 5 . Bob has 3 more than Ann . How many has Bob ?"
    said = []
    for late in ((), ("--signals", "exact", "--lateness", 2), ("--signals", "delayed")):
        run("generate", question, "--exit-threshold", 0.5, "--threads", 1, "--json", *late)
        said.append(json.loads(capsys.readouterr().out.splitlines()[-1])["result"]["outputs"][0])
    sync, exact, delayed = said
    assert exact["token_ids"] == sync["token_ids"] and exact["depths"] == sync["depths"] != delayed["depths"]
    with pytest.raises(ValueError, match="signals is 'exakt'; allowed: 'sync', 'delayed', 'exact', 'resident'"):
        run("generate", question, "--signals", "exakt")
    with pytest.raises(ValueError, match="lateness is 9; allowed"):
        run("generate", question, "--signals", "exact", "--lateness", 9)


def test_an_interrupted_command_says_that_it_goes_on(monkeypatch, capsys, tmp_path):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("anydepth.eval.study.run_study", interrupted)
    monkeypatch.setattr("sys.argv", ["anydepth", "eval", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 130
    said = "anydepth: interrupted; what writes into a folder goes on from there when it is run again\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("heads=some/where/mine/,policy=probe,profile=p", "heads-mine_probe_profile-p"),
        ("exit_threshold=0.5,min_depth=2", "gate-0.5_min_depth-2"),
        ("certificate=some/where.json", "certificate-some-where.json"),
        ("name=own,heads=some/where", "own"),
    ],
)
def test_an_arm_without_a_name_is_called_after_its_fields(text, name):
    assert _arm(text)["name"] == name and _arm(text).get("heads") in (None, "some/where/mine/", "some/where")
