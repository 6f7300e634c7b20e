"""The questions nano is trained and tested on: who has how many, where most say so only by comparing with another.

    Ann has 5 . Bob has 3 more than Ann . Eve has as many as Bob . How many has Eve ?
    Eve has 8 . #### 8

A base statement has hop depth 1, a comparison one more than the person it names, up to 6; the difficulty of a question
is the largest hop depth among the persons it asks for. Everything before `####` may help, the score compares what
stands after it. Texts are words joined by single spaces. Splits are disjoint by context: the checksum of the statements
decides which split a context belongs to, so no generator, seed or later run can move one across. No torch here.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, get_args

Split = Literal["train", "validation", "calibration", "test"]
Kind = Literal["single", "pair", "why"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_HOPS = 6
LARGEST = 19
AMOUNTS = 5
NAMES = (
    "Ann",
    "Bob",
    "Cal",
    "Dan",
    "Eve",
    "Fay",
    "Gus",
    "Hal",
    "Ida",
    "Jon",
    "Kim",
    "Lea",
    "Mia",
    "Ned",
    "Ora",
    "Pam",
    "Quin",
    "Rob",
    "Sue",
    "Tom",
)

_BUCKETS = 50
_HELD_OUT: dict[int, Split] = {0: "test", 1: "validation", 2: "calibration"}
# A chain that is a few hops shorter than it could be, more often than not by none.
_SHORTER = (0, 0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Statement:
    """`person` has `value`. `source` and `amount` (signed, 0 for "as many as") say it by comparison, or are None."""

    person: str
    value: int
    depth: int
    source: str | None = None
    amount: int = 0

    @property
    def words(self) -> list[str]:
        if self.source is None:
            return [self.person, "has", str(self.value), "."]
        if self.amount == 0:
            return [self.person, "has", "as", "many", "as", self.source, "."]
        return [
            self.person,
            "has",
            str(abs(self.amount)),
            "more" if self.amount > 0 else "fewer",
            "than",
            self.source,
            ".",
        ]


Context = tuple[Statement, ...]


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question. `hops` has one entry an answer word: the hop depth of the person whose number it computes, else 0.

    A person's number counts where it is said first; copies of it and the sum of a pair have 0. `prompt` is the context
    and the question; `answer` leaves the end token out. Example: prompt `Ann has 5 . How many has Ann ?`, answer
    `Ann has 5 . #### 5`, hops `(0, 0, 1, 0, 0, 0)`.
    """

    id: str
    prompt: str
    answer: str
    difficulty: int
    kind: Kind
    hops: tuple[int, ...]

    @property
    def computed(self) -> tuple[bool, ...]:
        """One entry an answer word: is it a number that has to be worked out (a person's, or the sum of a pair)?"""
        last = len(self.hops) - 1
        return tuple(hop > 0 or (self.kind == "pair" and index == last) for index, hop in enumerate(self.hops))


def context_text(context: Context) -> str:
    """The statements as the prompt shows them."""
    return " ".join(word for statement in context for word in statement.words)


def split_of(text: str) -> Split:
    """The split a context's text belongs to: 2 % each for test, validation and calibration."""
    return _HELD_OUT.get(zlib.crc32(text.encode()) % _BUCKETS, "train")


def draw_context(
    rng: Random, *, persons: int, chain: int, max_depth: int = MAX_HOPS, split: Split = "train"
) -> Context:
    """A context of `split`: `chain` persons who each compare with the one before, the others mixed in between.

    No hop depth exceeds `max_depth`. Every comparison names an earlier person.
    """
    if not 1 <= chain <= min(persons, max_depth) or persons > len(NAMES):
        raise ValueError(
            f"chain is {chain}, persons is {persons}, max_depth is {max_depth}; needed: "
            f"1 <= chain <= persons <= {len(NAMES)} and chain <= max_depth"
        )
    context = _draw(rng, persons, chain, max_depth)
    while split_of(context_text(context)) != split:
        # Few contexts are held out. Other names for the same story find one faster than another story would.
        context = _draw(rng, persons, chain, max_depth) if split == "train" else _rename(rng, context)
    return context


def _rename(rng: Random, context: Context) -> Context:
    names = dict(zip([statement.person for statement in context], rng.sample(NAMES, len(context)), strict=True))
    return tuple(
        replace(statement, person=names[statement.person], source=names.get(statement.source or ""))
        for statement in context
    )


def _draw(rng: Random, persons: int, chain: int, max_depth: int) -> Context:
    in_chain = [True] * chain + [False] * (persons - chain)
    rng.shuffle(in_chain)
    drawn: list[Statement] = []
    last: Statement | None = None
    for person, member in zip(rng.sample(NAMES, persons), in_chain, strict=True):
        source = last
        if not member:
            allowed = [other for other in drawn if other.depth < max_depth]
            source = rng.choice(allowed) if allowed and rng.random() < 0.7 else None
        statement = _compare(rng, person, source)
        drawn.append(statement)
        last = statement if member else last
    return tuple(drawn)


def _compare(rng: Random, person: str, source: Statement | None) -> Statement:
    if source is None:
        return Statement(person=person, value=rng.randint(0, LARGEST), depth=1)
    while True:
        amount = rng.choice((1, 1, -1, -1, 0)) * rng.randint(1, AMOUNTS)
        if 0 <= source.value + amount <= LARGEST:
            return Statement(
                person=person, value=source.value + amount, depth=source.depth + 1, source=source.person, amount=amount
            )


def draw_full_context(rng: Random, *, split: Split = "train") -> Context:
    """A context as single and pair questions have it: 6 to 9 persons, a main chain of 3 to 6."""
    return draw_context(rng, persons=rng.randint(6, 9), chain=MAX_HOPS - rng.choice(_SHORTER), split=split)


def draw_level_context(rng: Random, *, level: int) -> Context:
    """A training context of the curriculum: level 0 two base statements, level m up to m hops, level 6 the full one."""
    if level >= MAX_HOPS:
        return draw_full_context(rng)
    depth = max(1, level)
    persons = rng.randint(min(6, level + 1), level + 3) if level else 2
    chain = min(persons, max(1, depth - rng.choice(_SHORTER)))
    return draw_context(rng, persons=persons, chain=chain, max_depth=depth)


def draw_short_context(rng: Random, *, difficulty: int, split: Split = "train") -> Context:
    """A context for a `why` question: a chain of `difficulty` and few others, so that long answers outweigh it."""
    persons = max(2, difficulty) + rng.choice((0, 0, 1))
    return draw_context(rng, persons=persons, chain=difficulty, split=split)


def ask_single(context: Context, person: str) -> Question:
    """`How many has Kim ?` -> `Kim has 4 . #### 4`."""
    told = {statement.person: statement for statement in context}[person]
    answer = [person, "has", str(told.value), ".", "####", str(told.value)]
    return _question(context, ["How", "many", "has", person, "?"], answer, {2: told.depth}, "single")


def ask_pair(context: Context, first: str, second: str) -> Question:
    """`How many have Jon and Mia ?` -> `Jon has 5 . Mia has 18 . #### 23`."""
    by_name = {statement.person: statement for statement in context}
    one, two = by_name[first], by_name[second]
    answer = [first, "has", str(one.value), ".", second, "has", str(two.value), ".", "####", str(one.value + two.value)]
    return _question(
        context, ["How", "many", "have", first, "and", second, "?"], answer, {2: one.depth, 6: two.depth}, "pair"
    )


def ask_why(context: Context, person: str) -> Question:
    """`How many has Eve and why ?` -> `Eve has 8 since Eve has 3 more than Ann . Ann has 5 . #### 8`.

    The explanation walks the chain from the person asked for down to its base: the first number is due before anything
    on the chain has been worked out, and every later one can be derived from the one before it.
    """
    by_name = {statement.person: statement for statement in context}
    answer: list[str] = []
    hops: dict[int, int] = {}
    link: Statement | None = by_name[person]
    while link is not None:
        hops[len(answer) + 2] = link.depth
        answer += [link.person, "has", str(link.value)]
        answer += ["."] if link.source is None else ["since", *link.words]
        link = by_name[link.source] if link.source is not None else None
    answer += ["####", str(by_name[person].value)]
    return _question(context, ["How", "many", "has", person, "and", "why", "?"], answer, hops, "why")


def _question(context: Context, asked: list[str], answer: list[str], hops: dict[int, int], kind: Kind) -> Question:
    prompt = f"{context_text(context)} {' '.join(asked)}"
    return Question(
        id=f"{kind}-{zlib.crc32(prompt.encode()):08x}",
        prompt=prompt,
        answer=" ".join(answer),
        difficulty=max(hops.values()),
        kind=kind,
        hops=tuple(hops.get(i, 0) for i in range(len(answer))),
    )


def question_text(question: Question) -> str:
    """What is asked, without the statements before it."""
    return question.prompt[question.prompt.index("How ") :]


def questions(split: Split, *, n: int = 2160, seed: int = 0, kinds: Sequence[Kind] = KINDS) -> list[Question]:
    """`n` questions of a split, no context twice; the kinds and the difficulties 1 to 6 take turns.

    The default of 2,160 gives 120 for each of the 18 combinations of kind and difficulty. The first m of n questions
    are the same for every n. ValueError where the split or a kind is unknown or n is not positive.
    """
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; allowed: {', '.join(get_args(Split))}")
    if not kinds or not set(kinds) <= set(KINDS):
        raise ValueError(f"kinds is {tuple(kinds)!r}; allowed: one or more of {', '.join(KINDS)}")
    if n < 1:
        raise ValueError(f"n is {n}; give the number of questions, 1 or more")
    stream = _stream(split, seed, kinds)
    return [next(stream) for _ in range(n)]


def _stream(split: Split, seed: int, kinds: Sequence[Kind]) -> Iterator[Question]:
    rng = Random(f"nano {split} {seed}")
    seen: set[str] = set()
    while True:
        for difficulty in range(1, MAX_HOPS + 1):
            for kind in kinds:
                question, text = _draw_question(rng, kind, difficulty, split)
                while text in seen:
                    question, text = _draw_question(rng, kind, difficulty, split)
                seen.add(text)
                yield question


def _draw_question(rng: Random, kind: Kind, difficulty: int, split: Split) -> tuple[Question, str]:
    """A question of the wanted kind and difficulty, and its context's text."""
    while True:
        context = (
            draw_short_context(rng, difficulty=difficulty, split=split)
            if kind == "why"
            else draw_full_context(rng, split=split)
        )
        deepest = [statement.person for statement in context if statement.depth == difficulty]
        if not deepest:
            continue
        person = rng.choice(deepest)
        if kind == "why":
            return ask_why(context, person), context_text(context)
        if kind == "single":
            return ask_single(context, person), context_text(context)
        others = [other.person for other in context if other.depth <= difficulty and other.person != person]
        if others:
            both = [person, rng.choice(others)]
            rng.shuffle(both)
            return ask_pair(context, *both), context_text(context)


def final_answer(text: str) -> str | None:
    """What stands after the last `####`, or None where nothing does. Example: `Ann has 8 . #### 8` -> `8`."""
    _, mark, tail = text.rpartition("####")
    return " ".join(tail.split()) or None if mark else None


def grade(prediction: str, question: Question) -> bool:
    """True where the final answers are equal, word for word."""
    return final_answer(prediction) == final_answer(question.answer)
