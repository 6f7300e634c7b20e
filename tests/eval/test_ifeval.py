"""IFEval: every rule both ways, sentences without learned data, and the same grades on every machine."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from anydepth.eval.task import Question, load_task
from anydepth.eval.tasks.ifeval import count_sentences, words

ENGLISH = "the weather in the north is cold and the people there wear warm coats all the year round"
FRENCH = "Le temps est froid dans le nord et les gens portent des manteaux chauds toute l'année."
# An instruction, its arguments, an answer that follows it and one that does not.
CHECKS = [
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "A Dog met a cat.", "A dog met a cow."),
    ("keywords:frequency", {"keyword": "sea", "frequency": 3, "relation": "at least"}, "Sea, sea, sea!", "Sea, sea!"),
    ("keywords:frequency", {"keyword": "sea", "frequency": 2, "relation": "less than"}, "A sea.", "Sea to sea."),
    ("keywords:forbidden_words", {"forbidden_words": ["bad"]}, "A badge.", "A Bad badge."),
    (
        "keywords:letter_frequency",
        {"letter": "Q", "let_frequency": 2, "let_relation": "at least"},
        "Quit, quick.",
        "Quit now.",
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 2, "let_relation": "at least"},
        "#one #two",
        "one two with no such sign, but with every letter of sphinx of black quartz judge my vow twice, black quartz",
    ),
    ("language:response_language", {"language": "fr"}, FRENCH, ENGLISH),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}, "One. Two. Three", "A. Two."),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        "Dr. Lee has 3.5 pears, e.g. ripe ones.",
        "Dr. Lee left. He is back.",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One\n***\nTwo", "One\n\nTwo"),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": "at least"},
        "one two-three four",
        "one two three",
    ),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": "less than"},
        "one, two, three",
        "one two-three 4",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        "First this.\n\n'then, that.",
        "Then this.\n\nNow that.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [street]", "[name], (street)"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. Write!", "Bye. PS: Write!"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S. Write!", "Bye.\nP.S. Write!"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n- two\n* three"),
    ("detectable_format:constrained_response", {}, "Well. My answer is no.", "My answer is: no."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* **two**", "*one* two"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\nOne\nSECTION 2\nTwo",
        "SECTION 1\nOne\nSection 2\nTwo",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', '```json\n{"a": [1}\n```'),
    ("detectable_format:title", {}, "<<A title>>\nText", "<<>>\nText"),
    ("combination:two_responses", {}, "Yes.\n******\nNo.", "Yes.\n******\nYes."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi."}, " say HI. Hi!", "You want: Say hi. Hi!"),
    ("startend:end_checker", {"end_phrase": "The end."}, 'So it was. "the END."', "The end. Or not."),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "It is a BIG, WELL-KNOWN dog.",
        "It is a BIG, Well-Known dog.",
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        "Is it a BIG dog?",
        "It is. I SAW it.",
    ),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH.capitalize()),
    ("change_case:english_lowercase", {}, ENGLISH, FRENCH.lower()),
    ("punctuation:no_comma", {}, "No; none.", "No, none."),
    ("startend:quotation", {}, ' "All of it." ', '"All" of it.'),
]


@pytest.fixture(scope="module")
def task():
    return load_task("ifeval")


@pytest.fixture(scope="module")
def public():
    """The folder with the 541 prompts."""
    folder = Path(os.environ.get("ANYDEPTH_DATA", ""))
    if not (folder / "ifeval.jsonl").is_file():
        pytest.skip("ANYDEPTH_DATA names no folder with ifeval.jsonl")
    return folder


def row(*instructions, id="q"):
    ids, arguments = zip(*instructions, strict=True)
    return {"id": id, "key": 1, "prompt": "Do it.", "instruction_id_list": list(ids), "kwargs": list(arguments)}


def grade(task, text, *instructions):
    return task.grade(Question(id="q", prompt="Do it.", data=row(*instructions)), text)


@pytest.mark.parametrize(("id", "arguments", "follows", "fails"), CHECKS)
def test_each_rule_tells_who_follows_it(task, id, arguments, follows, fails):
    right, wrong = (grade(task, text, (id, arguments)) for text in (follows, fails))
    assert right.prediction == {"strict": "1", "loose": "1"} and right.score == 1
    assert wrong.prediction["strict"] == "0" and wrong.score == 0


def test_the_table_has_all_of_lm_evals_rules(task):
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    assert len(INSTRUCTION_DICT) == 25 and {id for id, *_ in CHECKS} == INSTRUCTION_DICT.keys()


def test_a_prompt_is_followed_when_all_its_instructions_are(task):
    commas, title = ("punctuation:no_comma", {}), ("detectable_format:title", {})
    found = grade(task, "<<A, B>>", commas, title)
    assert found.prediction == {"strict": "01", "loose": "01"} and found.scores == {"strict": 0, "loose": 0}
    assert grade(task, "<<A>>", commas, title).score == 1


def test_loose_forgives_a_first_line_a_last_line_and_asterisks(task):
    quoted = ("startend:quotation", {})
    for text in ('Sure:\n"Yes."', '"Yes."\nBye', '*"Yes."*', 'Sure:\n**"Yes."**\nBye'):
        found = grade(task, text, quoted)
        assert found.prediction == {"strict": "0", "loose": "1"} and found.score == 0 and found.scores["loose"] == 1
    assert grade(task, 'Well,\nsure:\n"Yes."', quoted).scores["loose"] == 0


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_an_answer_without_text_is_wrong_not_unscored(task, text):
    found = grade(task, text, ("punctuation:no_comma", {}), ("startend:quotation", {}))
    assert found.score == 0 and found.unscored is None and found.prediction == {"strict": "00", "loose": "00"}


def test_what_lm_eval_cannot_check_is_unscored(task):
    assert "recursion" in grade(task, "[" * 100_000, ("detectable_format:json_format", {})).unscored


def test_a_text_in_no_language_counts_as_the_right_one_in_silence(task, caplog):
    assert grade(task, "1 2 3", ("language:response_language", {"language": "fr"})).score == 1
    assert not caplog.records


def test_metrics_count_instructions(task, tmp_path):
    commas, title = ("punctuation:no_comma", {}), ("detectable_format:title", {})
    rows = [row(commas, title, id="a"), row(commas, id="b"), row(title, id="c")]
    (tmp_path / "ifeval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task("ifeval", data=tmp_path)
    texts = {"a": "<<A, B>>", "b": "Hello:\nall is well", "c": "no title"}
    grades = {question.id: task.grade(question, texts[question.id]) for question in task.select()}
    samples = [{"id": id, "score": grade.score, "prediction": grade.prediction} for id, grade in grades.items()]
    left_out = {"id": "b", "score": None, "prediction": {}}
    assert task.metrics([*samples, left_out]) == {
        **{f"instruction_{name}": 0.5 for name in ("strict", "loose")},
        **{f"instruction_{name} punctuation:no_comma": 0.5 for name in ("strict", "loose")},
        **{f"instruction_{name} detectable_format:title": 0.5 for name in ("strict", "loose")},
    }
    assert task.metrics([left_out]) == {"instruction_strict": None, "instruction_loose": None}
    assert [question.group for question in task.questions("test")] == [2, 1, 1]


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        (("punctuation:no_coma", {}), "no_coma"),
        (("length_constraints:number_words", {"num_words": 3}), "an argument is missing"),
        (("keywords:letter_frequency", {"let_frequency": 3, "let_relation": "at least"}), "letter"),
        (("startend:quotation", {"quote": '"'}), "quote"),
        (("length_constraints:number_words", {"num_words": 3, "relation": "about"}), "about"),
        (("startend:quotation", None), "items"),
    ],
)
def test_instructions_that_cannot_be_checked_are_refused_at_load(tmp_path, instruction, message):
    """lm-eval would draw what is missing at random."""
    (tmp_path / "ifeval.jsonl").write_text(json.dumps(row(instruction, id="odd")) + "\n")
    with pytest.raises(ValueError, match=rf"ifeval: question 'odd' has instructions .*{message}"):
        load_task("ifeval", data=tmp_path).select()


SENTENCES = [
    ("", 0),
    ("One sentence without an end", 1),
    ("One sentence. Another one", 2),
    ("Dr. Lee met Mr. Fox and Mrs. Hare, i.e. all of them. They ate.", 2),
    ("We like fruit, e.g. apples, pears, etc. It is cheap.", 2),
    ("He lives in the U.S. with his dog. The U.S. Army moved. He left the U.S. He is in the U.K. now.", 4),
    ("It costs 3.50 dollars. That is 0.75 more than at 9 a.m. on Monday.", 2),
    ("Well... maybe. I think... yes.", 2),
    ("She waited... Then she left.", 2),
    ('"Come in." He came in. "Sit down!" She sat.', 4),
    ("“Is it late?” She looked. (It was.) He slept.", 4),
    ("What?! No way!!! Are you sure? Yes", 4),
    ("J. K. Rowling wrote it. George R. R. Martin did not.", 2),
    ("See No. 5 of Fig. 2. I say no. We go.", 3),
    ("A line\nthat goes on. A new\n\nparagraph ends. Done.", 3),
    ("Visit www.example.com for version 2.0.1 of it. Or don't.", 2),
]


@pytest.mark.parametrize(("text", "count"), SENTENCES)
def test_sentences_are_those_a_reader_counts(text, count):
    assert count_sentences(text) == count


def test_words_are_split_sentence_by_sentence():
    text = "It's BIG. Dr. Lee (of NASA) said: WELL-DONE!"
    want = ["It", "'s", "BIG", ".", "Dr.", "Lee", "(", "of", "NASA", ")", "said", ":", "WELL-DONE", "!"]
    assert words(text) == want


def test_grading_leaves_everything_as_it_was(task):
    import langdetect
    import nltk
    from lm_eval.tasks.ifeval import instructions, instructions_registry, instructions_util

    def state():
        registry = instructions_registry.INSTRUCTION_DICT
        held = [instructions_util.nltk, instructions_util.random, instructions.random, nltk.data.find]
        return [*held, *registry.values(), instructions_util.count_sentences, instructions.logger.disabled]

    before, seed, drawn = state(), langdetect.DetectorFactory.seed, random.getstate()
    for id, arguments, follows, _ in CHECKS:
        grade(task, follows, (id, arguments))
    with pytest.raises(ValueError, match="an argument is missing"):
        grade(task, "x", ("startend:end_checker", {}))
    assert state() == before and langdetect.DetectorFactory.seed == seed and random.getstate() == drawn
    assert instructions_util.nltk is nltk and instructions.random is random and seed is None
    assert {check.__module__ for check in instructions_registry.INSTRUCTION_DICT.values()} == {instructions.__name__}


LANGUAGES = [("language:response_language", {"language": name}) for name in ("en", "it", "fi")]
UNSURE = ("hotel hospital", "total hotel", "total normal", "menu total")


def test_a_language_that_is_hard_to_tell_is_always_the_same_one(task):
    """Without a seed, each of these texts is another language every third time."""
    for text in UNSURE:
        assert len({grade(task, text, *LANGUAGES).prediction["loose"] for _ in range(5)}) == 1


OFFLINE = """
import json, socket, sys, urllib.request

def refuse(*_, **__):
    raise AssertionError("something asked for the network")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = urllib.request.urlopen = refuse
from anydepth.eval.task import Question, load_task
task = load_task("ifeval", data=sys.argv[1])
questions = task.select()
text = "Dr. Lee... Maybe! The END. <<A title>>, die Katze and the casa. " * 3
grades = [task.grade(question, text) for question in questions]
grades += [task.grade(Question(id="q", prompt="", data=json.loads(sys.argv[2])), text) for text in sys.argv[3:]]
print(json.dumps([[grade.prediction, grade.score] for grade in grades]))
"""


def test_all_prompts_are_graded_offline_and_alike_in_two_processes(public, tmp_path):
    """One has no NLTK data, the other broken ones, which nothing may read."""
    broken = tmp_path / "nltk" / "tokenizers" / "punkt_tab" / "english"
    broken.mkdir(parents=True)
    (broken / "abbrev_types.txt").write_text("and\nthe\n")
    runs = []
    for number, data in enumerate(["", str(tmp_path / "nltk")]):
        home = tmp_path / f"home{number}"
        home.mkdir()
        env = {"HOME": str(home), "PATH": os.environ["PATH"], "NLTK_DATA": data, "PYTHONHASHSEED": str(number)}
        command = [sys.executable, "-c", OFFLINE, str(public), json.dumps(row(*LANGUAGES)), *UNSURE]
        runs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    (first, errors), (second, _) = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    assert first == second and len(json.loads(first)) == 541 + len(UNSURE)
    assert {tuple(grade["strict"]) for grade, _ in json.loads(first)} > {("0",), ("1",)}
    assert not list(tmp_path.rglob("home*/nltk_data"))


def test_the_public_prompts_are_messages_of_one_user(public):
    questions = load_task("ifeval", data=public).select()
    assert len(questions) == 541 and sum(question.group for question in questions) == 834
    assert all(question.prompt == ({"role": "user", "content": question.data["prompt"]},) for question in questions)
