"""What evaluation commands print: short tables on stdout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anydepth.eval.aggregate import layer_shares, mean_layer
from anydepth.eval.numbers import digits, percent
from anydepth.record import Record
from anydepth.table_parts import print_in_parts


def show_arms(records: Sequence[Record], *, folder: Path | None) -> dict[str, Any]:
    """Print a line an arm; the same as a dict."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = [{"name": record.settings_used["name"], **record.aggregates} for record in records]
    if not rows:
        return {"arms": []}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("arm", overflow="fold", min_width=12)
    headings = ["n", "right %", "95 %", "mean\ndepth", "tokens/\nquestion", "executed\nsegments/\nquestion"]
    counts = {"length_stops": "cut\noff", "unparseable": "un-\nread", "unscored": "un-\nscored"}
    shown = [name for name in counts if any(row[name] for row in rows)]
    layered = any(len(record.settings_used.get("exit_layers") or []) > 1 for record in records)
    headings[4:4] = ["mean\nlayer"] if layered else []
    for heading in [*headings, "latency\np50, s", "\np95", *(counts[name] for name in shown)]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row, record in zip(rows, records, strict=True):
        table.add_row(
            row["name"],
            str(row["n"]),
            percent(row["accuracy"]),
            f"{percent(row['low'])}-{percent(row['high'])}",
            digits(row["mean_depth"], 2),
            *([digits(mean_layer(row, record.settings_used), 1)] if layered else []),
            digits(row["tokens_per_question"], 1),
            digits(row["segments_executed_per_question"], 1),
            *(digits(row.get("latency_s", {}).get(q), 2) for q in ("p50", "p95")),
            *(str(row[name]) for name in shown),
        )
    console = Console(highlight=False)
    print_in_parts(table, console)
    for line in dict.fromkeys(_conditions(record) for record in records):
        console.print(line, soft_wrap=True)
    for row, record in zip(rows, records, strict=True):
        if shares := layer_shares(row, record.settings_used) if layered else {}:
            parts = ", ".join(f"{layer}: {percent(share)} %" for layer, share in shares.items() if share)
            console.print(f"{row['name']}, tokens read after layer {parts}", soft_wrap=True)
        for name, found in row["by_extractor"].items():
            console.print(
                f"{row['name']}, {name} extraction: {percent(found['accuracy'])} %, unread {found['unparseable']}"
            )
        for name, value in row["metrics"].items():
            console.print(f"{row['name']}, {name}: {digits(value, 4)}")
    console.print(f"Records in {folder}", soft_wrap=True)
    return {"arms": rows, "folder": str(folder)}


def _conditions(record: Record) -> str:
    """What a latency is of."""
    settings, threads = record.settings_used, record.provenance.get("threads")
    cap = settings.get("max_tokens")
    return (
        f"latency: of a whole answer, {settings['concurrency']} at a time, at most {cap} tokens, {threads or 'all'} "
        f"thread{'s' if threads != 1 else ''}"
    )
