"""What a report proposes, from pairs of arms and certificates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from anydepth.certificate import Certificate, describe, question_set_hash
from anydepth.eval.compare.factors import effective_policy, policy_words
from anydepth.eval.numbers import percent, points
from anydepth.eval.report.files import Section
from anydepth.eval.report.pairs import Pair, Pairs, signals_of


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
    early = [
        pair for pair in early if signals_of(pair.a) == "sync"
    ]  # delayed ones follow another policy than they name
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
