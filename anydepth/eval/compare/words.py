"""A comparison in words and as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from anydepth.eval.compare.compare import Comparison
from anydepth.eval.compare.factors import Factor
from anydepth.eval.compare.work import Estimate
from anydepth.eval.numbers import digits, interval, p_value, percent, points, signed

SIGNIFICANT = 0.05


def print_comparison(found: Comparison) -> None:
    """What `anydepth compare` says, on stdout."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("a question" if found.choices is None else "", no_wrap=True)
    for heading in (f"A: {found.a}", f"B: {found.b}", "A − B, A / B (95 %)"):
        table.add_column(heading, justify="right", min_width=11)
    for row in _figures(found):
        table.add_row(*row)
    console.print(table)
    for line in (*differing(found), *verdict(found), *where_they_part(found)):
        console.print(line, soft_wrap=True)


def _figures(found: Comparison) -> list[Sequence[str]]:
    """Rows of (what, A, B, how they relate); intervals stand below."""
    rows: list[Sequence[str]] = []
    if found.outcome is not None:
        result, sides = found.outcome.result, (found.outcome.a, found.outcome.b)
        right = [f"{percent(x['accuracy'], 2)}\n{percent(x['low'])}–{percent(x['high'])}" for x in sides]
        rows.append(("right %", *right, f"{points(result.difference)} pp\n{interval(result.interval)}"))
        rows.append(("only this one right", str(found.outcome.gains), str(found.outcome.losses), ""))
    for name, work in (("segments read", found.read), ("segments executed", found.executed)):
        rows.append((name, digits(work.a, 1), digits(work.b, 1), _estimate(work.ratio)))
    if found.choices is None:
        value, low, high = (signed(value) for value in found.tokens.difference)
        rows.append(("tokens", digits(found.tokens.a, 1), digits(found.tokens.b, 1), f"{value}\n{low} to {high}"))
        rows.append(("cut off by length", *map(str, found.length_stops), ""))
    if any(found.unscored):
        rows.append(("unscored", *map(str, found.unscored[:2]), f"{found.unscored[2]} left out"))
    return rows


def _estimate(ratio: Estimate | None) -> str:
    if ratio is None:
        return "–"
    return f"× {digits(ratio.value, 3)}\n{digits(ratio.low, 3)}–{digits(ratio.high, 3)}"


def differing(found: Comparison) -> list[str]:
    """What differs in the settings, with a warning where that is more than one factor."""
    lines = [f"Differs in: {factor_words(found.factors)}"]
    if not found.factors:
        lines = ["No setting differs that could make a difference."]
    elif len(found.factors) > 1:
        lines.append(
            f"WARNING: {len(found.factors)} factors differ, so what is found below cannot be put down to one of them."
        )
    if found.without_effect:
        lines.append(f"Without effect in these runs: {factor_words(found.without_effect)}")
    if found.environment:
        lines.append(f"Made under different conditions: {factor_words(found.environment)}")
    return lines


def factor_words(factors: Sequence[Factor]) -> str:
    return "; ".join(f"{name} ({a} against {b})" for name, a, b in factors) or "nothing"


def verdict(found: Comparison) -> list[str]:
    """What the scores say, without taking "not significant" for "equal"."""
    outcome = found.outcome
    if outcome is None:
        return [f"Nothing to say about accuracy: of {found.answers} answers none has a score in both."]
    result = outcome.result
    limits = f"the 95 % interval of A − B is {interval(result.interval)} pp"
    if outcome.gains + outcome.losses == 0:
        lines = [f"All {outcome.n} scored answers are worth the same in both; {limits}."]
    elif result.p < SIGNIFICANT:
        kind = "more" if result.difference > 0 else "less"
        lines = [f"A is {kind} accurate than B: {outcome.test}, p = {p_value(result.p)}; {limits}."]
    else:
        lines = [
            f"No difference in accuracy was shown: {outcome.test}, p = {p_value(result.p)}. That is not equality: "
            f"{limits}."
        ]
    if found.margin_pp is not None:
        lower = f"the lower 95 % limit of A − B is {points(result.lower_limit)} pp"
        lines.append(
            f"A is non-inferior to B at a margin of {found.margin_pp:g} pp: {lower}."
            if found.non_inferior
            else f"A was not shown to be non-inferior to B at a margin of {found.margin_pp:g} pp: {lower}."
        )
    return lines


def where_they_part(found: Comparison) -> list[str]:
    """How many answers, tokens and depths differ, and what came before the first difference."""
    lines = [f"{found.answers_differ} of {found.answers} answers differ."]
    if (choices := found.choices) is not None:
        return [
            *lines,
            f"Another choice is likelier in {choices.chosen_differ} questions; the largest distance of a token's "
            f"logprobs is {choices.most_logprob_difference:.2g}; depths differ in {choices.depths_differ}."
            + (f" In {choices.possible_differ} a token is impossible in one alone." * bool(choices.possible_differ)),
        ]
    found_ids = found.sequences
    if found_ids is None:
        return lines
    if not found_ids.differ:
        lines.append("Token ids and depths are the same throughout.")
    else:
        lines.append(
            f"Token ids differ in {found_ids.tokens_differ} answers, depths in {found_ids.depths_differ}, either in "
            f"{found_ids.differ}; {percent(found_ids.common_prefix_share)} % of an answer comes before the first other "
            f"token."
        )
    if spread := found_ids.first_token:
        lines.append(
            f"The first other token: at index {spread.median:g} in the median ({spread.least:g} to {spread.most:g}). "
            f"With the same tokens and K/V before it: {found_ids.another_depth} where this step was read at "
            f"another depth, {found_ids.same_depth} at the same depth. With another K/V before it: "
            f"{found_ids.another_context}."
        )
    if found_ids.depths_differ:
        lines.append(
            f"The first other depth came after the same tokens and K/V in {found_ids.depth_first_in_same_context} of "
            f"{found_ids.depths_differ}."
        )
    if difference := found_ids.depth_difference:
        deeper = "deeper" if difference > 0 else "shallower"
        lines.append(
            f"While the tokens are the same, A is read {digits(abs(difference), 2)} segments {deeper} a token."
        )
    if executed := found_ids.executed_difference:
        more = "more" if executed > 0 else "less"
        lines.append(
            f"In the answers with the same tokens throughout, A executes {digits(abs(executed), 2)} segments {more} a "
            f"token."
        )
    return lines
