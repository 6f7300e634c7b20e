"""Write the tables of the README and of docs/deferred.md from the Records in results/. That they agree is checked in
`tests/test_readme.py`.

python scripts/readme_tables.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anydepth.eval.compare.compare import compare
from anydepth.eval.numbers import digits, percent
from anydepth.record import Record

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text()))
    page = ROOT / "docs/deferred.md"
    page.write_text(with_split(page.read_text()))


def with_tables(text: str) -> str:
    """The README with its tables made anew."""
    text = _between(text, "<!-- table: results/demo -->", "<!-- end of table -->", demo_table())
    text = _between(text, "<!-- study -->", "<!-- end of study -->", study_text())
    return _between(text, "<!-- speed -->", "<!-- end of speed -->", speed_text())


def with_split(text: str) -> str:
    """The page on deferred with its table made anew."""
    return _between(text, "<!-- split -->", "<!-- end of split -->", split_table())


def split_table() -> str:
    """B1 against full depth, as the sum of the decision to leave (B1x against it) and of the K/V (B1 against B1x)."""
    lines = ["| | threshold | B1 - B0 | the decision: B1x - B0 | the K/V: B1 - B1x |", "|---|---|---|---|---|"]
    for model in ("nano", "nano-plain"):
        for threshold in ("0.9", "0.7", "0.5", "0.2"):
            copied, exact, full = (
                Record.read(RESULTS / f"{model}_study" / name) for name in (f"B1-{threshold}", f"B1x-{threshold}", "B0")
            )
            pairs = ((copied, full), (exact, full), (copied, exact))
            lines.append(f"| {model} | {threshold} | {' | '.join(_difference(*pair) for pair in pairs)} |")
    return "\n".join(lines) + "\n"


def _difference(a: Record, b: Record) -> str:
    found = compare(a, b).outcome
    assert found is not None
    low, high = found.result.interval
    return f"{100 * found.result.difference:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"


def demo_table() -> str:
    rows = Record.read(RESULTS / "demo", samples=False).aggregates["arms"]
    lines = [
        "| arm | right, % | mean depth | segments/question | tokens/s | speed-up | its bound | share of bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            row["name"],
            f"{percent(row['accuracy'])} ({percent(row['low'])}-{percent(row['high'])})",
            digits(row["mean_depth"]),
            digits(row["segments_per_question"], 1),
            digits(row["tokens_per_s"], 0),
            digits(row["s"]),
            digits(row["s_max"]),
            f"{percent(row['share_of_bound'], 0)} %",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def study_text() -> str:
    """Both studies' arms, one factor at a time from plain full depth to the engine's early exit."""
    arms = {
        "A0": "full depth, transformers",
        "B0": "full depth, engine",
        "A1-0.5": "gate 0.5, all K/V computed, transformers",
        "B1-0.5": "gate 0.5, K/V copied, engine",
        "B1x-0.5": "gate 0.5, exact K/V where it is needed, engine",
        "B1m2-0.5": "as B1, never before the second pass",
        "B1-0.2": "gate 0.2, K/V copied, engine",
    }
    own, twin = (len(list((RESULTS / name).glob("*/record.json"))) for name in ("nano_study", "nano-plain_study"))
    lines = [
        f"All 2,160 test questions were answered under {own} settings on nano and {twin} on its twin that was not "
        "trained for copied K/V ([study](benchmarks/nano_study.toml), [report](results/nano_study/report/report.md), "
        "[the twin's](results/nano-plain_study/report/report.md)). Some of them, right answers in % with 95 % "
        "interval, and segments executed a question:",
        "",
        "| arm | | nano, right | segments | nano-plain, right | segments |",
        "|---|---|---|---|---|---|",
    ]
    for name, words in arms.items():
        cells = [name, words]
        for study in ("nano_study", "nano-plain_study"):
            found = Record.read(RESULTS / study / name, samples=False).aggregates
            right = f"{percent(found['accuracy'])} ({percent(found['low'])}-{percent(found['high'])})"
            cells += [right, digits(found["segments_executed_per_question"], 1)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "A0 and B0 give the same tokens, A1 the same tokens and depths as the dense reference, for every question. The "
        "difference of B1 and A1 is the cost of copied K/V: none was shown for nano, 17 points for nano-plain.",
        "",
        *late_lines(),
    ]
    return "\n".join(lines) + "\n"


def late_lines() -> list[str]:
    """Each mode of signals at one threshold: what it answers, what it costs, how fast it is."""
    timed = {
        row["name"]: row
        for row in Record.read(RESULTS / "late_signals_bench", samples=False).aggregates["rows"]
        if row["concurrency"] == 32
    }
    modes = {
        "B1": ("sync", "sync"),
        "B2": ("delayed, not late", None),
        "B3": ("delayed, a turn late", "delayed"),
        "B4e": ("exact, a turn late", "exact"),
        "B4r": ("resident, a turn late", "resident"),
    }
    lines = [
        "Late signals at 0.5: the host learns of an exit after the next turn was submitted. Timed apart, on matched "
        "work, 32 at a time ([report](results/late_signals_bench/report/report.md)):",
        "",
        "| arm | signals | right | segments | answers unlike sync's | extra segments a token | tokens/s "
        "| speed-up over full depth | its bound |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    sync = Record.read(RESULTS / "nano_study" / "B1-0.5")
    for name, (words, cell) in modes.items():
        record = Record.read(RESULTS / "nano_study" / f"{name}-0.5")
        found, pair = record.aggregates, compare(record, sync).sequences
        assert pair is not None and pair.executed_difference is not None
        right = f"{percent(found['accuracy'])} ({percent(found['low'])}-{percent(found['high'])})"
        cells = [f"{name}-0.5", words, right, digits(found["segments_executed_per_question"], 1)]
        cells += [f"{pair.tokens_differ:,}", digits(pair.executed_difference)]
        cells += ["", "", ""] if cell is None else _timed(timed[cell])
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _timed(row: dict[str, Any]) -> list[str]:
    speed = f"{row['tokens_per_s']:,.0f} ({row['tokens_per_s_low']:,.0f}-{row['tokens_per_s_high']:,.0f})"
    return [speed, digits(row["s"]), digits(row["s_max"])]


def speed_text() -> str:
    versus, saves = (
        Record.read(RESULTS / name, samples=False).aggregates["rows"]
        for name in ("vs_transformers", "depth_saves_time")
    )
    lines = [
        "SmolLM2-135M at full depth, greedy, float32, 2 threads, 60 prompt and 64 new tokens, prefill included "
        "(`benchmarks/vs_transformers.py`, interleaved in one run, median and range):",
        "",
        "| at a time | anydepth, tokens/s | transformers, tokens/s | ratio | roofline, tokens/s | roofline_share |",
        "|---|---|---|---|---|---|",
        *(_versus(row) for row in versus),
        "",
        "Of the time that leaving early could save while decoding, this much is saved "
        "(`benchmarks/depth_saves_time.py`):",
        "",
        "| model | at a time | speed-up | its bound | time_saved_share |",
        "|---|---|---|---|---|",
        *(
            f"| {row['model']} | {row['concurrency']} | {row['s']:.2f} | {row['s_max']:.2f} "
            f"| {100 * row['time_saved_share']:.0f} % |"
            for row in saves
        ),
    ]
    return "\n".join(lines) + "\n"


def _versus(row: dict[str, Any]) -> str:
    ours = f"{row['tokens_per_s']:.1f} ({row['tokens_per_s_low']:.1f}-{row['tokens_per_s_high']:.1f})"
    theirs = f"{row['transformers_tokens_per_s']:.1f} ({row['transformers_low']:.1f}-{row['transformers_high']:.1f})"
    ratio = f"{row['ratio']:.2f} ({row['ratio_low']:.2f}-{row['ratio_high']:.2f})"
    return (
        f"| {row['concurrency']} | {ours} | {theirs} | {ratio} | {row['roofline_tokens_per_s']:.0f} "
        f"| {row['roofline_share']:.2f} |"
    )


def _between(text: str, begin: str, end: str, content: str) -> str:
    before, mark, rest = text.partition(begin)
    after = rest.partition(end)[2]
    assert mark and rest, f"the README has no {begin}"
    return f"{before}{begin}\n{content}{end}{after}"


if __name__ == "__main__":
    main()
