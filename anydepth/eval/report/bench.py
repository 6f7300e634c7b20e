"""The throughput tables of a report, from bench Records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anydepth.eval.numbers import digits, percent, signed
from anydepth.eval.report.page import BAD, Block, Cell, Row, Table
from anydepth.record import Record

Figures = Mapping[str, Any]


def bench_block(bench: Record, *, title: str) -> Block:
    """What a bench measured: matched work with its bounds, the same prompts in other batches, and arrivals."""
    settings, found = bench.settings_used, bench.aggregates
    if bench.status != "complete":
        return Block(title=title, note="This bench is not complete.")
    tables = [_closed(found["rows"]), _latencies(found["rows"])] if found.get("rows") else []
    tables += [_late(settings.get("cells", ()), found.get("rows", ()))]
    tables += [_variance(found["batch_variance"])] if found.get("batch_variance") else []
    tables += [_arrivals(found["arrivals"])] if found.get("arrivals") else []
    return Block(
        title=title,
        note=f"Every cell decodes the same number of tokens for the same {settings['prompts']} prompts, in a fresh "
        f"engine; median and range of {settings['repetitions']} repetitions in shuffled order. Speed-ups are over "
        f"{settings['baseline']} within this run. The bound is what the work saved allows, as time and, beside it, in "
        f"FLOPs; roofline: the time that this machine needs at least, over the time measured. Repetitions of a cell "
        f"must not differ in float32; elsewhere the composition of a batch alone can change tokens.",
        tables=tuple(table for table in tables if table.rows),
    )


def _closed(rows: Sequence[Figures]) -> Table:
    lines: list[Row] = []
    for row in rows:
        differ = row["repetitions_differ"]
        lines.append(
            (
                row["name"],
                str(row["concurrency"]),
                _ranged(row, "tokens_per_s"),
                digits(row["questions_per_s"]),
                digits(row["mean_depth"]),
                f"{digits(row['s'])} ×",
                Cell(f"{digits(row['s_max'])} ×", f"FLOPs {digits(row['s_max_flops'])} ×"),
                percent(row["share_of_bound"], 0),
                percent(row["time_saved_share"], 0),
                percent(row["roofline_share"], 0),
                _memory(row),
                Cell(f"{differ['differ']} of {differ['requests']}", mark=BAD if differ["differ"] else ""),
            )
        )
    head = ("matched work", "at a time", "tokens/s", "questions/s", "mean depth", "speed-up", "bound", "% of bound")
    more = ("% of time saved", "roofline, %", "peak memory, MiB", "repetitions differ")
    return Table(head=(*head, *more), rows=tuple(lines))


def _late(cells: Sequence[Figures], rows: Sequence[Figures]) -> Table:
    """Each mode of signals against `delayed` with the same exit setting: the same tokens, and as late."""
    modes = {cell["name"]: cell.get("signals", "sync") for cell in cells}
    alike = {
        cell["name"]: {key: value for key, value in cell.items() if key not in ("name", "signals", "lateness")}
        for cell in cells
    }
    lines: list[Row] = []
    for base in rows:
        if modes.get(base["name"]) != "delayed":
            continue
        for row in rows:
            if row["concurrency"] != base["concurrency"] or alike[row["name"]] != alike[base["name"]] or row is base:
                continue
            lines.append(
                (
                    f"{row['name']} / {base['name']}",
                    str(row["concurrency"]),
                    Cell(f"{digits(row['tokens_per_s'] / base['tokens_per_s'], 3)} ×", "of medians"),
                    f"{digits(row['s_max'] / base['s_max'], 3)} ×",
                    digits(row["segments_executed_per_question"], 1),
                    digits(base["segments_executed_per_question"], 1),
                    _memory_beside(row, base),
                )
            )
    head = ("signals, against delayed", "at a time", "speed-up", "bound", "executed/ question", "delayed executes")
    return Table(head=(*head, "peak memory, MiB more"), rows=tuple(lines))


def _memory_beside(row: Figures, base: Figures) -> str:
    values = row.get("peak_memory_bytes"), base.get("peak_memory_bytes")
    return "–" if None in values else signed((values[0] - values[1]) / 2**20)  # type: ignore[operator]


def _latencies(rows: Sequence[Figures]) -> Table:
    lines: list[Row] = [
        (row["name"], str(row["concurrency"]), *(_milliseconds(row, name) for name in _QUANTILES)) for row in rows
    ]
    return Table(head=("latency, ms", "at a time", *_HEADS), rows=tuple(lines))


_QUANTILES = ("first_token_s_p50", "first_token_s_p95", "inter_token_s_p50", "inter_token_s_p95", "inter_token_s_p99")
_HEADS = ("first token p50", "p95", "between tokens p50", "p95", "p99")


def _variance(rows: Sequence[Figures]) -> Table:
    lines: list[Row] = [
        (
            row["name"],
            " and ".join(map(str, row["concurrency"])),
            f"{row['differ']} of {row['requests']}",
            str(row["differ_in_tokens"]),
            str(row["differ_in_depths"]),
            str(row["first_position"]) if row["first_position"] is not None else "–",
        )
        for row in rows
    ]
    heads = ("at a time", "answers differ", "in tokens", "in depths", "first at index")
    return Table(head=("the same prompts in other batches", *heads), rows=tuple(lines))


def _arrivals(rows: Sequence[Figures]) -> Table:
    lines: list[Row] = []
    for row in rows:
        kept = {True: "yes", False: "no", None: "–"}[row["kept_up"]]
        lines.append(
            (
                row["name"],
                digits(row["offered_requests_per_s"]),
                _ranged(row, "requests_per_s", places=2),
                _ranged(row, "tokens_per_s"),
                *(_milliseconds(row, name) for name in _QUANTILES[:3]),
                digits(row["end_to_end_s_p50"]),
                digits(row["end_to_end_s_p95"]),
                str(row["most_waiting"]),
                Cell(kept, mark=BAD if kept == "no" else ""),
            )
        )
    head = ("arrivals", "offered/s", "served/s", "tokens/s", *_HEADS[:3], "end to end p50, s", "p95, s")
    return Table(head=(*head, "most waiting", "kept up"), rows=tuple(lines))


def _ranged(row: Figures, name: str, *, places: int | None = None) -> Cell:
    """A median with its range; few digits of large numbers."""
    value = row[name]
    shown = places if places is not None else 0 if value is not None and value >= 100 else 1
    return Cell(digits(value, shown), f"{digits(row[f'{name}_low'], shown)}–{digits(row[f'{name}_high'], shown)}")


def _milliseconds(row: Figures, name: str) -> str:
    value = row.get(name)
    return digits(None if value is None else 1000 * value, 1)


def _memory(row: Figures) -> Cell:
    value = row.get("peak_memory_bytes")
    return Cell(digits(None if value is None else value / 2**20, 0), row.get("peak_memory_of") or "")
