"""MMLU: prompts as lm-eval builds them, the likeliest letter as answer, and letters read out of generated text."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from anydepth import LLM
from anydepth.eval.arms import Arm
from anydepth.eval.backends.engine import EngineBackend
from anydepth.eval.data import FOLDER
from anydepth.eval.run import run
from anydepth.eval.task import load_task
from anydepth.eval.tasks.mmlu_generate import strict, tolerant
from tests.random_nano import write_random_nano

THEIRS = Path(find_spec("lm_eval").origin).parent / "tasks" / "mmlu" / "default"
FILES = {"test": "mmlu_test.jsonl", "validation": "mmlu_val.jsonl", "dev": "mmlu_dev.jsonl"}
SUBJECTS = sorted(file.stem.removeprefix("mmlu_") for file in THEIRS.glob("mmlu_*.yaml"))


def row(split, subject, number, **changes):
    """A question of ours with the white space and signs that the public ones have."""
    return {
        "id": f"mmlu-{split}-{subject}-{number:04d}",
        "subject": subject,
        "question": f" What is {number}\n{{{{more}}}}? ",
        "choices": ["one ", f"{number}", "<b>two</b>", " none "],
        "answer": number % 4,
        "split": split,
        **changes,
    }


def write(folder, **rows):
    for split, content in rows.items():
        (folder / FILES[split]).write_text("".join(json.dumps(row) + "\n" for row in content))
    return folder


DEV = [row("dev", subject, number) for subject in SUBJECTS for number in range(5)]
TEST = [row("test", subject, number) for subject in ("anatomy", "virology") for number in range(4)]


@pytest.fixture
def own(tmp_path):
    return write(tmp_path, dev=DEV, test=TEST)


@pytest.fixture
def public():
    folder = Path(os.environ.get(FOLDER, ""))
    if not (folder / "mmlu_test.jsonl").is_file():
        pytest.skip(f"{FOLDER} names no folder with mmlu_test.jsonl")
    return folder


def lm_eval_requests(folder, subject, cache, count=4):
    """(context, continuation) of lm-eval's own task over the subject's first rows of the local files."""
    from lm_eval.api.task import ConfigurableTask

    config = yaml.safe_load((THEIRS / "_default_template_yaml").read_text())
    config |= yaml.safe_load((THEIRS / f"mmlu_{subject}.yaml").read_text())
    files = {}
    for split in ("test", "dev"):
        rows = [line for line in (folder / FILES[split]).open() if json.loads(line)["subject"] == subject]
        files[split] = str(cache / f"{subject}-{split}.jsonl")
        Path(files[split]).write_text("".join(rows[: count if split == "test" else None]))
    local = {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(cache)},
        "num_fewshot": 5,
    }
    task = ConfigurableTask(config={**{key: config[key] for key in config if key not in ("include", "tag")}, **local})
    task.build_all_requests(rank=0, world_size=1)
    return [instance.args for instance in task.instances]


@pytest.mark.parametrize("subject", ["anatomy", "virology"])
@pytest.mark.parametrize("data", ["own", "public"])
def test_prompts_and_continuations_are_lm_evals(request, data, subject, tmp_path):
    folder = request.getfixturevalue(data)
    questions = [q for q in load_task("mmlu", data=folder).questions("test") if q.group == subject][:4]
    ours = [(question.prompt, choice) for question in questions for choice in question.choices]
    assert ours == lm_eval_requests(folder, subject, tmp_path) and len(ours) == 16


@pytest.mark.parametrize(("split", "count"), [("test", 14042), ("validation", 1531), ("dev", 285)])
def test_all_public_questions_are_asked_and_their_answers_right(public, split, count):
    questions = load_task("mmlu", data=public).select(split=split)
    assert len(questions) == count and {question.group for question in questions} == set(SUBJECTS)


def test_a_question_of_dev_is_not_its_own_example(own):
    task = load_task("mmlu", data=own)
    for question in task.questions("dev"):
        asked = question.prompt.rpartition("\n\n")[2]
        assert question.prompt.count("Answer:") == 5 and question.prompt.count(asked) == 1
    assert task.few_shot == tuple(row["id"] for row in DEV)


def test_the_right_choice_scores_one_and_the_others_none(own):
    task = load_task("mmlu", data=own)
    question = task.select(limit=1)[0]
    assert question.choices == (" A", " B", " C", " D")
    scores = [task.grade(question, choice).score for choice in question.choices]
    assert scores[question.gold] == sum(scores) == 1
    assert task.grade(question, " B").prediction == {"choice": "B"}


def test_metrics_weigh_subjects_alike(own):
    def sample(group, score):
        return {"group": group, "score": score}

    task = load_task("mmlu", data=own)
    samples = [sample("anatomy", 1.0), sample("virology", 0.0), sample("virology", 0.0), sample("virology", 1.0)]
    assert task.metrics([*samples, sample("law", None)]) == {"mean_over_subjects": pytest.approx((1 + 1 / 3) / 2)}
    assert task.metrics([sample("law", None)]) == {"mean_over_subjects": None}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"test": [row("test", "anatomi", 0)]}, r"unknown subject .*'mmlu-test-anatomi-0000'.*did you mean 'anatomy'"),
        (
            {"test": [row("test", "anatomy", 0, choices=["a", "b"])]},
            "mmlu_test.jsonl: .*'mmlu-test-anatomy-0000' has 2",
        ),
        ({"test": [row("test", "anatomy", 0, answer=4)]}, "mmlu_test.jsonl: .* has 4 choices and answer 4"),
        ({"test": [row("test", "anatomy", 0, answer="A")]}, "answer 'A'; each needs 4 choices"),
        ({"test": [row("test", "anatomy", 0, question=None)]}, "mmlu_test.jsonl, line 1 has no question"),
        ({"dev": DEV[1:]}, "mmlu_dev.jsonl has no 'mmlu-dev-abstract_algebra-0000'"),
    ],
)
def test_bad_data_are_named(own, bad, message):
    write(own, **bad)
    with pytest.raises(ValueError, match=message):
        load_task("mmlu", data=own).select()


# Answered by generation

CHOICES = ("15", "Paris", "a dog", "Paris and A")


@pytest.mark.parametrize(
    ("text", "strictly", "tolerantly"),
    [
        (" B", "B", "B"),
        (" B. Paris", "B", "B"),
        ("**C**", "C", "C"),
        (" (D)", "D", "D"),
        ("(D", "D", "D"),
        (" A, not B", "A", "A"),
        (" b", None, "B"),
        ("c) a dog", None, "C"),
        (" Answer: d", None, "D"),
        ("A fine answer is B", "A", "B"),
        (" 15", None, "A"),
        ("15.", None, "A"),
        ("PARIS", None, "B"),
        (" Paris and", None, None),
        ("a dog, I", None, "C"),
        ("A dog", "A", "C"),
        ("a cat", None, None),
        ("CAB", None, None),
        ("I think D", "D", "D"),
        (" I do not", None, None),
        ("", None, None),
    ],
)
def test_what_is_read_out_of_an_answer(text, strictly, tolerantly):
    assert (strict(text), tolerant(text, CHOICES)) == (strictly, tolerantly)


def test_generation_asks_the_same_and_scores_the_strict_letter(own):
    chosen, generated = load_task("mmlu", data=own), load_task("mmlu_generate", data=own)
    pairs = list(zip(chosen.questions("test"), generated.questions("test"), strict=True))
    assert all(a.prompt == b.prompt and b.choices == () and b.gold == "ABCD"[a.gold] for a, b in pairs)
    question = next(b for _, b in pairs if b.gold == "B")
    found = generated.grade(question, "b")
    assert found.prediction == {"strict": None, "tolerant": "B"}
    assert found.score == 0 and found.scores == {"strict": 0, "tolerant": 1}
    assert generated.first_token == "policy" and generated.stop == ("</s>", "\n")
    assert generated.few_shot == chosen.few_shot and len(generated.select()) == len(TEST)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(write_random_nano(tmp_path_factory.mktemp("random")), max_batch=4)


def test_both_run_to_a_record_in_which_every_answer_has_its_policys_depths(llm, tmp_path):
    """Short questions of words that nano knows: its prompts hold no more than 160 tokens."""
    short = {"question": "How many has Ann ?", "choices": ["1", "2", "3", "4"]}
    dev = [row("dev", subject, number, **short) for subject in SUBJECTS for number in range(5)]
    data = write(tmp_path, dev=dev, test=[row("test", "anatomy", number, **short) for number in range(6)])
    arm = Arm.parse({"name": "one", "depth": 1})
    for name in ("mmlu", "mmlu_generate"):
        task = load_task(name, data=data)
        backend = EngineBackend(llm)
        record = run(arm, task=task, backend=backend, out=tmp_path / name, questions=task.select())
        assert record.aggregates["n"] == 6 and record.aggregates["unscored"] == 0
        assert record.aggregates["metrics"] == {"mean_over_subjects": record.aggregates["accuracy"]}
        depths = [sample["choices"] if name == "mmlu" else [sample] for sample in record.samples]
        assert {depth for parts in depths for part in parts for depth in part["depths"]} == {1}
        assert {len(parts) for parts in depths} == ({4} if name == "mmlu" else {1})
