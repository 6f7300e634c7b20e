"""The tables of a report that look at one arm at a time, as blocks of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anydepth.eval.aggregate import layer_shares
from anydepth.eval.compare.compare import answers_wanted
from anydepth.eval.compare.factors import effective_policy, factors, policy_words, signals_words, value_words
from anydepth.eval.numbers import digits, percent, points
from anydepth.eval.report.files import Entry, Section, not_run
from anydepth.eval.report.page import BAD, WORDS, Bar, Block, Cell, Row, Table, tint
from anydepth.eval.report.pairs import Pairs, doubles
from anydepth.eval.report.plot import Point

MANY_GROUPS = 12
WORK = "segments read a question: sum of the depths of its generated tokens"


def setting_words(section: Section) -> dict[str, str]:
    """Each arm's exit policy, and those of its other settings that are not the same in all arms."""
    entries = section.entries
    names = {
        factor.name
        for entry in entries[1:]
        for group in factors(entries[0].settings, entry.settings)
        for factor in group
        if factor.name not in ("exit policy", "exit_threshold", "depth", "min_depth", "max_depth", "profile")
    }
    if "lateness" in names:  # which the words for signals have
        names = names - {"lateness"} | {"signals"}
    plain = ("backend", "fill", "signals")
    shown = [name for name in plain if name in names] + sorted(names - {*plain})
    return {entry.label: " · ".join([policy_words(entry.settings), *_values(entry, shown)]) for entry in entries}


def _values(entry: Entry, names: Sequence[str]) -> list[str]:
    return [
        signals_words(entry.settings)
        if name == "signals"
        else value_words(entry.settings[name])
        if name in ("backend", "fill")
        else f"{name} {value_words(entry.settings[name])}"
        for name in names
        if entry.settings.get(name) is not None and (name != "signals" or signals_words(entry.settings) != "sync")
    ]


def pareto_points(section: Section, pairs: Pairs) -> list[Point]:
    """The arms with an accuracy; those that differ in threshold or depth alone are one series. A late arm that answers
    as its synchronous form does would be the same point again."""
    words = setting_words(section)
    found = []
    for entry in section.complete:
        result, settings = entry.found, entry.settings
        if result["accuracy"] is None or entry.label in doubles(pairs):
            continue
        read, executed = result["segments_read_per_question"], result["segments_executed_per_question"]
        series = " · ".join([_series(settings), *words[entry.label].split(" · ")[1:]])
        found.append(
            Point(
                label=entry.label,
                x=read,
                accuracy=result["accuracy"],
                low=result["low"],
                high=result["high"],
                series="full depth" if effective_policy(settings) == "never" else series,
                hollow=executed > 1.02 * read,
            )
        )
    return sorted(found, key=lambda point: point.series != "full depth")


def _series(settings: Mapping[str, Any]) -> str:
    bounds = [f"min_depth {settings['min_depth']}"] if (settings.get("min_depth") or 1) > 1 else []
    return ", ".join([settings["policy"], *bounds])


def arms_block(section: Section, pairs: Pairs, *, strong: str | None) -> Block:
    """Every arm in numbers, those not run or not complete too."""
    words = setting_words(section)
    rows: list[Row] = []
    full = pairs.baseline.found["segments_executed_per_question"] if pairs.baseline else None
    for entry in section.entries:
        if not entry.complete:
            there = f"{len(entry.record.samples)} of {answers_wanted(entry.record)} answers"
            rows.append((entry.label, Cell(there, mark=BAD), *["–"] * 9, Cell(words[entry.label], mark=WORDS)))
            continue
        found = entry.found
        executed = found["segments_executed_per_question"]
        rows.append(
            (
                entry.label,
                f"{found['n']:,}",
                Cell(percent(found["accuracy"]), f"{percent(found['low'])}–{percent(found['high'])}"),
                str(found["unparseable"]),
                str(found["unscored"]),
                str(found["length_stops"]),
                digits(found["mean_depth"]),
                digits(found["tokens_per_question"], 1),
                digits(found["segments_read_per_question"], 1),
                digits(executed, 1),
                percent(executed / full if full and executed is not None else None, 0),
                Cell(words[entry.label], mark=WORDS),
            )
        )
    for plan in section.plans:
        rows += [(name, Cell("not run", mark=BAD), *["–"] * 9, "") for name in not_run(plan)]
    names = [entry.label for entry in section.entries]
    base = pairs.baseline.label if pairs.baseline else "full depth"
    return Block(
        title="Arms",
        note=f"Right answers with the 95 % interval of each arm alone. Unread: nothing to extract, counted as wrong. "
        f"Unscored: no verdict, left out. Depth and segments count decode tokens; executed segments are those that "
        f"were really run, also as a share of those of {base}.",
        tables=(
            Table(
                head=(
                    "arm",
                    "answers",
                    "right, %",
                    "unread",
                    "unscored",
                    "cut off",
                    "mean depth",
                    "tokens/ question",
                    "read/ question",
                    "executed/ question",
                    "% executed",
                    "settings",
                ),
                rows=tuple(rows),
                strong=frozenset({names.index(strong)} if strong in names else ()),
            ),
        ),
    )


def extractors_block(section: Section) -> Block | None:
    """Accuracy by each extractor, where there are several, and the gap between the first two."""
    found = {entry.label: entry.found.get("by_extractor") or {} for entry in section.complete}
    names = list(dict.fromkeys(name for extracted in found.values() for name in extracted))
    if len(names) < 2:
        return None
    rows: list[Row] = []
    for label, extracted in found.items():
        if not extracted:
            continue
        cells = [
            Cell(percent(e["accuracy"]), f"{percent(e['low'])}–{percent(e['high'])}") if e else "–"
            for e in map(extracted.get, names)
        ]
        unread = [str(e["unparseable"]) if e else "–" for e in map(extracted.get, names)]
        gap = points(_less(extracted.get(names[1]), extracted.get(names[0])))
        rows.append((label, *cells, gap, *unread))
    heads = (*(f"{name}, %" for name in names), f"{names[1]} − {names[0]}, pp", *(f"unread, {name}" for name in names))
    return Block(
        title="By extractor",
        note=f"The same answers, read in {len(names)} ways. The {names[0]} one is scored.",
        tables=(Table(head=("arm", *heads), rows=tuple(rows)),),
    )


def _less(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> float | None:
    values = [side and side["accuracy"] for side in (one, other)]
    return None if None in values else values[0] - values[1]  # type: ignore[operator]


def metrics_block(section: Section) -> Block | None:
    """The task's own figures."""
    found = {entry.label: entry.found.get("metrics") or {} for entry in section.complete}
    names = list(dict.fromkeys(name for metrics in found.values() for name in metrics))
    if not names:
        return None
    rows = tuple((label, *(digits(metrics.get(name), 4) for name in names)) for label, metrics in found.items())
    return Block(title="The task's own figures", tables=(Table(head=("arm", *names), rows=rows),))


def depths_block(section: Section) -> Block | None:
    """Shares of the depths at which decode tokens were read."""
    entries = [entry for entry in section.complete if entry.found["depth_histogram"]]
    if not entries:
        return None
    if layered := all(entry.settings.get("exit_layers") for entry in entries):
        places = sorted({layer for entry in entries for layer in entry.settings["exit_layers"]})
        found = [layer_shares(entry.found, entry.settings) for entry in entries]
    else:
        places = list(range(1, max(entry.settings["segments"] for entry in entries) + 1))
        found = [_depth_shares(entry.found["depth_histogram"]) for entry in entries]
    word, rows = "layer" if layered else "depth", list[Row]()
    for entry, shares in zip(entries, found, strict=True):
        each = [(place, shares.get(place, 0.0)) for place in places]
        parts = [(f"{word} {p}", share, tint(n, len(places))) for n, (p, share) in enumerate(each, 1) if share]
        mean = sum(place * share for place, share in each)
        rows.append((entry.label, Bar(tuple(parts)), digits(mean), *(percent(share) for _, share in each)))
    names = [f"{word} {place}" if layered else str(place) for place in places]
    return Block(
        title="Depths",
        note=f"Shares of decode tokens read {'after' if layered else 'at'} each {word}, in %. An answer's first token "
        f"comes from the prompt, at full depth, and is left out.",
        tables=(
            Table(head=("arm", "shallow to deep", f"mean {word}" if layered else "mean", *names), rows=tuple(rows)),
            *_levels(entries, max(entry.settings["segments"] for entry in entries)),
            *_tallies(entries),
        ),
    )


def _depth_shares(counts: Mapping[str, int]) -> dict[int, float]:
    total = sum(counts.values())
    return {int(depth): count / total for depth, count in counts.items()}


def latency_block(section: Section) -> Block | None:
    """Seconds of a whole answer, with what they depend on."""
    rows: list[Row] = []
    for entry in section.complete:
        p50, p95 = (entry.found.get("latency_s", {}).get(q) for q in ("p50", "p95"))
        if p50 is None:
            continue
        threads = entry.record.provenance.get("threads")
        settings = (entry.settings.get("concurrency"), entry.settings.get("max_tokens"), threads)
        tokens = digits(entry.found["tokens_per_question"], 1)
        rows.append((entry.label, digits(p50, 3), digits(p95, 3), tokens, *map(value_words, settings)))
    if not rows:
        return None
    return Block(
        title="Latency",
        note="Seconds from an answer's beginning to its end, beside the others that were under way; of choices, until "
        "all of a question are scored. Arms were run one after the other: the machine's other work is in it.",
        tables=(
            Table(
                head=("arm", "median, s", "p95, s", "tokens/ question", "at a time", "most tokens", "threads"),
                rows=tuple(rows),
            ),
        ),
    )


def _levels(entries: Sequence[Entry], segments: int) -> list[Table]:
    """Mean depth of the tokens that take so many steps of work, where the task marks them."""
    found = {entry.label: entry.found.get("depth_by_level") or {} for entry in entries}
    columns = sorted({level for levels in found.values() for level in levels}, key=int)
    if not columns:
        return []
    rows = tuple(
        (
            label,
            *(
                Cell(digits(levels[c]["mean_depth"]), back=tint(levels[c]["mean_depth"], segments))
                if c in levels
                else "–"
                for c in columns
            ),
        )
        for label, levels in found.items()
    )
    heads = [f"{level} step{'s' if level != '1' else ''}" for level in columns]
    return [Table(head=("mean depth of tokens by steps of work", *heads), rows=rows)]


def _tallies(entries: Sequence[Entry]) -> list[Table]:
    """What policies count of themselves: of `confidence`, which of its tests kept rows."""
    found = {entry.label: entry.found["tallies"] for entry in entries if entry.found.get("tallies")}
    names = list(dict.fromkeys(name for tallies in found.values() for name in tallies))
    rows = [(label, *(str(tallies.get(name, "–")) for name in names)) for label, tallies in found.items()]
    heads = (name.replace("_by_", " by ").replace("_", " ") + " alone" * ("_by_" in name) for name in names)
    return [Table(head=("how often a policy's tests kept a row", *heads), rows=tuple(rows))] if rows else []


def groups_block(section: Section, pairs: Pairs) -> Block | None:
    """Accuracy by group; of many groups a summary an arm, with the rest on demand."""
    entries = section.complete
    names = list(dict.fromkeys(group for entry in entries for group in entry.found["by_group"]))
    if not names:
        return None
    found = {entry.label: {name: entry.found["by_group"].get(name) for name in names} for entry in entries}
    counts = [max((g[name] or {"n": 0})["n"] for g in found.values()) for name in names]
    heads = [f"{name} (n {count})" for name, count in zip(names, counts, strict=True)]
    if len(names) <= MANY_GROUPS:
        rows = tuple((label, *(_group(groups[name]) for name in names)) for label, groups in found.items())
        return Block(title="By group", note="Right answers, %.", tables=(Table(head=("arm", *heads), rows=rows),))
    everything = tuple(
        (head, *(_group(groups[name]) for groups in found.values())) for head, name in zip(heads, names, strict=True)
    )
    return Block(
        title="By group",
        note=f"{len(names)} groups; their mean gives each the same weight. Groups are small: the largest of so many "
        f"losses is large by chance alone.",
        tables=(
            _extremes(found, pairs),
            Table(head=("group", *found), rows=everything, folded=f"Right answers of all {len(names)} groups, %"),
        ),
    )


def _group(found: Mapping[str, Any] | None) -> str | Cell:
    if found is None or found["accuracy"] is None:
        return "–"
    return Cell(percent(found["accuracy"]), back=f"rgba(26, 127, 75, {0.3 * found['accuracy']:.2f})")


def _extremes(found: Mapping[str, Mapping[str, Mapping[str, Any] | None]], pairs: Pairs) -> Table:
    rows: list[Row] = []
    for label, groups in found.items():
        scores = {name: g["accuracy"] for name, g in groups.items() if g and g["accuracy"] is not None}
        if not scores:
            continue
        low, high = min(scores, key=scores.__getitem__), max(scores, key=scores.__getitem__)
        row: list[str | Cell] = [label, percent(sum(scores.values()) / len(scores))]
        row += [Cell(percent(scores[low]), low), Cell(percent(scores[high]), high)]
        against = pairs.against.get(label)
        base = found[against.b.label] if against else {}
        losses = {name: score - base[name]["accuracy"] for name, score in scores.items() if base.get(name)}  # type: ignore[index]
        worst = min(losses, key=losses.__getitem__, default=None)
        row.append(Cell(points(losses[worst], 1), f"{worst}, against {against.b.label}") if worst and against else "–")
        rows.append(tuple(row))
    return Table(head=("arm", "mean of groups", "lowest", "highest", "largest loss, pp"), rows=tuple(rows))
