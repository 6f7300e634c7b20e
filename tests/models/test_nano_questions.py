"""nano's questions: true, disjoint, balanced, and written in its vocabulary."""

from __future__ import annotations

import re
from functools import cache

import pytest
from tokenizers import Tokenizer

from anydepth.models.nano import questions as q
from anydepth.models.nano.tokenizer import IDS, VOCABULARY, encode, write_tokenizer


@cache
def drawn(split: q.Split, n: int = 2160) -> list[q.Question]:
    return q.questions(split, n=n)


def context_of(question: q.Question) -> str:
    return question.prompt[: question.prompt.index("How ")].strip()


def evaluate(context: str) -> dict[str, tuple[int, int]]:
    """Person -> (value, hop depth), read from the text alone."""
    known: dict[str, tuple[int, int]] = {}
    for sentence in context.rstrip(" .").split(" . "):
        person, rest = sentence.split(" has ")
        if rest.isdigit():
            known[person] = int(rest), 1
        elif match := re.fullmatch(r"(\d+) (more|fewer) than (\w+)", rest):
            value, depth = known[match[3]]
            known[person] = value + int(match[1]) * (1 if match[2] == "more" else -1), depth + 1
        else:
            match = re.fullmatch(r"as many as (\w+)", rest)
            assert match, rest
            value, depth = known[match[1]]
            known[person] = value, depth + 1
    return known


@pytest.mark.parametrize("split", ["validation", "calibration", "test"])
def test_balanced_and_large(split: q.Split) -> None:
    asked = drawn(split)
    counts: dict[tuple[str, int], int] = {}
    for question in asked:
        counts[question.kind, question.difficulty] = counts.get((question.kind, question.difficulty), 0) + 1
    assert len(asked) >= 2000
    assert counts == {(kind, difficulty): 120 for kind in q.KINDS for difficulty in range(1, 7)}
    assert len({question.id for question in asked}) == len(asked)


def test_disjoint_by_context() -> None:
    contexts = {split: {context_of(x) for x in drawn(split)} for split in ("validation", "calibration", "test")}
    contexts["train"] = {context_of(x) for x in drawn("train", 600)}
    assert len(contexts["test"]) == 2160
    for split, texts in contexts.items():
        assert {q.split_of(text) for text in texts} == {split}
        assert all(texts.isdisjoint(other) for name, other in contexts.items() if name != split)


def test_answers_and_hops_are_true() -> None:
    for question in drawn("test"):
        known = evaluate(context_of(question))
        assert all(0 <= value <= q.LARGEST for value, _ in known.values())
        words = question.answer.split()
        persons = re.findall(r"[A-Z]\w+", question.prompt[question.prompt.index("How ") + 4 :])
        assert q.final_answer(question.answer) == str(sum(known[person][0] for person in persons))
        assert question.difficulty == max(known[person][1] for person in persons)
        for index, hop in enumerate(question.hops):
            if hop:
                assert (int(words[index]), hop) == known[words[index - 2]]
        for claim in re.findall(r"since (.*?) \.", question.answer):
            assert f"{claim} ." in question.prompt
        if question.kind == "why":
            assert sorted(filter(None, question.hops), reverse=True) == list(range(question.difficulty, 0, -1))


def test_gold_scores_one_and_wrong_scores_zero() -> None:
    for question in drawn("test", 180):
        assert q.grade(question.answer, question)
        assert not q.grade(question.answer + " 7", question)
        assert not q.grade(question.answer.replace("####", ""), question)
    assert q.final_answer("Ann has 5 . ####") is None
    assert q.final_answer("#### 4 #### 5") == "5"


def test_deterministic_and_prefix_stable() -> None:
    assert q.questions("test", n=40) == drawn("test")[:40]
    assert q.questions("test", n=40, seed=1) != drawn("test")[:40]


def test_explanations_outweigh_their_prompts() -> None:
    explained = [x for x in drawn("test") if x.kind == "why" and x.difficulty >= 3]
    assert sum(len(x.hops) + 1 for x in explained) > sum(len(x.prompt.split()) for x in explained)


def test_tokenizer_speaks_the_vocabulary(tmp_path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == len(VOCABULARY) == len(IDS)
    for question in drawn("test", 36):
        text = f"{question.prompt} {question.answer}"
        assert tokenizer.encode(text).ids == encode(text)
        assert tokenizer.decode(encode(text)) == text
    assert tokenizer.encode("Ann has 5 . <eos>").ids[-1] == IDS["<eos>"]
    assert tokenizer.decode([IDS["Ann"], IDS["<eos>"]]) == "Ann"
    with pytest.raises(ValueError, match="'apples' is not in nano's vocabulary"):
        encode("Ann has 5 apples")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"split": "dev"}, "split is 'dev'; allowed: train, validation, calibration, test"),
        ({"split": "test", "kinds": ("triple",)}, "kinds is ('triple',); allowed: one or more of single, pair, why"),
        ({"split": "test", "n": 0}, "n is 0"),
    ],
)
def test_errors_name_what_is_allowed(arguments, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        q.questions(**arguments)
