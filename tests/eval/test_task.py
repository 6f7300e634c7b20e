"""Tasks: found by name or path, their graders checked on the right answers, subsets fixed by hash."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

import pytest

from anydepth.eval.task import Grade, Question, Task, known_tasks, load_task, ranked
from anydepth.models.nano import questions as nano

SUMS = """
from anydepth.eval.task import Grade, Question, Task

class Sums(Task):
    max_tokens = 8

    def questions(self, split):
        return [Question(id=f"{a}+{b}", prompt=f"{a} + {b} =", gold=str(a + b)) for a in range(9) for b in range(9)]

    def grade(self, question, text):
        words = text.split()
        return Grade(prediction={"first": words[0] if words else None}, score=float(words[:1] == [question.gold]))
"""


@pytest.fixture
def sums(tmp_path):
    path = tmp_path / "sums.py"
    path.write_text(SUMS)
    return path


def test_a_task_is_one_file(sums):
    task = load_task(str(sums))
    assert task.name == "sums" and len(task.select()) == 81
    assert task.grade(task.select(limit=1)[0], "").prediction == {"first": None}


def test_the_hash_covers_the_file_and_all_that_belongs_to_the_questions(sums):
    questions = load_task(sums).select(limit=3)
    before = load_task(sums).hash(questions)
    assert before == load_task(sums).hash(questions) != load_task(sums).hash(questions[:2])
    assert before != load_task(sums).hash([replace(questions[0], gold="12"), *questions[1:]])
    sums.write_text(SUMS + "\n")
    assert before != load_task(sums).hash(questions)


def test_questions_can_be_named(sums):
    task = load_task(sums)
    assert [q.id for q in task.select(ids=["3+4", "1+1"])] == ["3+4", "1+1"]


def test_subset_is_the_first_n_by_hash(sums):
    task = load_task(sums)
    some = [q.id for q in task.select(limit=10)]
    assert (
        some == [q.id for q in task.select()][:10] == ranked([q.id for q in task.questions("test")], task="sums")[:10]
    )
    assert some[0] == min(
        (q.id for q in task.select()), key=lambda id: hashlib.sha256(f"sums:{id}".encode()).hexdigest()
    )


def test_a_wrong_grader_is_found_when_questions_are_loaded(sums):
    sums.write_text(SUMS.replace("words[:1] == [question.gold]", 'question.gold == "3"'))
    with pytest.raises(ValueError, match=r"task sums: the right answer of question '.*scores 0"):
        load_task(sums).select(limit=1)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"limit": 82}, "82 questions were asked for; split test of task sums has 81"),
        ({"limit": 0}, "0 questions"),
        ({"split": "tst"}, "unknown split of task sums 'tst'; did you mean 'test'"),
        ({"ids": ["1+1", "1+11"]}, r"unknown question of task sums, split test: '1\+11'; did you mean"),
        ({"ids": ["1+1", "1+1"]}, "2 ids were given, 1 different"),
        ({"ids": ["1+1"], "limit": 1}, "both a limit and ids"),
    ],
)
def test_refuses_what_it_has_not(sums, ask, message):
    with pytest.raises(ValueError, match=message):
        load_task(sums).select(**ask)


def test_refuses_doubled_ids(sums):
    sums.write_text(SUMS.replace('f"{a}+{b}"', 'f"{a + b}"'))
    with pytest.raises(ValueError, match="64 ids come more than once"):
        load_task(sums).select()


def test_refuses_ids_that_are_no_strings(sums):
    sums.write_text(SUMS.replace('id=f"{a}+{b}"', "id=9 * a + b"))
    with pytest.raises(ValueError, match="the id 0 is no string"):
        load_task(sums).select()


def test_unknown_names_and_files(tmp_path, sums):
    with pytest.raises(ValueError, match="unknown task 'nan'; did you mean 'nano'"):
        load_task("nan")
    with pytest.raises(ValueError, match="no task file"):
        load_task("sums.py")
    sums.write_text(SUMS + SUMS.replace("class Sums", "class More"))
    with pytest.raises(ValueError, match="2 subclasses"):
        load_task(sums)


@pytest.mark.parametrize("grade", [{"score": None}, {"score": 1.0, "unscored": "no"}, {"score": 1.5}])
def test_a_grade_is_a_score_or_a_reason(grade):
    with pytest.raises(ValueError, match="allowed"):
        Grade(prediction={}, **grade)


@pytest.mark.parametrize("name", known_tasks())
def test_built_in_tasks_grade_their_right_answers_as_right(name):
    if name != "nano" and not os.environ.get("ANYDEPTH_DATA"):
        pytest.skip("ANYDEPTH_DATA names no data folder")
    task = load_task(name)
    assert isinstance(task, Task) and task.select()
    assert all(isinstance(q, Question) and q.prompt for q in task.select(limit=100))


def test_nano_counts_only_the_answer_after_the_mark():
    task = load_task("nano")
    question = next(q for q in task.select() if q.data.kind == "single")
    assert task.grade(question, f"nonsense #### {question.gold}").score == 1
    assert task.grade(question, f"#### {question.gold} .").score == 0
    silent = task.grade(question, question.data.answer.replace("####", ""))
    assert silent.score == 0 and silent.prediction == {"strict": None}


def test_nano_marks_the_numbers_that_must_be_worked_out():
    task = load_task("nano")
    context = (
        nano.Statement(person="Ann", value=5, depth=1),
        nano.Statement(person="Bob", value=8, depth=2, source="Ann", amount=3),
    )

    def levels(question, words):
        return task.levels(Question(id="q", prompt=question.prompt, data=question), words.split())

    pair = nano.ask_pair(context, "Bob", "Ann")
    assert levels(pair, "Bob has 8 . Ann has 5 . #### 13 <eos>") == [0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0]
    assert levels(pair, "Bob has 7 . Ann has 5 . #### 12") == [0, 0, 2, 0, 0, 0, 1, 0, 0, 0]
    assert levels(pair, "Bob has 8 . #### 8") is None
    why = levels(nano.ask_why(context, "Bob"), "Bob has 8 since Bob has 3 more than Ann . Ann has 5 . #### 8 <eos>")
    assert why is not None and [level for level in why if level] == [2] and why.index(2) == 2
