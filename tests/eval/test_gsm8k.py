"""GSM8K: what is read out of an answer, and that prompt and strict score are lm-eval's own."""

from __future__ import annotations

import json
import os
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from anydepth.eval.data import FOLDER
from anydepth.eval.task import Question, load_task

COT = Path(find_spec("lm_eval").origin).parent / "tasks" / "gsm8k" / "gsm8k-cot.yaml"
SAID = "The answer is "
# What stands at the end of an answer; read strictly and tolerantly, alone and after "The answer is ".
TABLE = [
    ("18", (None, "18"), ("1", "18")),
    ("$18.", (None, "18"), (None, "18")),
    ("**18**.", (None, "18"), (None, "18")),
    ("18.0", (None, "18"), ("18.", "18")),
    ("18.", (None, "18"), ("18", "18")),
    ("1,800", (None, "1800"), ("1,80", "1800")),
    ("1,800.", (None, "1800"), ("1,800", "1800")),
    ("-5", (None, "-5"), (None, "-5")),
    ("-5.", (None, "-5"), ("-5", "-5")),
    (".5", (None, "0.5"), (".", "0.5")),
    ("5, so there.", (None, "5"), ("5,", "5")),
    ("18. Q: 3 apples", (None, "18"), ("18.", "18")),
    ("#### 18", (None, "18"), (None, "18")),
    ("many.", (None, None), (None, None)),
    ("", (None, None), (None, None)),
    ("not 3. It is 4.", (None, "4"), (None, "4")),
    ("**18** of 20.", (None, "20"), (None, "18")),
    ("2-5", (None, "5"), ("2", "2")),
    ("8 - 3 = 5", (None, "5"), ("8", "8")),
]
OWN = [
    {"id": "a", "question": "Ann has 3 pears\nand eats {{one}}. How many? ", "answer": "3-1=2\n#### 2", "final": "2"},
    {"id": "b", "question": " Wie viele Äpfel kosten $1,000?", "answer": "#### 1,000", "final": "1000"},
]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A data folder with two questions of ours."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "gsm8k_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in OWN))
    return folder


@pytest.fixture(scope="module")
def public():
    folder = Path(os.environ.get(FOLDER, ""))
    if not (folder / "gsm8k_test.jsonl").is_file():
        pytest.skip(f"{FOLDER} names no folder with gsm8k_test.jsonl")
    return folder


def lm_eval_task(folder, cache):
    """lm-eval's gsm8k_cot with three shots over the first rows of the local file."""
    from lm_eval.api.task import ConfigurableTask

    file = cache / "rows.jsonl"
    file.write_text("\n".join((folder / "gsm8k_test.jsonl").read_text().split("\n")[:5]))
    local = {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(cache)},
        "num_fewshot": 3,
    }
    task = ConfigurableTask(config={**yaml.safe_load(COT.read_text()), **local})
    task.build_all_requests(rank=0, world_size=1)
    return task


@pytest.fixture(scope="module")
def theirs(own, tmp_path_factory):
    return lm_eval_task(own, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def oracle(theirs):
    """What lm-eval's strict match extracts from a text, and the score that it gives."""

    def judge(text, gold):
        for instance in theirs.instances:
            instance.resps = [text]
        theirs.apply_filters()
        found = theirs.instances[0].filtered_resps["strict-match"]
        score = theirs.process_results({"question": "", "answer": f"#### {gold}"}, [found])["exact_match"]
        return None if found == "[invalid]" else found, score

    return judge


@pytest.fixture(scope="module")
def task(own):
    return load_task("gsm8k", data=own)


def grade(task, text, gold="18"):
    return task.grade(Question(id="q", prompt="", gold=gold), text)


@pytest.mark.parametrize(("end", "alone", "announced"), TABLE)
def test_what_is_read_out_of_an_answer(task, oracle, end, alone, announced):
    for text, (strictly, tolerantly) in ((end, alone), (SAID + end, announced)):
        assert grade(task, text).prediction == {"strict": strictly, "tolerant": tolerantly}
        assert oracle(text, "18")[0] == strictly


@pytest.mark.parametrize(
    ("text", "gold", "strictly", "tolerantly"),
    [
        ("The answer is 18.", "18", 1, 1),
        ("The answer is 18", "18", 0, 1),
        ("The answer is 18", "1", 1, 0),
        ("The answer is $18.", "18", 0, 1),
        ("The answer is 18.0", "18", 1, 1),
        ("The answer is 18.50.", "18.5", 0, 1),
        ("The answer is 1,800.", "1800", 1, 1),
        ("The answer is 1,800.", "1,800", 1, 1),
        ("The answer is -5.", "-5", 1, 1),
        ("the answer is 18.", "18", 0, 1),
        ("The answer is 3. No: the answer is 18.", "18", 0, 1),
        ("It is 3 or 18", "18", 0, 1),
        ("", "18", 0, 0),
    ],
)
def test_strict_is_scored_and_tolerant_stands_beside_it(task, oracle, text, gold, strictly, tolerantly):
    found = grade(task, text, gold)
    assert found.score == oracle(text, gold)[1] == strictly
    assert found.scores == {"strict": strictly, "tolerant": tolerantly}


def test_strict_is_lm_evals_on_texts_of_all_kinds(task, oracle):
    pieces = [
        SAID,
        SAID.lower(),
        "18",
        "1,800",
        "-",
        "$",
        ".",
        ",",
        " ",
        "\n",
        "**",
        "#### ",
        "5",
        "0",
        "Q:",
        "x",
        "=",
        "(",
    ]
    draw = random.Random(7)
    for _ in range(200):
        text = "".join(draw.choice((SAID, draw.choice(pieces))) for _ in range(draw.randrange(1, 9)))
        gold = draw.choice(["18", "5", "1800", "1"])
        found = grade(task, text, gold)
        assert (found.prediction["strict"], found.score) == oracle(text, gold), text


def test_prompts_and_stop_strings_are_lm_evals(task, theirs):
    assert [request.args[0] for request in theirs.instances] == [question.prompt for question in task.questions("test")]
    assert theirs.instances[0].args[1]["until"] == list(task.stop) and len(theirs.instances) == len(OWN)
    assert task.few_shot == ("gsm8k_cot:0", "gsm8k_cot:1", "gsm8k_cot:2") and task.max_tokens == 256


def test_prompts_of_the_public_questions_are_lm_evals(public, tmp_path):
    prompts = [request.args[0] for request in lm_eval_task(public, tmp_path).instances]
    questions = list(load_task("gsm8k", data=public).questions("test"))
    assert prompts == [question.prompt for question in questions[:5]] and len(questions) == 1319


@pytest.mark.parametrize(("split", "count"), [("test", 1319), ("train", 7473)])
def test_every_right_answer_scores_one(public, split, count):
    """Those of the task are checked when it is loaded; a worked solution is read rightly by the tolerant extraction."""
    task = load_task("gsm8k", data=public)
    assert len(task.select(split=split)) == count
    for row in task.rows(f"gsm8k_{split}.jsonl", ("answer", "final")):
        assert grade(task, row["answer"], row["final"]).scores["tolerant"] == 1, row["answer"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "c", "question": "Two?"', "is not JSON"),
        ('{"id": "c", "question": "Two?", "answer": "#### 2"}', "has no final"),
        ('{"id": "c", "question": "Two?", "answer": "", "final": "2"}', "has no answer"),
        ('["Two?"]', "is a list"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    file = tmp_path / "gsm8k_test.jsonl"
    file.write_text("\n".join([*map(json.dumps, OWN), line]))
    with pytest.raises(ValueError, match=rf"{file}, line 3 {message}"):
        load_task("gsm8k", data=tmp_path).select()


def test_a_missing_data_folder_or_file_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(ValueError, match=rf"no data folder is named; set {FOLDER}"):
        load_task("gsm8k").select()
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(ValueError, match=rf"there is no gsm8k_train.jsonl in {tmp_path}"):
        load_task("gsm8k").select(split="train")
    with pytest.raises(ValueError, match="split"):
        load_task("gsm8k").select(split="dev")
