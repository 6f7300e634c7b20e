"""The tables of the model card: nano and nano-plain on all test questions, from Records.

For both models: fixed depths, exit thresholds under `full` and `last_exited`, and the best schedule of depths by output
position (found on validation questions) at the gate's own mean depth. The threshold is chosen on validation questions.
Records go to --out, resumable; `--publish` copies their headers to results/nano and rewrites the cards' tables.

    python benchmarks/nano_tables.py --out runs/nano --publish results/nano
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anydepth.engine.llm import LLM
from anydepth.eval.arms import Arm
from anydepth.eval.backends.engine import EngineBackend
from anydepth.eval.run import run
from anydepth.eval.task import load_task
from anydepth.models.nano import questions as nano
from anydepth.record import Record, publish
from anydepth.train.data import collate_sorted, question_rows
from anydepth.train.kv import all_depths

MODELS = ("nano", "nano-plain")
FILLS = ("full", "last_exited")
THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 0.9, 0.99)
KEEP = 0.99  # of full depth's accuracy, for the threshold that validation chooses
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/nano"))
    parser.add_argument("--publish", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # tiny products gain nothing from more
    for model in MODELS:
        records = measure(model, options.out / model)
        text = tables(records)
        print(f"## {model}\n\n{text}")
        if options.publish:
            for (split, name), record in records.items():
                publish(record.path, options.publish / model / split / name, samples=False)
            write_card(model, text)


def measure(model: str, out: Path) -> dict[tuple[str, str], Record]:
    """(split, arm name) -> Record."""
    records: dict[tuple[str, str], Record] = {}
    for fill in FILLS:
        llm = LLM(model, fill=fill, max_batch=64)
        gates = [Arm.parse({"name": f"{fill}-{tau:g}", "fill": fill, "exit_threshold": tau}) for tau in THRESHOLDS]
        fixed = [Arm.parse({"name": f"{fill}-depth-{d}", "fill": fill, "depth": d}) for d in (1, 2, 3, 4)]
        for split in ("validation", "test"):
            for arm in gates + fixed:
                records[split, arm.name] = ask(llm, arm, split, out)
        chosen, _ = choose(records, fill)
        budget = records["validation", chosen].aggregates["mean_depth"]
        schedule = best_schedule(llm.checkpoint.model, nano.questions("validation"), budget)
        arm = Arm.parse({"name": f"{fill}-schedule", "fill": fill, "trace": schedule})
        records["test", arm.name] = ask(llm, arm, "test", out)
    return records


def ask(llm: LLM, arm: Arm, split: str, out: Path) -> Record:
    task = load_task("nano")
    questions = task.select(split=split)
    print(f"{out.name} {split} {arm.name}", flush=True)
    return run(
        arm,
        task=task,
        backend=EngineBackend(llm),
        out=out / split / arm.name,
        questions=questions,
        threads=1,
        concurrency=64,
    )


def choose(records: dict[tuple[str, str], Record], fill: str) -> tuple[str, bool]:
    """(arm, kept): the threshold with the least depth that keeps 99 % of full depth's accuracy on validation questions,
    or, where none does, the highest one."""
    full = records["validation", f"{fill}-depth-4"].aggregates["accuracy"]
    arms = [f"{fill}-{tau:g}" for tau in THRESHOLDS]
    good = [arm for arm in arms if records["validation", arm].aggregates["accuracy"] >= KEEP * full]
    least = min(good or arms[-1:], key=lambda arm: records["validation", arm].aggregates["mean_depth"])
    return least, bool(good)


def best_schedule(model: Any, asked: Sequence[nano.Question], budget: float, *, length: int = 64) -> list[int]:
    """Depths by output position, from R everywhere downwards: the step that costs the least accuracy for what it saves
    is taken again and again until the mean depth is within `budget`. Accuracy is that of whole teacher-forced answers.
    """
    wrong_QPR, alive_P = wrongness(model, asked, length)
    segments = wrong_QPR.shape[2]
    depths = torch.full((length,), segments)
    position = torch.arange(length)
    while float((depths[1:] * alive_P[1:]).sum() / alive_P[1:].sum()) > budget:
        current_QP = wrong_QPR[:, position, depths - 1]
        total_Q11 = current_QP.sum(1)[:, None, None]
        after_QPR = total_Q11 - current_QP[:, :, None] + wrong_QPR
        loss_PR = (total_Q11[:, 0, 0] == 0).float().mean() - (after_QPR == 0).float().mean(0)
        saved_PR = (depths[:, None] - torch.arange(1, segments + 1)) * alive_P[:, None]
        price_PR = torch.where(saved_PR > 0, loss_PR / saved_PR.clamp(min=1), torch.inf)
        price_PR[0] = torch.inf  # the first token comes from the prefill
        # of equal prices, what saves the most
        best = price_PR == price_PR.min()
        at = int(torch.where(best, saved_PR, -1).argmax())
        depths[at // segments] = at % segments + 1
    depths[alive_P == 0] = segments
    return [int(depth) for depth in depths]


@torch.inference_mode()
def wrongness(model: Any, asked: Sequence[nano.Question], length: int) -> tuple[Tensor, Tensor]:
    """(is the teacher-forced token of question Q at position P wrong at depth R, int64; answers alive at P)."""
    wrong, alive = [], torch.zeros(length, dtype=torch.int64)
    for batch in collate_sorted(list(question_rows(asked)), rows_per_chunk=64):
        states = all_depths(model, batch)
        right_AR = torch.stack([model.readout(k, h).argmax(-1) == batch.targets_A for k, h in enumerate(states, 1)], 1)
        rows_A = batch.answer_A // batch.ids_BT.shape[1]
        for row in rows_A.unique():
            answer = ~right_AR[rows_A == row]
            one = torch.zeros(length, answer.shape[1], dtype=torch.int64)
            one[: len(answer)] = answer
            wrong.append(one)
            alive[: len(answer)] += 1
    return torch.stack(wrong), alive


def tables(records: dict[tuple[str, str], Record]) -> str:
    """Markdown: both fills by setting, the gate against fixed depths and schedules, depth by hops."""
    first = records["test", "full-depth-4"].aggregates
    lines = [
        f"All {first['n']} test questions, greedy; accuracy is exact match in % with its 95 % Wilson interval, "
        "depth the mean readout depth of decode tokens.",
        "",
        "| setting | accuracy, `full` | accuracy, `last_exited` | depth | of 4 |",
        "|---|---|---|---|---|",
    ]
    for name in [*(f"depth-{d}" for d in (1, 2, 3, 4)), *(f"{tau:g}" for tau in THRESHOLDS)]:
        full, last = (records["test", f"{fill}-{name}"].aggregates for fill in FILLS)
        label = f"fixed depth {name[-1]}" if name.startswith("depth") else f"threshold {name}"
        lines.append(
            f"| {label} | {percent(full)} | {percent(last)} | {last['mean_depth']:.2f} "
            f"| {100 * last['mean_depth'] / 4:.0f} % |"
        )
    lines += [
        "",
        "The threshold that validation chose (the least depth that keeps 99 % of full depth's accuracy), on "
        "test questions, beside what other ways reach at its mean depth:",
        "",
        "| fill | threshold | depth | gate | line between fixed depths | best schedule by output position |",
        "|---|---|---|---|---|---|",
    ]
    for fill in FILLS:
        chosen, kept = choose(records, fill)
        label = chosen.removeprefix(f"{fill}-") + ("" if kept else " (none keeps 99 %)")
        gate = records["test", chosen].aggregates
        schedule = records["test", f"{fill}-schedule"].aggregates
        lines.append(
            f"| `{fill}` | {label} | {gate['mean_depth']:.2f} | {percent(gate)} "
            f"| {100 * on_line(records, fill, gate['mean_depth']):.1f} "
            f"| {percent(schedule)} at {schedule['mean_depth']:.2f} |"
        )
    lines += ["", *by_hops(records)]
    return "\n".join(lines) + "\n"


def by_hops(records: dict[tuple[str, str], Record]) -> list[str]:
    chosen = records["test", choose(records, "last_exited")[0]].aggregates
    levels = chosen["depth_by_level"]
    groups = chosen["by_group"]
    return [
        "Mean depth of the computed numbers by the steps they take, and accuracy and mean depth over all tokens by "
        "difficulty, at the threshold chosen for `last_exited`:",
        "",
        "| steps | " + " | ".join(levels) + " |",
        "|---" * (len(levels) + 1) + "|",
        "| depth of the number | " + " | ".join(f"{v['mean_depth']:.2f}" for v in levels.values()) + " |",
        "| depth of all tokens | " + " | ".join(f"{v['mean_depth']:.2f}" for v in groups.values()) + " |",
        "| accuracy, % | " + " | ".join(f"{100 * v['accuracy']:.1f}" for v in groups.values()) + " |",
    ]


def on_line(records: dict[tuple[str, str], Record], fill: str, depth: float) -> float:
    """Accuracy at a mean depth on the line between the two nearest fixed depths."""
    low = min(int(depth), 3)
    a, b = (records["test", f"{fill}-depth-{d}"].aggregates["accuracy"] for d in (low, low + 1))
    return float(a + (b - a) * (depth - low))


def percent(aggregates: dict[str, Any]) -> str:
    return f"{100 * aggregates['accuracy']:.1f} ({100 * aggregates['low']:.1f}-{100 * aggregates['high']:.1f})"


def write_card(model: str, text: str) -> None:
    card = Path(nano.__file__).parent / "weights" / model / "README.md"
    before, _, rest = card.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    card.write_text(f"{before}{BEGIN}\n{text}{END}{after}")


if __name__ == "__main__":
    main()
