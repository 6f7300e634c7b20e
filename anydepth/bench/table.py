"""A bench's Record as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anydepth.record import Record
from anydepth.table_parts import print_in_parts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Row = Mapping[str, Any]
MIB = 1 << 20
NOTHING = "–"


def print_tables(record: Record, *, console: Console | None = None) -> None:
    """Speed, latency and differences of every cell and concurrency, and the open loop, from a Record's aggregates."""
    from rich.console import Console

    console = Console() if console is None else console
    found = record.aggregates
    if found["rows"]:
        print_in_parts(speed(found["rows"]), console, names=2)
        print_in_parts(latency(found["rows"]), console, names=2)
    if found["arrivals"]:
        print_in_parts(arrivals(found["arrivals"], record.settings_used["arrivals"]), console)
        print_in_parts(latency(found["arrivals"]), console, names=2)
    print_in_parts(differences(found), console)
    for line in notes(record):
        console.print(line, highlight=False)


def speed(rows: Sequence[Row]) -> Table:
    table = _table(
        "throughput on matched work",
        "C|cell|tokens/s||questions\n/s|mean\ndepth|speed-\nup|bound|% of\nbound|% of\nroof",
    )
    for row, new in _by_concurrency(rows):
        table.add_row(
            str(row["concurrency"]) if new else "",
            row["name"],
            digits(row["tokens_per_s"], 0),
            _span(row, "tokens_per_s", 0),
            digits(row["questions_per_s"], 1),
            digits(row["mean_depth"]),
            digits(row["s"]),
            digits(row["s_max"]),
            digits(row["share_of_bound"], 0, scale=100),
            digits(row["roofline_share"], 0, scale=100),
        )
    return table


def latency(rows: Sequence[Row]) -> Table:
    """Of a closed or an open loop; the latter has no concurrency."""
    closed = "concurrency" in rows[0]
    table = _table(
        f"ms to the first token, from {'submission' if closed else 'arrival'}, and to each next",
        "C|cell|first\np50|\np95|\np99|next\np50|\np95|\np99|peak\nMiB",
    )
    for row, new in _by_concurrency(rows):
        times = [row[f"{name}_{q}"] for name in ("first_token_s", "inter_token_s") for q in ("p50", "p95", "p99")]
        table.add_row(
            str(row["concurrency"]) if new and closed else "",
            row["name"],
            *(digits(value, scale=1e3) for value in times),
            digits(row["peak_memory_bytes"], 0, scale=1 / MIB),
        )
    return table


def arrivals(rows: Sequence[Row], load: Row) -> Table:
    rate = load["offered_requests_per_s"]
    table = _table(
        f"open loop: {load['requests']} arrivals of {load['trace']} at {load['rate_scale']:.3g} times their rate"
        + (f", {rate:.3g} requests/s" if rate is not None else ""),
        "cell|requests\n/s|tokens/s||mean\ndepth|end to\nend, s\np50|\n\np99|longest\nqueue|kept\nup",
    )
    for row in rows:
        table.add_row(
            row["name"],
            digits(row["requests_per_s"]),
            digits(row["tokens_per_s"], 0),
            _span(row, "tokens_per_s", 0),
            digits(row["mean_depth"]),
            digits(row["end_to_end_s_p50"], 3),
            digits(row["end_to_end_s_p99"], 3),
            str(row["most_waiting"]),
            {True: "yes", False: "no", None: NOTHING}[row["kept_up"]],
        )
    return table


def differences(found: Row) -> Table:
    """How many requests were answered otherwise: in later runs, by a prompt's repeats, at another concurrency."""
    columns: dict[str, dict[str, str]] = {}
    for key, heading in (("repetitions_differ", "repeated\nrun"), ("repeats_differ", "repeated\nprompt")):
        for row in found["rows"]:
            if row[key]["requests"]:
                columns.setdefault(f"{heading}\nC {row['concurrency']}", {})[row["name"]] = _differ(row[key])
    least = min((row["concurrency"] for row in found["rows"]), default=0)
    for row in found["batch_variance"]:
        if least in row["concurrency"]:
            other = sum(row["concurrency"]) - least
            columns.setdefault(f"C {least}\nagainst\nC {other}", {})[row["name"]] = _differ(row)
    for row in found["arrivals"]:
        columns.setdefault("repeated\nrun\narrivals", {})[row["name"]] = _differ(row["repetitions_differ"])
    table = _table("requests answered otherwise, in ids or depths", "|".join(["cell", *columns]))
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        table.add_row(name, *(column.get(name, NOTHING) for column in columns.values()))
    return table


def notes(record: Record) -> list[str]:
    """What the columns mean, as far as their headings do not say it."""
    settings, found = record.settings_used, record.aggregates
    lines = [f"medians of {settings['repetitions']} runs in shuffled order, each in a fresh engine"]
    if found["rows"]:
        row = found["rows"][0]
        lines.append(
            f"speed-up: over {settings['baseline']} at the same concurrency; bound: what the work saved allows; roof: "
            f"{row['machine_flops_per_s'] / 1e9:.0f} GFLOP/s and {row['machine_bytes_per_s'] / 1e9:.0f} GB/s, measured"
        )
    if any(row["share_of_bound"] > 1 for row in found["rows"]):
        lines.append(
            "over 100 % of bound: the bound takes prompts at the machine's peak, from which a small model's turns are "
            "far; anydepth demo times turns without prompts"
        )
    lines += [f"peak: {of}" for of in sorted({row["peak_memory_of"] for row in [*found["rows"], *found["arrivals"]]})]
    if load := settings["arrivals"]:
        lines.append(
            f"{load['requests_clipped']} of {load['requests']} arrivals were shortened to fit: prompts from "
            f"{load['prompt_tokens_recorded']:,} to {load['prompt_tokens']:,} tokens, outputs from "
            f"{load['output_tokens_recorded']:,} to {load['output_tokens']:,}"
        )
    return lines


def digits(value: float | None, places: int = 2, *, scale: float = 1.0) -> str:
    return NOTHING if value is None else f"{value * scale:,.{places}f}"


def _table(title: str, headings: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for heading in headings.split("|"):
        left, name = heading in ("cell", ""), heading == "cell"  # which alone may be folded
        table.add_column(heading, justify="left" if left else "right", no_wrap=not name, overflow="fold")
    return table


def _by_concurrency(rows: Sequence[Row]) -> list[tuple[Row, bool]]:
    """Rows, and whether another concurrency begins with one."""
    before = [None, *(row.get("concurrency") for row in rows)]
    return [(row, row.get("concurrency") != old) for row, old in zip(rows, before, strict=False)]


def _span(row: Row, name: str, places: int) -> str:
    return f"{digits(row[f'{name}_low'], places)}-{digits(row[f'{name}_high'], places)}"


def _differ(found: Row) -> str:
    return f"{found['differ']}/{found['requests']}"
