"""Which arms of a report are held against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anydepth.certificate import counted_signals
from anydepth.eval.compare.compare import Comparison, compare
from anydepth.eval.compare.factors import effective_policy, factors
from anydepth.eval.compare.rules import Told, Verdict, judge
from anydepth.eval.report.files import Entry, Section
from anydepth.stats import holm
from anydepth.types import EXACT_FILLS, unknown

_POLICY = ("policy", "exit_threshold", "depth", "interval", "shallow_depth", "profile", "min_depth", "max_depth")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A held against B. `why`: "baseline", "rule", "K/V" or "signals". `adjusted`: p after Holm over all pairs of the
    section but those that are to be equal."""

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
    """All pairs of a section, each once: `equal` has those whose answers are to be the same, `pairs` the others, `late`
    those of either that differ in their signals alone. `against` has each arm's own baseline."""

    pairs: tuple[Pair, ...]
    equal: tuple[Pair, ...]
    judged: tuple[Judged, ...]
    kv: tuple[Pair, ...]
    late: tuple[Pair, ...]
    against: Mapping[str, Pair]
    baseline: Entry | None


def pair_up(section: Section, *, margin_pp: float, baseline: str | None = None) -> Pairs:
    """Compare every arm with its baseline, the pairs that rules name, and arms that differ in their K/V or in their
    signals alone.

    baseline: an arm's name; by default each arm has the one at full depth from which it differs in the fewest factors.
    An arm that is to equal another by its signals has that one and no baseline.
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

    late = [pair(a, b, "signals") for a, b in _late_pairs(ready)]
    other = [each for each in late if not same_policy(each)]
    equal = [each for each in late if same_policy(each)]
    alone = [entry for entry in ready if entry not in [each.a for each in equal]]
    against = {}
    for entry in alone:
        others = [base for base in bases if base != entry]
        if entry in bases:
            others = [base for base in others if bases.index(base) < bases.index(entry)][:1]
        if others:
            nearest = min(others, key=lambda base: len(factors(entry.settings, base.settings).counted))
            against[entry.label] = pair(entry, nearest, "baseline")
    ruled: list[Pair] = []
    judged = []
    for told in section.rules:
        a, b = (section.entry(name) for name in told.rule["compare"])
        if a is None or b is None or not a.paired or not b.paired:
            judged.append(Judged(told=told, verdict=_unjudged(told.rule, section)))
        else:
            held = pair(a, b, "rule")
            (equal if told.rule.get("identical") else ruled).append(held)
            judged.append(Judged(told=told, verdict=judge(told.rule, held.found)))
    kv = [pair(a, b, "K/V") for a, b in _kv_pairs(alone)]
    tested = _adjusted([*against.values(), *ruled, *kv, *other])
    return Pairs(
        pairs=tested,
        equal=_once(equal, known=tested),
        judged=tuple(judged),
        kv=tuple(kv),
        late=tuple(late),
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
            same = [e for e in early if _policy(e) == _policy(entry) and signals_of(e) == signals_of(entry)]
            exact = [e for e in same if e.settings.get("fill") == fill]
            if exact:
                found.append((entry, min(exact, key=lambda e: len(factors(entry.settings, e.settings).counted))))
    return found


def _late_pairs(ready: Sequence[Entry]) -> list[tuple[Entry, Entry]]:
    """(late arm, synchronous arm) that differ in nothing else. The synchronous form of `delayed` is `delayed` without
    lateness, if it was run; that and all other modes are held against `sync`."""
    found = []
    for entry in ready:
        mode, turns = _mode(entry)
        if mode == "sync":
            continue
        like = [other for other in ready if _policy(other) == _policy(entry) and _only_signals(entry, other)]
        own = [other for other in like if mode == "delayed" and turns and _mode(other) == ("delayed", 0)]
        found += [(entry, other) for other in (own or [o for o in like if _mode(o)[0] == "sync"])[:1]]
    return found


def _mode(entry: Entry) -> tuple[str, int]:
    """The mode of signals, and how many turns they are late."""
    return entry.settings.get("signals", "sync"), entry.settings.get("lateness", 0)


def signals_of(entry: Entry) -> str:
    """The mode of signals whose answers an arm is to give."""
    return counted_signals(_mode(entry)[0])


def _only_signals(one: Entry, other: Entry) -> bool:
    return {factor.name for factor in factors(one.settings, other.settings).counted} <= {"signals", "lateness"}


def same_policy(pair: Pair) -> bool:
    """Whether two arms that differ in their signals are to give the same answers."""
    return signals_of(pair.a) == signals_of(pair.b) or not pair.found.factors


def doubles(pairs: Pairs) -> frozenset[str]:
    """Late arms whose answers are, one and all, those of the arm that they are held against."""
    same = [pair for pair in pairs.late if pair.found.sequences is not None and not pair.found.sequences.differ]
    return frozenset(pair.a.label for pair in same)


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
    kept = _once(pairs)
    tested = [pair for pair in kept if pair.found.outcome is not None]
    adjusted = holm([pair.found.outcome.result.p for pair in tested if pair.found.outcome is not None])
    found = {(pair.a.label, pair.b.label): p for pair, p in zip(tested, adjusted, strict=True)}
    return tuple(replace(pair, adjusted=found.get((pair.a.label, pair.b.label))) for pair in kept)


def _once(pairs: Sequence[Pair], *, known: Sequence[Pair] = ()) -> tuple[Pair, ...]:
    """Each pair once, either way round, without those that are known."""
    once: dict[frozenset[str], Pair] = {}
    for pair in (*known, *pairs):
        once.setdefault(frozenset((pair.a.label, pair.b.label)), pair)
    return tuple(once.values())[len(known) :]
