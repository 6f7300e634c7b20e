"""What a signal mode costs per executed segment, beside `sync`: decode only, signals one turn late, adaptive exits.

The modes take turns on the same requests, round by round, and a pair is a ratio of their sums. Time is that of the
processor, since other programs share the machine (the wall clock stands beside it); all runs on one thread. `resident`
reads out, samples and embeds in every turn, whether or not a row leaves: what that costs is how much longer a turn of
`sync` takes that does so once more ("sync, read out"), and the ratio is given with and without it. Of a row that is
alone the host must know plane and position to read its K/V as a slice, which with `resident` it does not: "sync,
gathered" is `sync` without that slice.

    python benchmarks/late_signals.py --out runs/late_signals
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from inspect import unwrap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from decode_only import decode, engine_for, nano_asked, random_asked, rounded, with_setting
from large_model import LARGE, random_ouro

from anydepth.bench.roofline import spread
from anydepth.bench.rows import write_rows
from anydepth.engine.engine import Engine
from anydepth.engine.plan import Plan
from anydepth.engine.sampling import greedy
from anydepth.models.base import Model
from anydepth.models.load import load_checkpoint
from anydepth.types import Sampling

SYNC, READ_OUT, GATHERED = "sync", "sync, read out", "sync, gathered"
MODES = (SYNC, READ_OUT, "exact", "resident", GATHERED)


class Cost(NamedTuple):
    """Decode segments that were executed, turns, and seconds: of the processor, and of the clock on the wall."""

    executed: int
    turns: int
    cpu_s: float
    wall_s: float

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def cpu_us(self) -> float:
        """A segment's microseconds of the processor."""
        return self.cpu_s / self.executed * 1e6

    @property
    def wall_us(self) -> float:
        return self.wall_s / self.executed * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="nano,large")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/late_signals"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = load_checkpoint("nano")
    rows = []
    for name in options.models.split(","):
        model = checkpoint.model if name == "nano" else random_ouro(LARGE, seed=0)
        for concurrency in map(int, options.concurrency.split(",")):
            if name == "nano":  # at the threshold of the study
                asked = with_setting(nano_asked(checkpoint, concurrency), {"exit_threshold": 0.5})
            else:
                asked = with_setting(random_asked(concurrency, tokens=24), {"exit_threshold": 0.7})
            rounds = max(1, (48 if name == "nano" else 4) // concurrency)
            rows += compare(name, model, asked, pairs=options.pairs, rounds=rounds)
            for row in rows:
                if row["model"] == name and row["concurrency"] == concurrency:
                    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    settings = {**vars(options), "benchmark": "late_signals", "out": None}
    write_rows(options.out, settings=settings, rows=rows, checkpoint=checkpoint)


def compare(
    name: str, model: Model, asked: list[tuple[list[int], Sampling]], *, pairs: int, rounds: int
) -> list[dict[str, Any]]:
    """One row for each mode but `sync`: medians (least, most) over the pairs, each of so many rounds."""
    modes = [mode for mode in MODES if len(asked) == 1 or mode != GATHERED]
    engines = {mode: new_engine(model, mode, asked) for mode in modes}
    for engine in engines.values():
        cost(engine, asked)
    costs: dict[str, list[Cost]] = {mode: [] for mode in modes}
    for _ in range(pairs):
        sums = dict.fromkeys(modes, Cost(0, 0, 0.0, 0.0))
        for n in range(rounds):
            for mode in modes if n % 2 else modes[::-1]:
                sums[mode] += cost(engines[mode], asked)
        for mode in modes:
            costs[mode].append(sums[mode])
    rows = []
    for mode in modes[1:]:
        ratios = [one.cpu_us / sync.cpu_us for one, sync in zip(costs[mode], costs[SYNC], strict=True)]
        row = {
            "model": name,
            "concurrency": len(asked),
            "signals": mode,
            "sync_us_per_segment": rounded(spread([one.cpu_us for one in costs[SYNC]])),
            "us_per_segment": rounded(spread([one.cpu_us for one in costs[mode]])),
            "ratio": rounded(spread(ratios)),
            "wall_ratio": rounded(
                spread([one.wall_us / sync.wall_us for one, sync in zip(costs[mode], costs[SYNC], strict=True)])
            ),
            "executed": costs[mode][0].executed,
            "sync_executed": costs[SYNC][0].executed,
            "sync_turns": costs[SYNC][0].turns,
            "turns": costs[mode][0].turns,
        }
        if mode == "resident":
            paired = list(zip(costs[mode], costs[READ_OUT], costs[SYNC], strict=True))
            readout = [read_out.cpu_us - sync.cpu_us for _, read_out, sync in paired]
            beyond = [(mine.cpu_us - more) / sync.cpu_us for (mine, _, sync), more in zip(paired, readout, strict=True)]
            row |= {"readout_us_per_segment": rounded(spread(readout)), "ratio_beyond_readout": rounded(spread(beyond))}
        rows.append(row)
    return rows


def new_engine(model: Model, mode: str, asked: list[tuple[list[int], Sampling]]) -> Engine:
    engine = engine_for(model, asked, signals=SYNC if mode in (READ_OUT, GATHERED) else mode)
    if mode == GATHERED:
        engine.runner.lone_chunk = False
    if mode == READ_OUT:
        read_out_every_turn(engine)
    return engine


def read_out_every_turn(engine: Engine) -> None:
    """After each turn one more readout, of as many rows as it has."""
    runner, run = engine.runner, unwrap(type(engine.runner).run)
    readouts = [one_readout(engine.model, rows) for rows in range(len(engine.slots) + 1)]

    @torch.inference_mode()
    def run_and_read_out(plan: Plan) -> Any:
        result = run(runner, plan)
        readouts[plan.decode_rows]()
        return result

    runner.run = run_and_read_out


def one_readout(model: Model, rows: int) -> Callable[[], None]:
    """A readout, greedy choice, stop check and next embedding, as `resident` makes them."""
    h_Bd = torch.randn(rows, model.shape.hidden)
    left, limit = torch.ones(rows, dtype=torch.bool), torch.full((rows,), 60)
    output, slots, pool = torch.zeros(rows, dtype=torch.int64), torch.arange(rows), torch.zeros_like(h_Bd)

    def read_out() -> None:
        token = greedy(model.readout(model.shape.segments, h_Bd))
        goes_on = output + 1 < limit
        pool.index_copy_(0, slots, torch.where(left.unsqueeze(1), model.embed(token), h_Bd))
        torch.stack((token, output, left & goes_on))

    return read_out


def cost(engine: Engine, asked: list[tuple[list[int], Sampling]]) -> Cost:
    found = decode(engine, asked)
    executed = sum(output.usage.segments_executed for output in found.outputs)
    return Cost(executed, found.turns, found.cpu_s, found.wall_s)


if __name__ == "__main__":
    main()
