"""What early exits of SmolLM2-135M-Instruct cost and save: heads after every fifth of its 30 layers, two policies at
three operating points, two fills, against full depth with the same heads attached.

A cell is one arm on one task. Each finished cell is published at once; a run that is stopped goes on where it was, and
cells that have not been run are marked in the table, results/exit_heads/README.md.

    export ANYDEPTH_DATA=...                                     # the tasks' questions
    python benchmarks/exit_heads.py screen                       # 39 cells, 2 hours of one core
    python benchmarks/exit_heads.py choose                       # the best cell of each policy
    python benchmarks/exit_heads.py full                         # 9 cells, 3 hours
    python benchmarks/exit_heads.py bench                        # 70 minutes of a quiet core
    python benchmarks/exit_heads.py table
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from anydepth.eval.aggregate import layer_shares, mean_layer
from anydepth.eval.arms import Arm, Study
from anydepth.eval.compare.compare import compare
from anydepth.eval.numbers import digits, percent, points
from anydepth.eval.protocol import read_frozen, write_frozen
from anydepth.eval.study import Options, freeze_study, run_study
from anydepth.models.heads import FILE, ExitHeads, Head, read_about
from anydepth.record import HEADER, Record, publish, write_atomically

MODEL, HEADS, BASELINE = "smollm2-135m", "examples/heads/smollm2-135m", "full-depth"
POLICIES, LEVELS, FILLS = ("probe", "confidence"), (0.95, 0.9, 0.8), ("project", "deferred")
BENCHES = ("bench", "bench-whole-vocabulary")
RESULTS, CHOSEN = Path("results/exit_heads"), "chosen.json"
LOSS_PP = 2.0  # how much worse, on the mean of the three tasks, a cell may be and still be chosen


@dataclass(frozen=True)
class Stage:
    """`questions`: how many of each task, by hash ranking; None: all."""

    questions: Mapping[str, int | None]
    max_tokens: int


STAGES = {
    "screen": Stage({"ifeval": 100, "gsm8k": 100, "mmlu": 200}, 128),
    "full": Stage({"ifeval": None, "gsm8k": 400, "mmlu": None}, 256),
}


def arms(stage: str) -> list[str]:
    """The stage's arms, the baseline first, those of one fill together; of `full`, those that were chosen."""
    if stage == "screen":
        return [BASELINE, *(f"{p}-{level}-{fill}" for fill in FILLS for p in POLICIES for level in LEVELS)]
    return [BASELINE, *json.loads((RESULTS / CHOSEN).read_bytes())["chosen"].values()]


def fields(arm: str, max_tokens: int) -> dict[str, Any]:
    """Of an [[arm]]."""
    shared = {"name": arm, "heads": HEADS, "max_tokens": max_tokens}
    if arm == BASELINE:
        return {**shared, "policy": "never", "fill": FILLS[0]}
    policy, level, fill = arm.split("-")
    return {**shared, "policy": policy, "profile": f"{policy}-{level}", "fill": fill}


def run(stage: str, tasks: Sequence[str], only: Sequence[str] | None, out: Path, options: Options) -> None:
    """Every cell of these tasks (and arms) that is missing."""
    for task in tasks:
        count = STAGES[stage].questions[task]
        head = {"task": task, "model": MODEL, "limit": count, "split": "validation" if task == "mmlu" else None}
        study = Study.parse(
            {
                "study": {key: value for key, value in head.items() if value is not None},
                "arm": [fields(arm, STAGES[stage].max_tokens) for arm in arms(stage)],
            }
        )
        protocol = RESULTS / stage / task / "protocol.json"
        if not protocol.exists():
            protocol.parent.mkdir(parents=True, exist_ok=True)
            write_frozen(protocol, freeze_study(study, options=options))
        frozen, folder = read_frozen(protocol), out / stage / task
        run_study(study, out=folder, frozen=frozen, options=options, finished=published, only=only)


def published(record: Record) -> None:
    """A finished cell."""
    stage, task, arm = record.path.parts[-3:]
    if not (RESULTS / stage / task / arm / HEADER).exists():
        print(f"published {publish(record.path, RESULTS / stage / task / arm)}")


def cell(stage: str, task: str, arm: str) -> Record | None:
    """Its published Record, None where it has not been run."""
    folder = RESULTS / stage / task / arm
    return Record.read(folder) if (folder / HEADER).exists() else None


def choose() -> dict[str, str]:
    """Of each policy the cell of the screen that executes least, among those whose mean score over the tasks is at most
    LOSS_PP below full depth's; where there is none, the one with the best mean score. This rule was written down before
    the screen was run."""
    lost, work = dict[str, float](), dict[str, float]()
    for arm in arms("screen")[1:]:
        pairs = [(cell("screen", task, arm), cell("screen", task, BASELINE)) for task in STAGES["screen"].questions]
        if any(one is None or other is None for one, other in pairs):
            raise SystemExit(f"{arm} has not been run on every task; finish the screen first")
        scores = [(one.aggregates["accuracy"], other.aggregates["accuracy"]) for one, other in pairs]  # type: ignore[union-attr]
        lost[arm] = 100 * sum(other - one for one, other in scores) / len(scores)
        samples = [sample for one, _ in pairs for sample in one.samples if "choices" not in sample]  # type: ignore[union-attr]
        work[arm] = sum(s["segments_executed"] for s in samples) / sum(s["decode_tokens"] for s in samples)
    found = {}
    for policy in POLICIES:
        own = [arm for arm in lost if arm.startswith(policy)]
        good = [arm for arm in own if lost[arm] <= LOSS_PP]
        found[policy] = min(good, key=work.__getitem__) if good else min(own, key=lost.__getitem__)
    table = {arm: {"lost_pp": lost[arm], "segments_executed_per_token": work[arm]} for arm in lost}
    content = {"rule": choose.__doc__, "loss_pp": LOSS_PP, "chosen": found, "screen": table}
    write_atomically(RESULTS / CHOSEN, json.dumps(content, indent=1).encode() + b"\n")
    return found


def bench(out: Path, threads: int) -> None:
    """Throughput on matched work at 1, 8 and 32 at a time: full depth, the chosen cells and the middle operating point
    of each policy and fill; and, apart, what heads over the whole vocabulary would cost: the same corrections before
    all of the unembedding, which `confidence` reads at all five exits."""
    from anydepth.bench_arms import bench_arms

    names = dict.fromkeys([*arms("full"), *(f"{p}-{LEVELS[1]}-{fill}" for p in POLICIES for fill in FILLS)])
    whole = [fields(BASELINE, 128), fields(f"confidence-{LEVELS[1]}-project", 128)]
    heads = whole_vocabulary(out / "whole-vocabulary-heads")
    whole = [
        {**arm, "heads": str(heads)} | ({"profile": str(heads / "p.toml")} if "profile" in arm else {}) for arm in whole
    ]
    for name, given in zip(BENCHES, ([fields(arm, 128) for arm in names], whole), strict=True):
        record = bench_arms(
            [Arm.parse(arm) for arm in given], model=MODEL, task="ifeval", out=out / name, limit=32, threads=threads
        )
        print(f"published {publish(record.path, RESULTS / name, samples=False)}")


def whole_vocabulary(folder: Path) -> Path:
    """The shortlist heads as heads of kind low_rank, with a profile of the same thresholds."""
    with safe_open(Path(HEADS) / FILE, framework="pt") as file:
        tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 (not a mapping)
    about = read_about(HEADS)
    heads = {
        int(layer): Head("low_rank", {name: tensors[f"exit.{layer}.head.{name}"] for name in ("norm", "a", "b")})
        for layer in about["exits"]
    }
    ExitHeads(model_hash=about["model_hash"], heads=heads, probes={}, about={}).save(folder)
    text = (Path(HEADS) / "profiles" / f"confidence-{LEVELS[1]}.toml").read_text()
    (folder / "p.toml").write_text("\n".join(line for line in text.splitlines() if "_hash" not in line) + "\n")
    return folder


HEAD = (
    "arm",
    "score, % (95 %)",
    "− full depth, pp (95 %)",
    "p",
    "same answers, %",
    "common prefix, %",
    "mean layer",
    "read after layer, %",
    "tokens / answer",
    "segments / token",
    "latency p50, p95, s",
)


def row(arm: str, record: Record | None, baseline: Record | None) -> list[str]:
    """A line of the table."""
    if record is None:
        return [arm, "not run", *[""] * (len(HEAD) - 2)]
    found, used = record.aggregates, record.settings_used
    shares = layer_shares(found, used)
    scored = any("choices" in sample for sample in record.samples)
    tokens = sum(len(choice["depths"]) for sample in record.samples for choice in sample.get("choices", ()))
    tokens = tokens or sum(sample["decode_tokens"] for sample in record.samples)
    line = [arm, f"{percent(found['accuracy'])} ({percent(found['low'])}–{percent(found['high'])})", "", "", "", ""]
    if baseline is not None and arm != BASELINE:
        pair = compare(record, baseline)
        result, other = pair.outcome, pair.answers_differ
        if result is not None:
            interval = result.result.interval
            line[2] = f"{points(result.result.difference)} ({points(interval.low)} to {points(interval.high)})"
            line[3] = f"{result.result.p:.2g}"
        if pair.choices is not None:
            other = pair.choices.chosen_differ
        if pair.sequences is not None:
            other = pair.sequences.tokens_differ
            line[5] = percent(pair.sequences.common_prefix_share)
        line[4] = percent(1 - other / pair.answers)
    executed = sum(sample["segments_executed"] for sample in record.samples)
    latency = found["latency_s"]
    return [
        *line,
        digits(mean_layer(found, used), 1),
        " · ".join(f"{layer}: {percent(share, 0)}" for layer, share in shares.items() if share >= 0.005),
        "" if scored else digits(found["tokens_per_question"], 1),
        digits(executed / tokens),
        f"{digits(latency['p50'])}, {digits(latency['p95'])}",
    ]


def table() -> str:
    """All cells, in Markdown."""
    lines = ["# Early exits of SmolLM2-135M-Instruct", "", *INTRODUCTION.strip().splitlines()]
    for stage, plan in STAGES.items():
        if stage == "full" and not (RESULTS / CHOSEN).exists():
            lines += ["", "## full", "", "Not begun: the screen is not finished."]
            continue
        for task, count in plan.questions.items():
            baseline = cell(stage, task, BASELINE)
            asked = f"{count} questions" if count else "all questions"
            lines += ["", f"## {stage}: {task}, {asked}, at most {plan.max_tokens} new tokens", ""]
            lines += [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
            lines += [f"| {' | '.join(row(arm, cell(stage, task, arm), baseline))} |" for arm in arms(stage)]
    for name in BENCHES:
        lines += ["", f"## {name}", "", *bench_table(RESULTS / name)]
    return "\n".join(lines) + "\n"


def bench_table(folder: Path) -> list[str]:
    if not (folder / HEADER).exists():
        return ["Not run."]
    columns = ("at a time", "arm", "tokens/s (range)", "S", "bound S_max", "in FLOPs", "share of bound, %")
    columns = (*columns, "share of gain, %", "mean depth, of six")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for found in Record.read(folder, samples=False).aggregates["rows"]:
        gain = found["share_of_gain"]
        parts = [
            str(found["concurrency"]),
            found["name"],
            f"{digits(found['tokens_per_s'], 1)} ({digits(found['tokens_per_s_low'], 1)}–"
            f"{digits(found['tokens_per_s_high'], 1)})",
            *(digits(found[key]) for key in ("s", "s_max", "s_max_flops")),
            percent(found["share_of_bound"], 0),
            percent(gain, 0) if gain is not None else "",
            digits(found["mean_depth"]),
        ]
        lines.append(f"| {' | '.join(parts)} |")
    return lines


INTRODUCTION = """
Made by `python benchmarks/exit_heads.py table` from the Records beside it. Heads:
[examples/heads/smollm2-135m](../../examples/heads/smollm2-135m/README.md). An arm is policy, level (the agreement its
profile was fitted for) and fill. Differences are of the same questions: exact McNemar, Newcombe's interval. *Same
answers*: every token id the same (choices: the same one chosen). *Common prefix*: the share of an answer before its
first other token. *Segments / token*: executed, of six; catch-ups and what a stop wasted are in it. Latency: of a whole
answer, 32 at a time, one thread, on a machine that others used too; arms ran one after another, so compare it within a
factor only and see the benches for times. The cells of `full` were chosen on a part of its questions.

What the screen says:
- A token that agrees is not an answer that agrees. Profiles that keep 96 to 98 % of the tokens of chat answers, each
  taken alone, keep 4 to 76 % of the answers whole (probe-0.9, confidence-0.95; IFEval, GSM8K).
- Copied state is the larger part of that: with the same profile, `deferred`, whose K/V are full depth's, keeps more
  answers than `project` (probe-0.95: 90 against 71 of 100 on IFEval, 82 against 37 on GSM8K).
- `deferred` saves no segments here: some later token of nearly every answer goes to full depth, and then everything is
  caught up, in blocks (5.5 to 6.0 segments a token executed). What it saves is reading weights once for a block.
- Early exits can lengthen answers: GSM8K's plain few-shot prompts are unlike the chats that heads and thresholds come
  from, answers miss their stop and run into the cap (59 tokens at full depth, 101 to 120 under the laxer profiles). A
  profile is worth what its prompts were like.
- The model is near chance on MMLU and at zero on GSM8K, so those scores cannot show what is lost; agreement does.

What the full stage says:
- On IFEval both chosen cells lose (p 0.002 and 0.009), 3.5 to 3.7 points of 17.9, which the screen's hundred questions
  could not show. On MMLU and GSM8K (1 % at full depth) no loss is shown, nor could it be.
- On GSM8K answers grow from 104 tokens to 177 and 219, so that early exit executes more segments an answer, not fewer:
  811 and 1,035 against full depth's 616.
- Answers come sooner all the same, 32 at a time: on IFEval half of them after 38 and 35 s, where full depth takes 45,
  on MMLU after 10, where it takes 11. (These two tasks were run again, side by side, with the scheduler and the heads'
  products as they are now: every score and depth the same. Latencies of GSM8K are of before the latter, those of the
  screen of before both.)

What is certified (`calibration/`, 637 prompts): with full depth's K/V confidence-0.95, at which half of the tokens
leave, says another token than full depth on at most 5 %; with `project` only confidence-0.99 does (2.8 % measured;
0.98: 3.9 %, p 0.33), at which one in twelve leaves. Copied K/V is what costs.

What the benches say (one thread, 128 new tokens, a quiet machine):
- One at a time a profile that keeps 96 % of the tokens (probe-0.9) runs at 1.03 of full depth's speed, where its work
  allows 1.04; laxer ones, whose answers suffer, at 1.14 to 1.17. The bound is small: most tokens of these prompts need
  all layers.
- In batches weights are read once for all rows, so what some rows skip saves little: bounds of 0.96 to 1.00 at 8 at a
  time, 1.02 to 1.09 at 32. Both policies come within 7 % of them. At 8 all are slower than full depth: heads and probes
  cost more than the few layers that a whole batch skips.
- With heads over the whole vocabulary (`bench-whole-vocabulary`: the same corrections before all of the unembedding)
  confidence-0.9 runs at 0.58 of full depth's speed one at a time, 0.60 at 8, 0.83 at 32: such heads at five exits cost
  more than the layers that they let rows skip. Early exit of a small model with a large vocabulary loses so.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=(*STAGES, "choose", "bench", "table"))
    parser.add_argument(
        "--tasks", default="ifeval,gsm8k,mmlu", help="some of them, so that two processes share a stage"
    )
    parser.add_argument("--arms", help="some of them")
    parser.add_argument("--out", type=Path, default=Path("runs/exit_heads"), help="folder of the unfinished Records")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    if given.what in STAGES:
        only = given.arms.split(",") if given.arms else None
        run(given.what, given.tasks.split(","), only, given.out, Options(threads=given.threads))
    elif given.what == "choose":
        print(choose())
    elif given.what == "bench":
        bench(given.out, given.threads)
    else:
        write_atomically(RESULTS / "README.md", table().encode())


if __name__ == "__main__":
    main()
