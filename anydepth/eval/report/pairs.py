"""Which arms of a report are held against each other, and what it proposes from that."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anydepth.certificate import Certificate, describe, question_set_hash
from anydepth.eval.compare.compare import Comparison, compare
from anydepth.eval.compare.factors import EXACT_FILLS, effective_policy, factors, policy_words
from anydepth.eval.compare.rules import Told, Verdict, judge
from anydepth.eval.numbers import percent, points
from anydepth.eval.report.files import Entry, Section
from anydepth.stats import holm
from anydepth.types import unknown

_POLICY = ("policy", "exit_threshold", "depth", "interval", "shallow_depth", "profile", "min_depth", "max_depth")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A held against B. `why`: "baseline", "rule" or "K/V". `adjusted`: p after Holm over all pairs of the section."""

    a: Entry
    b: Entry
    why: str
    found: Comparison
    adjusted: float | None = None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A rule, when it was written down, and its verdict."""

    told: Told
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """All pairs of a section, each once. `against` has each arm's own baseline."""

    pairs: tuple[Pair, ...]
    judged: tuple[Judged, ...]
    kv: tuple[Pair, ...]
    against: Mapping[str, Pair]
    baseline: Entry | None


def pair_up(section: Section, *, margin_pp: float, baseline: str | None = None) -> Pairs:
    """Compare every arm with its baseline, the pairs that rules name, and arms that differ in their K/V alone.

    baseline: an arm's name; by default each arm has the one at full depth from which it differs in the fewest factors.
    """
    ready = [entry for entry in section.entries if entry.paired]
    if baseline is not None and section.entry(baseline) is None:
        raise unknown("arm", baseline, [entry.label for entry in section.entries])
    named = [e for e in section.complete if e == section.entry(baseline)] if baseline is not None else []
    all_bases = named or _bases(section.complete)
    bases = [base for base in all_bases if base.paired]
    made: dict[tuple[str, str], Comparison] = {}

    def pair(a: Entry, b: Entry, why: str) -> Pair:
        key = a.label, b.label
        if key not in made:
            several = any(sample["answer_index"] for entry in (a, b) for sample in entry.record.samples)
            found = compare(a.record, b.record, margin_pp=margin_pp, clustered=several)
            made[key] = replace(found, a=a.label, b=b.label)
        return Pair(a=a, b=b, why=why, found=made[key])

    against = {}
    for entry in ready:
        others = [base for base in bases if base != entry]
        if entry in bases:
            others = [base for base in others if bases.index(base) < bases.index(entry)][:1]
        if others:
            nearest = min(others, key=lambda base: len(factors(entry.settings, base.settings).counted))
            against[entry.label] = pair(entry, nearest, "baseline")
    ruled, judged = [], []
    for told in section.rules:
        a, b = (section.entry(name) for name in told.rule["compare"])
        if a is None or b is None or not a.paired or not b.paired:
            judged.append(Judged(told=told, verdict=_unjudged(told.rule, section)))
        else:
            ruled.append(pair(a, b, "rule"))
            judged.append(Judged(told=told, verdict=judge(told.rule, ruled[-1].found)))
    kv = [pair(a, b, "K/V") for a, b in _kv_pairs(ready)]
    return Pairs(
        pairs=_adjusted([*against.values(), *ruled, *kv]),
        judged=tuple(judged),
        kv=tuple(kv),
        against=against,
        baseline=all_bases[0] if all_bases else None,
    )


def _bases(ready: Sequence[Entry]) -> list[Entry]:
    """Arms at full depth, one named A0 first; without any, the first arm."""
    full = [entry for entry in ready if effective_policy(entry.settings) == "never"]
    return sorted(full, key=lambda entry: entry.settings["name"] != "A0") or list(ready[:1])


def _kv_pairs(ready: Sequence[Entry]) -> list[tuple[Entry, Entry]]:
    """(arm, exact arm): of the same policy settings, where only the first fills skipped depths approximately. Of
    several exact arms of one fill, the one that differs in the fewest factors."""
    early = [entry for entry in ready if effective_policy(entry.settings) != "never"]
    found = []
    for entry in early:
        if entry.settings.get("fill") in (*EXACT_FILLS, None):
            continue
        for fill in EXACT_FILLS:
            exact = [e for e in early if e.settings.get("fill") == fill and _policy(e) == _policy(entry)]
            if exact:
                found.append((entry, min(exact, key=lambda e: len(factors(entry.settings, e.settings).counted))))
    return found


def _policy(entry: Entry) -> list[Any]:
    return [entry.settings.get(name) for name in _POLICY]


def _unjudged(rule: Mapping[str, Any], section: Section) -> Verdict:
    reasons = []
    for name in dict.fromkeys(rule["compare"]):
        entry = section.entry(name)
        if entry is None:
            reasons.append(f"{name} was not run")
        elif not entry.complete:
            reasons.append(f"{name} is not complete")
        elif not entry.paired:
            reasons.append(f"{name} has no samples here")
    return Verdict(None, tuple(reasons))


def _adjusted(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Each pair once, either way round, with p adjusted over them all."""
    once: dict[frozenset[str], Pair] = {}
    for pair in pairs:
        once.setdefault(frozenset((pair.a.label, pair.b.label)), pair)
    kept = list(once.values())
    tested = [pair for pair in kept if pair.found.outcome is not None]
    adjusted = holm([pair.found.outcome.result.p for pair in tested if pair.found.outcome is not None])
    found = {(pair.a.label, pair.b.label): p for pair, p in zip(tested, adjusted, strict=True)}
    return tuple(replace(pair, adjusted=found.get((pair.a.label, pair.b.label))) for pair in kept)


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What a report proposes, if anything, and on what evidence. `pair`: the proposed arm against its baseline."""

    pair: Pair | None
    lines: tuple[str, ...]


def propose(section: Section, pairs: Pairs, certificates: Sequence[Certificate], *, margin_pp: float) -> Proposal:
    """The cheapest arm by executed segments that is non-inferior to full depth on these questions.

    What a certificate says comes first; it is the better evidence.
    """
    early = [pair for pair in pairs.against.values() if effective_policy(pair.a.settings) != "never" and _saves(pair)]
    good = [pair for pair in early if pair.found.non_inferior]
    best = min(good, key=lambda pair: pair.found.executed.a) if good else None
    hashes = {(entry.record.provenance.get("model") or {}).get("hash") for entry in section.entries}
    certificates = [certificate for certificate in certificates if certificate.model_hash in hashes]
    lines = [_certified(certificate, section) for certificate in certificates]
    if best is not None:
        lines += _evidence(best, len(early), margin_pp)
    elif early:
        lines.append(
            f"None of the {len(early)} arms that execute fewer segments was shown to be non-inferior to full depth at "
            f"a margin of {margin_pp:g} pp: from these questions full depth is the proposal."
        )
    else:
        lines.append("No proposal: no arm that saves segments can be paired with one at full depth here.")
    if best is not None or certificates:
        lines.append(_other_questions(section))
    if best is not None and not certificates:
        lines.append("No certificate is among the files; anydepth calibrate makes one, with a stated risk.")
    lines.append("This is a proposal with its evidence. The decision is yours.")
    return Proposal(pair=best, lines=tuple(lines))


def _saves(pair: Pair) -> bool:
    return pair.found.executed.a < pair.found.executed.b


def _evidence(best: Pair, early: int, margin_pp: float) -> list[str]:
    found = best.found
    assert found.outcome is not None
    result = found.outcome.result
    share = percent(found.executed.share, 0)
    lines = [
        f"Proposed: {policy_words(best.a.settings)} (arm {best.a.label}), which executes {share} % of the segments of "
        f"{best.b.label}. It is the cheapest of {early} early arms that is non-inferior at a margin of {margin_pp:g} "
        f"pp on these {found.outcome.n:,} answers: A − B is {points(result.difference)} pp, its lower 95 % limit "
        f"{points(result.lower_limit)} pp."
    ]
    if early > 1:
        lines.append("The best of several on the same questions looks better than it is: expect a little less of it.")
    return lines


def _certified(certificate: Certificate, section: Section) -> str:
    ids = {sample["id"] for entry in section.entries for sample in entry.record.samples}
    same = question_set_hash(ids) == certificate.certified_on
    where = "on these very questions" if same else "on other questions than these"
    said = describe(certificate)
    return f"{said[0].upper()}{said[1:]}; {where}."


def _other_questions(section: Section) -> str:
    split = split_of(section)
    if split is None:
        return (
            "Which split these questions are from is not recorded. If they are test questions, choose on others and "
            "use these only to report."
        )
    if "test" in split:
        return (
            f"These are questions of the {split} split: the choice itself must be made on other questions, or it is no "
            f"longer a test."
        )
    return f"These are questions of the {split} split: report the chosen setting on test questions, asked once."


def split_of(section: Section) -> str | None:
    """The split of a section's questions: recorded, planned, or said by the ids."""
    for said in (
        *(entry.settings.get("split") for entry in section.entries),
        *(plan.lines[-1]["study"].get("split") for plan in section.plans if plan.lines),
    ):
        if said:
            return str(said)
    ids = [sample["id"] for entry in section.entries for sample in entry.record.samples[:1]]
    named = re.search(r"(?<![a-z])(test|validation|val|train|dev|calibration)(?![a-z])", ids[0]) if ids else None
    return named[1] if named else None
