"""AlpacaEval: answers without a judge, written in the format that its judge reads."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from anydepth import LLM
from anydepth.eval.alpaca_outputs import write_outputs
from anydepth.eval.arms import Arm
from anydepth.eval.backends.engine import EngineBackend
from anydepth.eval.data import FOLDER
from anydepth.eval.run import run
from anydepth.eval.task import load_task
from tests.random_nano import write_random_nano

ROWS = [
    {
        "id": f"q{number}",
        "dataset": "oasst" if number % 2 else "koala",
        "instruction": f"How many has Ann ? Über {number}",
    }
    for number in range(6)
]
ARM = {"name": "B1", "exit_threshold": 0.5, "max_tokens": 8}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(write_random_nano(tmp_path_factory.mktemp("random") / "tiny"), max_batch=4)


def write(folder, rows=ROWS):
    (folder / "alpacaeval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_task("alpacaeval", data=folder)


@pytest.fixture
def task(tmp_path):
    return write(tmp_path)


@pytest.fixture
def answered(llm, task, tmp_path):
    """A Record of all questions, under an arm with the given changes."""

    def answer(limit=None, **changes):
        arm, questions = Arm.parse({**ARM, **changes}), task.select(limit=limit)
        return run(arm, task=task, backend=EngineBackend(llm), out=tmp_path / "record", questions=questions)

    return answer


def test_answers_are_unscored_for_want_of_a_judge(answered):
    record = answered()
    assert {sample["unscored"] for sample in record.samples} == {"needs a judge"}
    assert record.aggregates["unscored"] == 6 and record.aggregates["accuracy"] is None
    assert record.aggregates["unparseable"] == 0 and record.aggregates["by_group"].keys() == {"koala", "oasst"}


def test_outputs_are_what_the_judge_reads_in_the_datas_order(answered, task, tmp_path):
    record = answered()
    texts = {sample["id"]: sample["text"] for sample in record.samples}
    path = write_outputs(record, task, tmp_path / "outputs.json")
    assert json.loads(path.read_text(encoding="utf-8")) == [
        {
            "dataset": row["dataset"],
            "instruction": row["instruction"],
            "output": texts[row["id"]],
            "generator": f"{Path(record.settings_used['model']).name}-B1",
        }
        for row in ROWS
    ]
    assert [sample["id"] for sample in record.samples] != [row["id"] for row in ROWS], "asked in hash order"
    named = json.loads(write_outputs(record, task, path, generator="mine").read_text())
    assert {entry["generator"] for entry in named} == {"mine"}


def test_a_subset_has_its_own_outputs_only(answered, task, tmp_path):
    record = answered(limit=3)
    entries = json.loads(write_outputs(record, task, tmp_path / "outputs.json").read_text())
    asked = {sample["id"] for sample in record.samples}
    assert [entry["instruction"] for entry in entries] == [row["instruction"] for row in ROWS if row["id"] in asked]


def test_what_the_judge_could_not_use_is_refused(answered, task, tmp_path):
    record, path = answered(), tmp_path / "outputs.json"
    failed = {**record.samples[0], "finish_reason": "error", "unscored": "the prompt has 900 tokens"}
    for changed, message in (
        (replace(record, status="running"), "is running; finish the run"),
        (replace(record, settings_used={**record.settings_used, "task": "gsm8k"}), "answers the task gsm8k"),
        (replace(record, samples=(*record.samples[1:], failed)), "no answer to 1 questions .*900 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            write_outputs(changed, task, path)
    with pytest.raises(ValueError, match=r"answers 'q0', which the data of alpacaeval do not have"):
        write_outputs(record, write(tmp_path, ROWS[1:]), path)
    assert not path.exists()


def test_several_answers_a_question_are_refused(answered, task, tmp_path):
    with pytest.raises(ValueError, match="several answers a question"):
        write_outputs(answered(n=2, temperature=1.0), task, tmp_path / "outputs.json")


def test_all_public_instructions_are_messages_of_one_user():
    folder = Path(os.environ.get(FOLDER, ""))
    if not (folder / "alpacaeval.jsonl").is_file():
        pytest.skip(f"{FOLDER} names no folder with alpacaeval.jsonl")
    questions = load_task("alpacaeval", data=folder).select()
    assert len(questions) == 805 and len({question.group for question in questions}) == 5
    assert all(question.prompt == ({"role": "user", "content": question.data},) for question in questions)
    assert all(question.gold is None for question in questions)
