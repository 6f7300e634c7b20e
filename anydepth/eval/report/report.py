"""A report out of Records alone: one self-contained HTML page, the same in Markdown, and the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anydepth.eval.compare.factors import effective_policy
from anydepth.eval.numbers import digits, percent, points
from anydepth.eval.report import plot
from anydepth.eval.report.arms import (
    WORK,
    arms_block,
    depths_block,
    extractors_block,
    groups_block,
    latency_block,
    metrics_block,
    pareto_points,
)
from anydepth.eval.report.bench import bench_block
from anydepth.eval.report.deviations import deviations
from anydepth.eval.report.files import Gathered, Section, gather, not_run
from anydepth.eval.report.page import Block, facts, markdown, template_environment
from anydepth.eval.report.pairs import Pair, Pairs, doubles, pair_up
from anydepth.eval.report.proposal import Proposal, propose, split_of
from anydepth.eval.report.verdicts import (
    agreement_block,
    kv_block,
    late_block,
    pairs_block,
    parting_block,
    rules_block,
    split_block,
)
from anydepth.record import Record, write_atomically

HTML, MARKDOWN = "report.html", "report.md"
MARGIN_PP = 1.0


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """What the page says of one section: a title, a sentence, three figures, and blocks."""

    title: str
    lead: str
    early: bool = False  # whether any arm leaves early
    figures: tuple[tuple[str, str], ...]
    blocks: tuple[Block, ...]
    facts: tuple[tuple[str, str], ...]


def report(
    folders: Sequence[str | Path], out: str | Path, *, margin_pp: float = MARGIN_PP, baseline: str | None = None
) -> dict[str, Any]:
    """Write report.html, report.md and the pictures into `out`; returns what `--json` prints.

    folders: of Records, studies and benches; everything below them is read. Published Records without samples show
    what their headers have. margin_pp: of non-inferiority. baseline: the arm that all are held against; by default each
    arm has the one at full depth from which it differs least. Records of different protocols are reported apart and
    never compared. The same files give the same bytes.

    Raises ValueError, naming the file, for one that is malformed or of a newer version, and without matplotlib.
    """
    if not 0 <= margin_pp < 100:
        raise ValueError(f"margin_pp is {margin_pp:g}; allowed: percentage points from 0, such as 1")
    gathered, out = gather(folders), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    chapters, results, written = [], [], []
    for number, section in enumerate(gathered.sections, start=1):
        pairs = pair_up(section, margin_pp=margin_pp, baseline=baseline)
        proposal = propose(section, pairs, gathered.certificates, margin_pp=margin_pp)
        name = "pareto.png" if number == 1 else f"pareto-{number}.png"
        picture, svg = _picture(section, pairs, out / name)
        written += [out / name] if picture else []
        chapters.append(_chapter(section, pairs, proposal, picture=picture, svg=svg, margin_pp=margin_pp))
        results.append(_result(section, pairs, proposal))
    chapters += [_bench_chapter(bench) for bench in gathered.benches]
    general = _general(gathered)
    write_atomically(out / HTML, _html(chapters, general).encode())
    write_atomically(out / MARKDOWN, _markdown(chapters, general).encode())
    return {
        "sections": results,
        "benches": len(gathered.benches),
        "deviations": list(general),
        "files": {"html": str(out / HTML), "markdown": str(out / MARKDOWN), "pictures": [str(p) for p in written]},
    }


def _picture(section: Section, pairs: Pairs, path: Path) -> tuple[str | None, str | None]:
    """The Pareto plot: its file's name, for Markdown, and an SVG, for HTML."""
    found = pareto_points(section, pairs)
    if not found:
        return None, None
    figure = plot.pareto(found, x_label=WORK)
    write_atomically(path, plot.png(figure))
    return path.name, plot.svg(figure, title="Accuracy over segments a question, by arm")


def _chapter(
    section: Section, pairs: Pairs, proposal: Proposal, *, picture: str | None, svg: str | None, margin_pp: float
) -> Chapter:
    strong = proposal.pair.a.label if proposal.pair else None
    hollow = any(point.hollow for point in pareto_points(section, pairs))
    note = "Up and to the left is better; bars are 95 % intervals of each arm alone."
    if doubles(pairs):
        note += " Late arms that answer as their synchronous form does are not drawn again."
    blocks = [
        Block(title="Proposal", lines=proposal.lines),
        Block(
            title="Accuracy against work",
            note=note + (" Hollow: the arm computed more segments than it read." if hollow else ""),
            picture=svg,
            picture_file=picture,
        )
        if picture
        else None,
        arms_block(section, pairs, strong=strong),
        extractors_block(section),
        metrics_block(section),
        rules_block(pairs),
        pairs_block(pairs, margin_pp=margin_pp),
        kv_block(pairs),
        split_block(pairs),
        late_block(pairs),
        agreement_block(pairs),
        parting_block(pairs),
        depths_block(section),
        latency_block(section),
        groups_block(section, pairs),
        Block(title="Deviations", lines=tuple(deviations(section)) or ("None that the Records know of.",)),
    ]
    first = section.entries[0].record
    found = facts(first.provenance, questions=first.settings_used["questions"])
    study_hashes = [plan.lines[-1].get("study_hash") for plan in section.plans if plan.lines]
    found += [("protocol", first.protocol_hash or "none recorded")]
    found += [("frozen study", hash) for hash in study_hashes if hash]
    return Chapter(
        title=_title(section),
        lead=_lead(section, pairs, proposal),
        early=any(effective_policy(entry.settings) != "never" for entry in section.entries),
        figures=_figures(pairs, proposal),
        blocks=tuple(block for block in blocks if block is not None),
        facts=tuple(found),
    )


def _title(section: Section) -> str:
    settings = section.entries[0].settings
    split = f", {settings['split']} split" if settings.get("split") else ""  # early Records do not say it
    return f"{_short(settings['model'])} on {settings['task']}{split}"


def _short(model: str) -> str:
    """A model's name; of a path, its last part."""
    return model.rstrip("/").rsplit("/", 1)[-1] if model.startswith(("/", ".", "~")) else model


def _lead(section: Section, pairs: Pairs, proposal: Proposal) -> str:
    """The report in a sentence or two."""
    settings, split = section.entries[0].settings, split_of(section)
    asked = f"Over {settings['questions']:,} {split + ' ' if split else ''}questions of {settings['task']}"
    pair = proposal.pair or _best_early(pairs)
    if pair is None or pair.found.outcome is None:
        scored = [entry for entry in section.complete if entry.found["accuracy"] is not None]
        best = max(scored, key=lambda entry: entry.found["accuracy"], default=None)
        if best is None:
            return f"{asked}, no arm has an accuracy yet."
        most = f", the most of {len(scored)} arms" if len(scored) > 1 else ""
        return f"{asked}, {best.label} gives {_share(best.found)} right answers{most}."
    a, b = pair.found.outcome.a, pair.found.outcome.b
    verdict = "is non-inferior" if pair.found.non_inferior else "was not shown to be non-inferior"
    executed = percent(pair.found.executed.share, 0)
    return (
        f"{asked}, {pair.a.label} gives {_share(a)} right answers, {pair.b.label} {_share(b)}. {pair.a.label} executes "
        f"{executed} % of {pair.b.label}’s segments and {verdict} to it at a margin of {pair.found.margin_pp:g} pp."
    )


def _share(found: Mapping[str, Any]) -> str:
    return f"{percent(found['accuracy'])} % ({percent(found['low'])}–{percent(found['high'])})"


def _best_early(pairs: Pairs) -> Pair | None:
    """The most accurate of the arms that leave early, of equal ones the cheapest, against its baseline."""
    early = [p for p in pairs.against.values() if effective_policy(p.a.settings) != "never" and p.found.outcome]
    return max(early, key=lambda p: (p.found.outcome.a["accuracy"], -p.found.executed.a), default=None)  # type: ignore[union-attr]


def _figures(pairs: Pairs, proposal: Proposal) -> tuple[tuple[str, str], ...]:
    """Three figures that stand out: accuracy, difference, work."""
    pair = proposal.pair or _best_early(pairs)
    if pair is None or pair.found.outcome is None:
        return ()
    a, b, result = pair.found.outcome.a, pair.found.outcome.b, pair.found.outcome.result
    executed = pair.found.executed
    low, high = result.interval
    return (
        (f"{percent(a['accuracy'])} %", f"right with {pair.a.label}; {percent(b['accuracy'])} % with {pair.b.label}"),
        (f"{points(result.difference, 1)} pp", f"on the same questions, 95 %: {points(low, 1)} to {points(high, 1)}"),
        (
            f"{percent(executed.share, 0)} %",
            f"of its segments: {digits(executed.a, 1)} a question instead of {digits(executed.b, 1)}",
        ),
    )


def _bench_chapter(bench: Record) -> Chapter:
    settings = bench.settings_used
    dirty = bench.provenance["anydepth"]["dirty"]
    return Chapter(
        title=f"Throughput of {_short(settings['model'])}",
        lead="",
        figures=(),
        blocks=(
            bench_block(bench, title="Matched work"),
            *([Block(title="Deviations", lines=("Made with changes to anydepth in no commit.",))] if dirty else []),
        ),
        facts=tuple(facts(bench.provenance)),
    )


def _general(gathered: Gathered) -> tuple[str, ...]:
    """What concerns the report as a whole."""
    said = []
    if len(gathered.sections) > 1:
        said.append(
            f"These Records are of {len(gathered.sections)} protocols (other questions, prompts, caps or models). Each "
            f"is reported apart; nothing is compared across them."
        )
    said += [f"A study of {len(plan.lines[-1]['arms'])} arms was planned and not begun." for plan in gathered.unstarted]
    hashes = {(e.record.provenance.get("model") or {}).get("hash") for s in gathered.sections for e in s.entries}
    if others := sum(certificate.model_hash not in hashes for certificate in gathered.certificates):
        said.append(f"{others} certificate{'s' if others > 1 else ''} among the files: of other models, left out.")
    return tuple(said)


def _result(section: Section, pairs: Pairs, proposal: Proposal) -> dict[str, Any]:
    """A section as JSON."""
    keys = ("n", "accuracy", "low", "high", "mean_depth", "tokens_per_question", "segments_read_per_question")
    return {
        "title": _title(section),
        "baseline": pairs.baseline and pairs.baseline.label,
        "arms": [
            {"name": e.label, **{key: e.found[key] for key in (*keys, "segments_executed_per_question")}}
            for e in section.complete
        ],
        "not_run": [name for plan in section.plans for name in not_run(plan)],
        "pairs": [
            {**pair.found.asdict(), "why": pair.why, "p_holm": pair.adjusted} for pair in (*pairs.pairs, *pairs.equal)
        ],
        "rules": [
            {"rule": dict(j.told.rule), "since": j.told.since, "met": j.verdict.met, "because": list(j.verdict.reasons)}
            for j in pairs.judged
        ],
        "proposal": {"arm": proposal.pair and proposal.pair.a.label, "lines": list(proposal.lines)},
        "deviations": deviations(section),
    }


def _heading(chapters: Sequence[Chapter]) -> str:
    """The page's title; of several sections none stands for all."""
    first = chapters[0]
    if not first.lead:
        return first.title
    what = "" if _several(chapters) else f" {first.title}"
    return f"What leaving early costs{what}" if first.early or not what else first.title


def _several(chapters: Sequence[Chapter]) -> bool:
    """Whether arms are reported in more than one section; benches come after them."""
    return sum(bool(chapter.lead) for chapter in chapters) > 1


def _html(chapters: Sequence[Chapter], general: Sequence[str]) -> str:
    template = template_environment().get_template("report.html")
    return template.render(heading=_heading(chapters), chapters=chapters, several=_several(chapters), general=general)


def _markdown(chapters: Sequence[Chapter], general: Sequence[str]) -> str:
    parts = [f"# {_heading(chapters)}", *general]
    level = 3 if len(chapters) > 1 else 2
    for number, chapter in enumerate(chapters):
        parts += [f"## {chapter.title}"] if number or _several(chapters) else []
        parts += [chapter.lead] if chapter.lead else []
        parts += [markdown(chapter.blocks, level=level).strip(), f"{'#' * level} Where these numbers come from"]
        parts += ["\n".join(f"- {name}: {value}" for name, value in chapter.facts)]
    return "\n\n".join(parts) + "\n"
