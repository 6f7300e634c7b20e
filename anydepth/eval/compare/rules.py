"""Rules of a study: what they say of a comparison, and whether they were set before the first answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from anydepth.eval.compare.compare import Comparison
from anydepth.eval.numbers import p_value, points

BEFOREHAND = "set beforehand"


class Told(NamedTuple):
    """A rule as it was written down, and when."""

    rule: Mapping[str, Any]
    since: str

    @property
    def beforehand(self) -> bool:
        return self.since == BEFOREHAND


class Verdict(NamedTuple):
    """`met` is None where it cannot be judged; `reasons` has one sentence a bound, or why not."""

    met: bool | None
    reasons: tuple[str, ...]


def rules_told(plans: Sequence[Mapping[str, Any]]) -> list[Told]:
    """Every rule of a study's plans (lines of study.jsonl, in order): those of the last plan, then those that were
    replaced or dropped after the first answer.

    A rule counts as set beforehand if the last plan without an answer has it word for word.
    """
    if not plans:
        return []
    before: Sequence[Mapping[str, Any]] = next((plan["rules"] for plan in reversed(plans) if plan["answers"] == 0), [])
    names = {rule["name"] for rule in before}
    told = []
    for rule in plans[-1]["rules"]:
        since = _answers_at_first(plans, lambda plan, rule=rule: rule in plan["rules"])
        changed = "changed" if rule["name"] in names else "added"
        told.append(Told(rule, BEFOREHAND if rule in before else f"{changed} after {since} answers"))
    for rule in before:
        if rule not in plans[-1]["rules"]:
            gone = _answers_at_first(plans, lambda plan, rule=rule: plan["answers"] > 0 and rule not in plan["rules"])
            replaced = any(rule["name"] == later["name"] for later in plans[-1]["rules"])
            told.append(Told(rule, f"{BEFOREHAND}, {'replaced' if replaced else 'dropped'} after {gone} answers"))
    return told


def _answers_at_first(plans: Sequence[Mapping[str, Any]], holds: Any) -> int:
    answers: int = next(plan["answers"] for plan in plans if holds(plan))
    return answers


def judge(rule: Mapping[str, Any], found: Comparison) -> Verdict:
    """Whether every bound of a rule holds for the comparison of its pair."""
    if rule.get("identical"):
        return _identical(found)
    if found.outcome is None:
        return Verdict(None, ("no answer is scored in both arms",))
    result, test = found.outcome.result, found.outcome.test
    difference = f"A − B is {points(result.difference)} pp"
    held, reasons = [], []
    if (bound := rule.get("p_below")) is not None:
        held.append(result.p < bound)
        reasons.append(f"p = {p_value(result.p)} ({test}) is {'' if held[-1] else 'not '}below {bound:g}")
    if (bound := rule.get("min_abs_difference_pp")) is not None:
        held.append(abs(100 * result.difference) >= bound)
        reasons.append(f"{difference}, {'at least' if held[-1] else 'less than'} {bound:g} pp either way")
    if (bound := rule.get("non_inferior_margin_pp")) is not None:
        held.append(result.non_inferior(bound / 100))
        relation = "above" if held[-1] else "not above"
        reasons.append(f"the lower 95 % limit of A − B, {points(result.lower_limit)} pp, is {relation} −{bound:g} pp")
    return Verdict(all(held), tuple(reasons))


def _identical(found: Comparison) -> Verdict:
    """Ids and depths of generated answers, or logprobs and depths of choices: the same in every answer."""
    if (choices := found.choices) is not None:
        same = not choices.depths_differ and choices.most_logprob_difference == 0 and not choices.possible_differ
        told = (
            f"depths differ in {choices.depths_differ} of {choices.answers:,} answers, logprobs by up to "
            f"{choices.most_logprob_difference:.2g}, and what is possible in {choices.possible_differ}"
        )
        return Verdict(
            same, (f"logprobs and depths are the same in all {choices.answers:,} answers" if same else told,)
        )
    assert found.sequences is not None, "answers without choices are compared as sequences"
    ids = found.sequences
    if ids.differ == 0:
        return Verdict(True, (f"token ids and depths are the same in all {ids.answers:,} answers",))
    told = f"token ids differ in {ids.tokens_differ} and depths in {ids.depths_differ} of {ids.answers:,} answers"
    return Verdict(False, (told,))


def rule_words(rule: Mapping[str, Any]) -> str:
    """A rule's bounds: "B1 against B0: p below 0.05, difference of at least 1 pp"."""
    said = {
        "p_below": "p below {:g}",
        "min_abs_difference_pp": "difference of at least {:g} pp",
        "non_inferior_margin_pp": "non-inferior at a margin of {:g} pp",
    }
    bounds = [words.format(rule[key]) for key, words in said.items() if rule.get(key) is not None]
    if rule.get("identical"):
        bounds = ["identical token ids and depths"]
    return f"{rule['compare'][0]} against {rule['compare'][1]}: {', '.join(bounds)}"
