"""Two arms on the same questions: what differs in the settings, and what came of it. Imports no torch.

Every difference is A - B. A gain is a question that only A has right, a loss one that only B has right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from anydepth.eval.aggregate import accuracy
from anydepth.eval.compare.factors import PROTOCOL, Factor, environment, factors, kv_kind, value_words
from anydepth.eval.compare.sequences import ChoiceDifferences, Sequences, compare_choices, compare_sequences
from anydepth.eval.compare.work import Pairs, Work, by_question, work
from anydepth.record import Record, Sample
from anydepth.stats import Clustered, Paired, clustered_difference, compare_paired


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Scores of the answers that both arms have one for. `test` names what `result.p` comes from.

    `gains`, `losses`: answers that A, or B, has the higher score for. None of it depends on unscored answers.
    """

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    n: int
    gains: int
    losses: int
    test: str
    result: Paired | Clustered

    def asdict(self) -> dict[str, Any]:
        result = self.result
        counts = {"both": result.both, "neither": result.neither} if isinstance(result, Paired) else {}
        return {
            **{name: getattr(self, name) for name in ("n", "gains", "losses", "test")},
            **counts,
            "a": dict(self.a),
            "b": dict(self.b),
            "difference_pp": 100 * result.difference,
            "low_pp": 100 * result.interval.low,
            "high_pp": 100 * result.interval.high,
            "lower_limit_pp": 100 * result.lower_limit,
            "p": result.p,
        }


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A against B, by `compare`. `outcome` is None where no answer is scored in both, `sequences` for choices that were
    scored by likelihood, `choices` for generated answers. `unscored`: answers without a score in A, in B, in either."""

    a: str
    b: str
    factors: tuple[Factor, ...]
    without_effect: tuple[Factor, ...]
    environment: tuple[Factor, ...]
    answers: int
    unscored: tuple[int, int, int]
    outcome: Outcome | None
    answers_differ: int
    sequences: Sequences | None
    choices: ChoiceDifferences | None
    read: Work
    executed: Work
    tokens: Work
    length_stops: tuple[int, int]
    margin_pp: float | None

    @property
    def non_inferior(self) -> bool | None:
        """Whether A is at most the margin worse than B. None without a margin or scores."""
        if self.margin_pp is None or self.outcome is None:
            return None
        return self.outcome.result.non_inferior(self.margin_pp / 100)

    def asdict(self) -> dict[str, Any]:
        """All of it as JSON takes it; differences of accuracy in percentage points."""
        return {
            **{name: getattr(self, name) for name in ("a", "b", "answers", "answers_differ", "margin_pp")},
            "factors": [factor._asdict() for factor in self.factors],
            "without_effect": [factor._asdict() for factor in self.without_effect],
            "environment": [factor._asdict() for factor in self.environment],
            "unscored": dict(zip(("a", "b", "either"), self.unscored, strict=True)),
            "accuracy": self.outcome and self.outcome.asdict(),
            "non_inferior": self.non_inferior,
            "sequences": self.sequences and self.sequences.asdict(),
            "choices": self.choices and asdict(self.choices),
            "segments_read_per_question": self.read.asdict(),
            "segments_executed_per_question": self.executed.asdict(),
            "tokens_per_question": self.tokens.asdict(),
            "length_stops": dict(zip("ab", self.length_stops, strict=True)),
        }


def compare(a: Record, b: Record, *, margin_pp: float | None = None, clustered: bool = False) -> Comparison:
    """Compare two complete eval Records of one protocol, question by question.

    margin_pp: by how many percentage points A may be worse and still count as non-inferior. clustered: questions were
    answered more than once; each of them is one observation then.

    The test is exact McNemar with Newcombe's interval; with several answers a question or partial credit it is the
    score test of `stats.clustered_difference`. An answer that either arm has no score for is left out of both.
    Example: 132 gains, 56 losses, 675 both right, 456 both wrong: +5.76 pp, 3.74 to 7.77, p = 2.95e-8.

    Raises ValueError for Records of another kind, unfinished, without samples, of different protocols or questions,
    and for several answers a question unless `clustered`.
    """
    if margin_pp is not None and not 0 <= margin_pp < 100:
        raise ValueError(f"margin_pp is {margin_pp:g}; allowed: percentage points from 0, such as 1")
    pairs = paired(a, b, clustered=clustered)
    found = factors(a.settings_used, b.settings_used)
    choices = any("choices" in sample for sample in a.samples)
    return Comparison(
        a=a.settings_used["name"],
        b=b.settings_used["name"],
        factors=found.counted,
        without_effect=found.without_effect,
        environment=environment(a.provenance, b.provenance),
        answers=len(pairs),
        unscored=_unscored(pairs),
        outcome=_outcome(pairs, clustered=clustered),
        answers_differ=sum(_answer(one) != _answer(other) for one, other in pairs),
        sequences=None if choices else _sequences(pairs, a, b),
        choices=compare_choices([pair for pair in pairs if all("choices" in s for s in pair)]) if choices else None,
        read=work(pairs, lambda sample: sample["segments_read"]),
        executed=work(pairs, lambda sample: sample["segments_executed"]),
        tokens=work(pairs, lambda sample: len(sample["output_ids"])),
        length_stops=_length_stops(pairs),
        margin_pp=margin_pp,
    )


def paired(a: Record, b: Record, *, clustered: bool) -> list[tuple[Sample, Sample]]:
    """The answers of two Records by question and answer index. Raises ValueError as `compare` does."""
    for record in (a, b):
        _check_one(record, clustered=clustered)
    _check_both(a, b)
    others = {_key(sample): sample for sample in b.samples}
    return [(sample, others[_key(sample)]) for sample in sorted(a.samples, key=_key)]


def answers_wanted(record: Record) -> int:
    """Answers that a complete Record of these settings has."""
    settings = record.settings_used
    choices = any("choices" in sample for sample in record.samples)
    wanted: int = settings["questions"] * (1 if choices else settings.get("n", 1))
    return wanted


def _check_one(record: Record, *, clustered: bool) -> None:
    if record.kind != "eval":
        raise ValueError(f"{record.path} is a {record.kind} Record; answers are compared between eval Records")
    if record.status != "complete":
        raise ValueError(
            f"{record.path} is not complete, {len(record.samples)} of {answers_wanted(record)} answers are there; "
            f"run the same anydepth eval again, which finishes it"
        )
    if not record.samples:
        raise ValueError(f"{record.path} was read or published without samples; pairs need them")
    if not clustered and (twice := sum(sample["answer_index"] > 0 for sample in record.samples)):
        raise ValueError(
            f"{record.path} has {twice} further answers to its questions; answers to one question are alike: say "
            f"clustered, so that each question counts as one observation"
        )


def _check_both(a: Record, b: Record) -> None:
    if a.protocol_hash is None or a.protocol_hash != b.protocol_hash:
        raise ValueError(
            f"{a.path} and {b.path} are of different protocols ({protocol_difference(a, b)}); only answers to the same "
            f"prompts under the same caps can be compared: run both arms in one study"
        )
    ones, others = ({_key(sample): sample.get("prompt_ids_sha256") for sample in r.samples} for r in (a, b))
    if ones.keys() != others.keys():
        only = [f"{id!r} ({index})" for id, index in sorted(ones.keys() ^ others.keys())]
        raise ValueError(
            f"{a.path} and {b.path} do not have the same questions: {len(only)} answers are in only one of them, such "
            f"as {', '.join(only[:3])}; run both arms in one study"
        )
    if changed := [id for (id, index), prompt in ones.items() if others[id, index] != prompt]:
        raise ValueError(
            f"{a.path} and {b.path} have other prompts for {len(changed)} questions, such as {changed[0]!r}, though "
            f"their protocol is the same; get them again"
        )


def protocol_difference(a: Record, b: Record) -> str:
    """What of the protocol differs, as far as the headers tell."""
    if a.protocol_hash is None or b.protocol_hash is None:
        return "one was written without a protocol hash"
    said = [
        f"{name} is {value_words(a.settings_used.get(name))} and {value_words(b.settings_used.get(name))}"
        for name in PROTOCOL
        if a.settings_used.get(name) != b.settings_used.get(name)
    ]
    for part in ("task", "model", "tokenizer"):
        hashes = [(r.provenance.get(part) or {}).get("hash") for r in (a, b)]
        if hashes[0] != hashes[1]:
            said.append(f"the {part}'s hash is {str(hashes[0])[:12]} and {str(hashes[1])[:12]}")
    return "; ".join(said) or "the prompts, their worked examples, the chat template or stop ids differ"


def _key(sample: Sample) -> tuple[str, int]:
    return sample["id"], sample["answer_index"]


def _answer(sample: Sample) -> Any:
    """What an answer comes down to: what the scored extractor found, else the text."""
    return next(iter(sample["prediction"].values()), sample["text"])


def _unscored(pairs: Pairs) -> tuple[int, int, int]:
    missing = [(one["score"] is None, other["score"] is None) for one, other in pairs]
    return sum(a for a, _ in missing), sum(b for _, b in missing), sum(a or b for a, b in missing)


def _outcome(pairs: Pairs, *, clustered: bool) -> Outcome | None:
    scored = [(a["id"], a["score"], b["score"]) for a, b in pairs if None not in (a["score"], b["score"])]
    if not scored:
        return None
    partial = any(score not in (0, 1) for _, *both in scored for score in both)
    result: Paired | Clustered
    if clustered or partial:
        result = clustered_difference(by_question((id, a - b) for id, a, b in scored).values())
        test = "score test, questions as clusters" if clustered else "score test of the mean difference"
    else:
        result = compare_paired([a for _, a, _ in scored], [b for *_, b in scored])
        test = "exact McNemar"
    return Outcome(
        a=accuracy([(id, a) for id, a, _ in scored]),
        b=accuracy([(id, b) for id, _, b in scored]),
        n=len(scored),
        gains=sum(a > b for _, a, b in scored),
        losses=sum(a < b for _, a, b in scored),
        test=test,
        result=result,
    )


def _sequences(pairs: Pairs, a: Record, b: Record) -> Sequences:
    return compare_sequences(
        pairs,
        segments=a.settings_used["segments"],
        kv=(kv_kind(a.settings_used), kv_kind(b.settings_used)),
    )


def _length_stops(pairs: Pairs) -> tuple[int, int]:
    counts = Counter(i for pair in pairs for i in (0, 1) if pair[i]["finish_reason"] == "length")
    return counts[0], counts[1]
