"""The tables of a report that hold arms against each other, as blocks of a page."""

from __future__ import annotations

from anydepth.eval.compare.factors import effective_policy, signals_words
from anydepth.eval.compare.rules import rule_words
from anydepth.eval.compare.words import SIGNIFICANT, factor_words
from anydepth.eval.compare.work import Work
from anydepth.eval.numbers import digits, interval, p_value, percent, points, signed
from anydepth.eval.report.page import BAD, GOOD, WORDS, Block, Cell, Row, Table
from anydepth.eval.report.pairs import Pair, Pairs, same_policy


def pairs_block(pairs: Pairs, *, margin_pp: float) -> Block | None:
    """Every pair: what differs, and what came of it."""
    if not pairs.pairs:
        return None
    rows = tuple(_pair_row(pair) for pair in pairs.pairs)
    tests = sorted({pair.found.outcome.test for pair in pairs.pairs if pair.found.outcome})
    note = (
        f"Differences are A − B on the same questions. p: {' or '.join(tests) or 'none'}; Holm: adjusted over the "
        f"{len(rows)} pairs of this table. “Non-inferior”: the lower 95 % limit of A − B is above −{margin_pp:g} pp. "
        f"That no difference was shown doesn't make two arms equal."
    )
    head = (
        "A − B",
        "differs in",
        "right, pp",
        "only A / B right",
        "p",
        "p (Holm)",
        f"verdict at {margin_pp:g} pp",
        "answers differ",
        "executed, A / B",
        "tokens/ question, A − B",
    )
    return Block(title="Pairs", note=note, tables=(Table(head=head, rows=rows),))


def _pair_row(pair: Pair) -> Row:
    found = pair.found
    outcome = found.outcome
    count = len(found.factors)
    differing = ", ".join(factor.name for factor in found.factors) or "nothing that matters"
    scores: tuple[str | Cell, ...] = ("–", "–", "–", "–", "nothing is scored")
    if outcome is not None:
        scores = (
            Cell(points(outcome.result.difference), interval(outcome.result.interval)),
            f"{outcome.gains} / {outcome.losses}",
            p_value(outcome.result.p),
            p_value(pair.adjusted),
            _verdict(pair),
        )
    return (
        f"{pair.a.label} − {pair.b.label}",
        Cell(f"{count} factors: {differing}", mark=BAD) if count > 1 else differing,
        *scores,
        f"{found.answers_differ} of {found.answers}",
        _ratio(found.executed),
        _difference(found.tokens) if found.choices is None else "–",
    )


def _ratio(work: Work) -> Cell:
    if work.ratio is None:
        return Cell("–")
    return Cell(digits(work.ratio.value, 3), f"{digits(work.ratio.low, 3)}–{digits(work.ratio.high, 3)}")


def _difference(work: Work) -> Cell:
    value, low, high = (signed(x) for x in work.difference)
    return Cell(value, f"{low} to {high}")


def _verdict(pair: Pair) -> Cell:
    assert pair.found.outcome is not None and pair.adjusted is not None
    difference = pair.found.outcome.result.difference
    if pair.adjusted < SIGNIFICANT:
        shown = "A more accurate" if difference > 0 else "A less accurate"
    else:
        shown = "no difference shown"
    if pair.found.non_inferior:
        return Cell("non-inferior", shown, mark=GOOD)
    return Cell("not shown non-inferior", shown, mark=BAD if pair.adjusted < SIGNIFICANT and difference < 0 else "")


def agreement_block(pairs: Pairs) -> Block | None:
    """How far arms that may leave early say what their baseline at full depth says."""
    rows: list[Row] = []
    for pair in pairs.against.values():
        if effective_policy(pair.b.settings) != "never" or effective_policy(pair.a.settings) == "never":
            continue
        found, choices = pair.found.sequences, pair.found.choices
        if found is not None and found.answers:
            same = Cell(percent(1 - found.tokens_differ / found.answers), f"of {found.answers:,}")
            rows.append((f"{pair.a.label} − {pair.b.label}", same, percent(found.common_prefix_share)))
        elif choices is not None and choices.answers:
            same = Cell(percent(1 - choices.chosen_differ / choices.answers), f"of {choices.answers:,}")
            rows.append((f"{pair.a.label} − {pair.b.label}", same, "–"))
    if not rows:
        return None
    return Block(
        title="Agreement with full depth",
        note="Answers with the very same token ids (of choices: with the same one chosen), and the mean share of an "
        "answer that comes before the first other token. Once answers part, their tokens are not comparable.",
        tables=(Table(head=("A − B", "same answers, %", "before they part, %"), rows=tuple(rows)),),
    )


def parting_block(pairs: Pairs) -> Block | None:
    """Where answers part ways, pair by pair."""
    rows: list[Row] = []
    for pair in (*pairs.pairs, *pairs.equal):
        if (found := pair.found.sequences) is not None:
            first = found.first_token
            rows.append(
                (
                    f"{pair.a.label} − {pair.b.label}",
                    f"{found.tokens_differ} of {found.answers}",
                    f"{found.depths_differ} of {found.answers}",
                    Cell(f"{first.median:g}", f"{first.least:g}–{first.most:g}") if first else "–",
                    str(found.another_depth),
                    str(found.same_depth),
                    str(found.another_context),
                    signed(found.depth_difference, 2),
                )
            )
        elif (choices := pair.found.choices) is not None:
            other = f"{choices.depths_differ} of {choices.answers}"
            chosen = Cell(f"{choices.chosen_differ} choices", f"logprobs within {choices.most_logprob_difference:.2g}")
            rows.append((f"{pair.a.label} − {pair.b.label}", chosen, other, "–", "–", "–", "–", "–"))
    if not rows:
        return None
    return Block(
        title="Where answers part ways",
        note="The first output token that differs, by what came before it. With the same tokens and K/V before it, the "
        "step itself made the difference: it was read at another depth, or at the same depth in other arithmetic. Else "
        "earlier tokens had left another K/V behind. Last: how much deeper A is read, in segments a token, while the "
        "tokens are still the same.",
        tables=(
            Table(
                head=(
                    "A − B",
                    "tokens differ",
                    "depths differ",
                    "first at index, median",
                    "read at another depth",
                    "at the same depth",
                    "after another K/V",
                    "depth on shared tokens",
                ),
                rows=tuple(rows),
            ),
        ),
    )


def kv_block(pairs: Pairs) -> Block | None:
    """What filling skipped depths approximately costs, apart from leaving early itself (B1 - A1)."""
    rows: list[Row] = []
    for pair in pairs.kv:
        outcome = pair.found.outcome
        also = [factor for factor in pair.found.factors if factor.name != "fill"]
        rows.append(
            (
                f"{pair.a.label} − {pair.b.label}",
                f"{pair.a.settings['fill']} − {pair.b.settings['fill']}",
                Cell(points(outcome.result.difference), interval(outcome.result.interval)) if outcome else "–",
                f"{outcome.gains} / {outcome.losses}" if outcome else "–",
                p_value(outcome.result.p) if outcome else "–",
                _ratio(pair.found.read),
                Cell(factor_words(also), mark=BAD) if also else "nothing",
            )
        )
    if not rows:
        return None
    return Block(
        title="Effect of approximate K/V",
        note="The same exit settings; what the skipped depths hold is a stand-in in the first arm and computed in the "
        "second. Where something else differs too, the effect is not of K/V alone.",
        tables=(
            Table(
                head=("A − B", "fill", "right, pp", "only A / B right", "p", "read, A / B", "also differs"),
                rows=tuple(rows),
            ),
        ),
    )


def split_block(pairs: Pairs) -> Block | None:
    """An early arm's change against full depth (B1 - B0) as a sum: of the decision to leave (B1x - B0), with exact K/V,
    and of the K/V that stands in for the rest (B1 - B1x)."""
    rows: list[Row] = []
    for pair in pairs.kv:
        whole, decision = pairs.against.get(pair.a.label), pairs.against.get(pair.b.label)
        if whole is None or decision is None or whole.b.label != decision.b.label:
            continue
        parts = [each.found.outcome for each in (whole, decision, pair)]
        cells = [
            Cell(points(part.result.difference), f"{interval(part.result.interval)}, p = {p_value(part.result.p)}")
            if part
            else Cell("–")
            for part in parts
        ]
        rows.append((pair.a.label, whole.b.label, cells[0], pair.b.label, cells[1], cells[2]))
    if not rows:
        return None
    head = ("arm", "full depth", "change, pp", "with exact K/V", "of the decision to leave, pp", "of the K/V, pp")
    return Block(
        title="What leaving early costs: the decision and the K/V",
        note="The change of right answers against full depth is that of the same exits with exact K/V, and what the "
        "stand-in for the skipped K/V adds to it.",
        tables=(Table(head=head, rows=tuple(rows)),),
    )


def late_block(pairs: Pairs) -> Block | None:
    """What late signals change, and what they cost: arms that differ in their signals alone."""
    rows: list[Row] = []
    for pair in pairs.late:
        outcome, found, executed = pair.found.outcome, pair.found.sequences, pair.found.executed
        rows.append(
            (
                f"{pair.a.label} − {pair.b.label}",
                f"{signals_words(pair.a.settings)} − {signals_words(pair.b.settings)}",
                *_differing(pair),
                Cell(points(outcome.result.difference), interval(outcome.result.interval)) if outcome else "–",
                f"{outcome.gains} / {outcome.losses}" if outcome else "–",
                p_value(outcome.result.p) if outcome else "–",
                digits(executed.a, 1),
                digits(executed.b, 1),
                Cell(signed(found.depth_difference, 2), f"{found.shared_tokens:,} tokens") if found else "–",
                Cell(signed(found.executed_difference, 2), f"{found.same_tokens:,} tokens") if found else "–",
            )
        )
    if not rows:
        return None
    return Block(
        title="Late signals",
        note="The same exit settings; what the host has read by then differs. exact and resident are to answer as sync "
        "does, delayed as its own synchronous form does, which follows another policy than sync: no quality baseline. "
        "p is not adjusted here. Extra segments a token, A − B: read, over the tokens before the first other one; "
        "executed, over the answers without another token.",
        tables=(
            Table(
                head=(
                    "A − B",
                    "signals",
                    "ids differ",
                    "depths differ",
                    "right, pp",
                    "only A / B right",
                    "p",
                    "executed/ question, A",
                    "B",
                    "extra read a token",
                    "extra executed a token",
                ),
                rows=tuple(rows),
            ),
        ),
    )


def _differing(pair: Pair) -> tuple[Cell, Cell]:
    """Answers with other token ids (of choices: with another one chosen), and with other depths."""
    found, choices = pair.found.sequences, pair.found.choices
    if found is not None:
        counts = found.tokens_differ, found.depths_differ
    else:
        assert choices is not None, "answers have ids or choices"
        counts = choices.chosen_differ, choices.depths_differ
    one, other = (
        Cell(f"{count:,} of {pair.found.answers:,}", mark=BAD if count and same_policy(pair) else "")
        for count in counts
    )
    return one, other


def rules_block(pairs: Pairs) -> Block | None:
    """Verdicts of the study's rules, with when each was written down."""
    if not pairs.judged:
        return None
    rows: list[Row] = []
    words = {True: ("met", GOOD), False: ("not met", BAD), None: ("cannot be judged", "")}
    for judged in pairs.judged:
        text, mark = words[judged.verdict.met]
        told = judged.told
        rows.append(
            (
                told.rule["name"],
                Cell(rule_words(told.rule), mark=WORDS),
                told.since if told.beforehand else Cell(told.since, mark=BAD),
                Cell(text, mark=mark),
                Cell("; ".join(judged.verdict.reasons), mark=WORDS),
            )
        )
    return Block(
        title="Rules",
        note="A rule counts as set beforehand if it was written down, as it stands, before the first answer.",
        tables=(Table(head=("rule", "bounds", "written down", "verdict", "because"), rows=tuple(rows)),),
    )
