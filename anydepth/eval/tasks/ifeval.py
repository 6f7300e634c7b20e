"""IFEval (Zhou et al., arXiv 2311.07911): 541 prompts with 834 instructions that a program can check, of 25 kinds.

The checks, and what "loose" forgives, are lm-eval's own. Three things in them are replaced while an answer is graded,
and put back: the learned sentence data that they would download (short lists of our own stand for it), the seed of the
language detection (0), and the letter of `keywords:letter_frequency` where the prompt asks for a sign ("#" and "!", in
two of the 541): lm-eval draws a letter at random instead, here the sign is counted. Answers end after 256 new tokens,
where lm-eval allows 1,280, so long answers score lower than published ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anydepth.eval import task
from anydepth.record import Sample

VARIANTS = ("strict", "loose")
MODULES = ("instructions", "instructions_registry", "instructions_util", "utils")
# Words after whose full stop a sentence goes on, as NLTK writes them: lower case, without the last full stop.
ABBREVIATIONS = """
    dr mr mrs ms prof st sr jr rev hon gen gov sen pres capt col lt sgt inc ltd co corp bros dept univ etc vs cf al
    approx e.g i.e a.m p.m p.s u.s u.k u.n e.u d.c l.a n.y ph.d m.d b.a m.a b.s m.s b.sc m.sc a.d b.c
    jan feb mar apr jun jul aug sept oct nov dec ave blvd rd mt ft fig figs eq vol pp
"""
# Capitalised after an abbreviation, an initial or an ellipsis, these begin a sentence nonetheless.
STARTERS = """
    a after all also although an and another are as at because before both but by can despite did do does each every
    finally first for from he her here his how however i if in instead is it its just let many maybe most my next no not
    now of on once one our perhaps she since so some such that the their then there therefore these they this those
    thus to today we what when where which while who why with would yes yet you your
"""


class IFEval(task.Task):
    """A prediction has one digit an instruction, "1" where it was followed. An answer is right when it follows all;
    the strict reading is scored, `scores` has both. `group` is the number of instructions, `data` the data's row.

    An answer without text follows nothing, as in lm-eval; one in no language that can be told follows instructions
    about language. Grading is not for several threads at a time.
    """

    max_tokens = 256

    def __init__(self, name: str, file: Path, **options: Any) -> None:
        super().__init__(name, file, **options)
        self.sources = tuple(_folder() / f"{module}.py" for module in MODULES)

    def questions(self, split: str) -> Iterable[task.Question]:
        _lm_eval()
        for row in self._rows():
            try:
                _follows(row, "")
            except (LookupError, TypeError, AttributeError, ValueError) as error:
                raise ValueError(
                    f"{self.name}: question {row['id']!r} has instructions that lm-eval cannot check ({error!r}); "
                    f"mend instruction_id_list and kwargs, one entry each an instruction"
                ) from error
            messages = ({"role": "user", "content": row["prompt"]},)
            yield task.Question(id=row["id"], prompt=messages, group=len(row["instruction_id_list"]), data=row)

    def grade(self, question: task.Question, text: str) -> task.Grade:
        try:
            followed = _follows(question.data, text)
        except RecursionError as error:  # JSON of a thousand brackets
            return task.Grade(prediction={}, score=None, unscored=f"lm-eval's check failed: {error}")
        scores = {name: float(all(followed[name])) for name in VARIANTS}
        found = {name: "".join("01"[mark] for mark in followed[name]) for name in VARIANTS}
        return task.Grade(prediction=found, score=scores["strict"], scores=scores)

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float | None]:
        """Share of all instructions that were followed, and of each kind, strict and loose."""
        kinds = {row["id"]: row["instruction_id_list"] for row in self._rows()}
        marks: dict[str, list[int]] = {f"instruction_{name}": [] for name in VARIANTS}
        for name, sample in product(VARIANTS, (sample for sample in samples if sample["score"] is not None)):
            for kind, mark in zip(kinds[sample["id"]], sample["prediction"][name], strict=True):
                marks[f"instruction_{name}"].append(int(mark))
                marks.setdefault(f"instruction_{name} {kind}", []).append(int(mark))
        return {name: sum(found) / len(found) if found else None for name, found in marks.items()}

    def _rows(self) -> list[dict[str, Any]]:
        return self.rows("ifeval.jsonl", ("id", "key", "prompt", "instruction_id_list", "kwargs"))


def count_sentences(text: str) -> int:
    """Sentences as NLTK's Punkt (Kiss & Strunk 2006) finds them, from the lists above and without its learned data.

    "Dr. Lee is here. Are you?" has 2. As in NLTK, the number of a list's item ("1.") is a sentence of its own.
    """
    return len(_splitter().tokenize(text))


def words(text: str) -> list[str]:
    """Words and signs as NLTK's word_tokenize splits them, sentence by sentence."""
    import nltk

    sentences = _splitter().tokenize(text)
    return [word for sentence in sentences for word in nltk.word_tokenize(sentence, preserve_line=True)]


@cache
def _splitter() -> Any:
    from nltk.tokenize import punkt

    parameters = punkt.PunktParameters()
    parameters.abbrev_types.update(ABBREVIATIONS.split())
    parameters.collocations.add(("no", "##number##"))  # "No. 5"
    for word in STARTERS.split():
        parameters.add_ortho_context(word, punkt._ORTHO_LC)
    return punkt.PunktSentenceTokenizer(parameters)


def _follows(row: Mapping[str, Any], text: str) -> dict[str, list[bool]]:
    """For each of the row's instructions whether the text follows it: by name of the variant."""
    checker, replacements = _lm_eval()
    with _replaced(replacements):
        found = checker.process_results(row, [text])
    return {name: found[f"inst_level_{name}_acc"] for name in VARIANTS}


Replacement = tuple[Any, str, Any]  # owner, name of its attribute, value


@cache
def _lm_eval() -> tuple[Any, tuple[Replacement, ...]]:
    """lm-eval's grader of IFEval, and what must be replaced while it grades."""
    try:
        import langdetect
        import nltk

        import_module("lm_eval.tasks")  # it loads much besides: for that nothing is replaced
        # On import, this looks for sentence data and downloads them where there are none.
        with _replaced([(nltk.data, "find", lambda *_, **__: None)]):
            from lm_eval.tasks.ifeval import instructions, instructions_registry, instructions_util, utils
    except ModuleNotFoundError as error:
        raise ValueError(f"ifeval's checks need more packages ({error}); pip install 'anydepth[eval]'") from error

    class LetterOrSign(instructions.LetterFrequencyChecker):  # type: ignore[misc, name-defined]
        def build_description(self, *, letter: str, **arguments: Any) -> None:
            super().build_description(letter="a", **arguments)
            self._letter = letter.lower()

    checks = {**instructions_registry.INSTRUCTION_DICT, "keywords:letter_frequency": LetterOrSign}
    return utils, (
        (instructions_registry, "INSTRUCTION_DICT", checks),
        (instructions_util, "count_sentences", count_sentences),
        (instructions_util, "nltk", SimpleNamespace(tokenize=nltk.tokenize, word_tokenize=words)),
        (instructions_util, "random", _NoDraws()),
        (instructions, "random", _NoDraws()),
        (instructions.logger, "disabled", True),  # it complains of every text in no known language
        (langdetect.DetectorFactory, "seed", 0),
    )


class _NoDraws:
    """Stands for the module `random`: lm-eval would draw an argument that is missing."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError("an argument is missing")


@contextmanager
def _replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Attributes of others, as long as the context lasts."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def _folder() -> Path:
    spec = find_spec("lm_eval")  # found, not imported: its package is slow to load
    if spec is None or spec.origin is None:
        raise ValueError("ifeval takes its checks from lm-eval, which is missing; pip install 'anydepth[eval]'")
    return Path(spec.origin).parent / "tasks" / "ifeval"
