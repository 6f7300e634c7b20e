"""`make demo`: the main job on the embedded model, from questions to a table, a picture, a page and Records.

Every arm answers the same held-out questions, at a fixed depth or with the exit gate at one threshold; then all arms
are timed on matched work. A thin caller of `eval` and `bench`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anydepth.eval.arms import Arm
from anydepth.eval.backends.base import Backend
from anydepth.eval.numbers import digits, percent
from anydepth.eval.report import demo_page, plot
from anydepth.eval.run import provenance_of, question_ids_hash, run, token_pieces
from anydepth.eval.study import tensor_threads
from anydepth.eval.task import Question, Task, load_task
from anydepth.models.nano.questions import KINDS, question_text
from anydepth.progress import bars
from anydepth.record import HEADER, Record, RecordWriter, remove, write_atomically

if TYPE_CHECKING:
    from anydepth.engine.llm import LLM

THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.5, 0.9, 0.99)
HIGHLIGHT = 0.5  # the threshold that the page speaks of, fixed before any result was seen
BASELINE = "never"
CONCURRENCY = 32
REPETITIONS = 3
TIMED_QUESTIONS = 128
WORK = "segments a question: passes run for the generated tokens (fewer is cheaper)"
TIMING_SHARE = 0.5  # of the answers' time, for the progress bar


def demo(
    *,
    out: str | Path = "demo",
    questions: int = 300,
    model: str | Path = "nano",
    thresholds: Sequence[float] = THRESHOLDS,
    progress: bool = True,
) -> dict[str, Any]:
    """Run the sweep and write into `out`: pareto.png, report.html, a study Record, and records/<arm>/ for each arm.

    questions: held-out test questions an arm. thresholds: of the exit gate, besides 0.5, of which the page speaks.
    progress: a bar on stderr. The table goes to stdout. Returns the result that `--json` prints: `arms`, a list with
    name, policy, exit_threshold, depth, accuracy, low, high, n, mean_depth, segments_per_question, tokens_per_s,
    s_max, share_of_bound and more (shares in 0..1), and `files`.

    An interrupted run goes on where it stopped when it is called in the same way; after a complete one, all is new.
    Raises ValueError for a model without a gate and for an `out` that holds another Record.
    """
    from anydepth.engine.llm import LLM
    from anydepth.eval.backends.engine import EngineBackend

    start, folder = time.perf_counter(), Path(out)
    task = load_task("nano")
    asked = task.select(limit=questions)
    llm = LLM(model, max_batch=CONCURRENCY)
    backend = EngineBackend(llm)
    if not llm.engine.model.shape.has_gate:
        raise ValueError(f"model {model} has no exit gate, whose thresholds the demo sweeps; give nano or nano-plain")
    arms = sweep(llm.engine.model.shape.segments, thresholds)
    work = len(arms) * len(asked) * (1 + TIMING_SHARE)
    with (
        tensor_threads(1, backend),
        bars("", total=work, shown=progress) as (line,),
        open_study(folder, arms, task=task, asked=asked, backend=backend) as writer,
    ):
        records = []
        for arm in arms:
            line.tell(f"{arm.name}: {len(asked)} questions")
            records.append(
                run(
                    arm,
                    task=task,
                    backend=backend,
                    out=folder / "records" / arm.name,
                    questions=asked,
                    threads=1,
                    concurrency=CONCURRENCY,
                    progress=line.advance,
                )
            )
        line.tell("tokens per second, on matched work")
        speeds = throughput(llm, arms, asked, records[-1], advance=line.advance)
        line.reached(work, work)
        line.tell("done")
        for record in records:
            name = record.settings_used["name"]
            writer.append({"id": name, "answer_index": 0, "samples_sha256": record.samples_sha256, **speeds[name]})
        rows = [{**demo_page.row(record), **speeds[record.settings_used["name"]]} for record in records]
        study = writer.finish({"arms": rows})
    figure = plot.pareto(demo_page.pareto_points(rows), x_label=WORK)
    write_atomically(folder / "pareto.png", picture := plot.png(figure))
    html = demo_page.page(study, records, shown=answers(llm, asked, records), picture=picture)
    write_atomically(folder / "report.html", html.encode())
    print_table(rows, folder=folder, seconds=time.perf_counter() - start)
    files = {
        "report": folder / "report.html",
        "picture": folder / "pareto.png",
        "study": folder / HEADER,
        "records": folder / "records",
    }
    return {
        "model": str(model),
        "questions": len(asked),
        "arms": rows,
        "files": {name: str(path) for name, path in files.items()},
    }


def sweep(segments: int, thresholds: Sequence[float]) -> list[Arm]:
    """The arms: every fixed depth, the gate at every threshold, and full depth last."""
    fixed = [Arm.parse({"name": f"depth-{depth}", "depth": depth}) for depth in range(1, segments + 1)]
    gated = [
        Arm.parse({"name": gate_name(threshold), "exit_threshold": threshold})
        for threshold in sorted({*thresholds, HIGHLIGHT})
        if threshold < 1
    ]
    return [*fixed, *gated, Arm.parse({"name": BASELINE})]


def gate_name(threshold: float) -> str:
    return f"gate-{threshold:g}"


def open_study(
    folder: Path, arms: Sequence[Arm], *, task: Task, asked: Sequence[Question], backend: Backend
) -> RecordWriter:
    """The study's Record: the one that was interrupted, where it is of the same run, else a new one.

    Samples of a study are written in one go at its end, so an unfinished one with samples is begun anew too.
    """
    settings = {
        "study": "demo",
        "task": task.name,
        "model": backend.model_name,
        "questions": len(asked),
        "question_ids_sha256": question_ids_hash(asked),
        "arms": [arm.name for arm in arms],
        "highlight": gate_name(HIGHLIGHT),
        "baseline": BASELINE,
        "concurrency": CONCURRENCY,
        "repetitions": REPETITIONS,
        "timed_questions": min(TIMED_QUESTIONS, len(asked)),
    }

    def begin() -> RecordWriter:
        return RecordWriter(
            folder,
            kind="study",
            settings_used=settings,
            settings_passed={},
            provenance=provenance_of(task, backend, task.hash(asked), seed=0, threads=1),
        )

    if (folder / HEADER).exists():
        previous = Record.read(folder, samples=False)
        if previous.settings_used.get("study") != "demo":
            raise ValueError(f"{folder} holds a Record of something else; give another folder for the demo")
        try:
            writer = begin()
            if not writer.samples:
                return writer
            writer.close()
        except ValueError:
            pass  # of other questions, weights or versions
        for path in (folder / "records").glob("*/"):
            remove(path)
        remove(folder)
    return begin()


def throughput(
    llm: LLM, arms: Sequence[Arm], asked: Sequence[Question], full: Record, *, advance: Callable[[float], object]
) -> dict[str, dict[str, Any]]:
    """Speed of every arm on the same prompts and the answer lengths of full depth, beside its bound. Turns that carry
    prompt tokens are left out: they are the same in every arm, and no segment counted here is theirs."""
    from anydepth.bench.throughput import Cell, matched_work

    lengths = {sample["id"]: len(sample["output_ids"]) for sample in full.samples}
    timed = asked[:TIMED_QUESTIONS]
    cells = sorted((Cell(arm.name, arm.sampling()) for arm in arms), key=lambda cell: cell.name != BASELINE)
    part = TIMING_SHARE * len(arms) * len(asked) / (len(cells) * REPETITIONS)
    found = matched_work(
        llm.engine.model,
        cells,
        [llm.engine.requests.prompt_ids(str(question.prompt)) for question in timed],
        [lengths[question.id] for question in timed],
        concurrency=CONCURRENCY,
        repetitions=REPETITIONS,
        decode_only=True,
        progress=lambda done, total: advance(part),
    )
    return {cell.name: {key: value for key, value in cell.asdict().items() if key != "name"} for cell in found}


def answers(llm: LLM, asked: Sequence[Question], records: Sequence[Record]) -> list[demo_page.Shown]:
    """The first question of each difficulty (kinds take turns), as answered at depth 1, by the gate, at full depth."""
    assert llm.tokenizer is not None
    pieces = partial(token_pieces, llm.tokenizer.decode)
    labels = {"depth-1": "always 1 pass", gate_name(HIGHLIGHT): f"gate at {HIGHLIGHT}", BASELINE: "all passes"}
    samples = {record.settings_used["name"]: {sample["id"]: sample for sample in record.samples} for record in records}
    stop_ids = records[0].settings_used["stop_token_ids"]
    shown = []
    for index, difficulty in enumerate(sorted({question.data.difficulty for question in asked})):
        matching = [question for question in asked if question.data.difficulty == difficulty]
        kind = KINDS[index % len(KINDS)]
        question = next((question for question in matching if question.data.kind == kind), matching[0])
        shown.append(
            demo_page.Shown(
                title=f"Difficulty {difficulty}",
                asked=question_text(question.data),
                gold=question.gold,
                context=str(question.prompt).removesuffix(question_text(question.data)),
                answers=tuple(
                    demo_page.answer(samples[arm][question.id], label=label, pieces=pieces, stop_ids=stop_ids)
                    for arm, label in labels.items()
                ),
            )
        )
    return shown


def print_table(rows: Sequence[Mapping[str, Any]], *, folder: Path, seconds: float) -> None:
    """The sweep in one table on stdout, and where the rest is."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for heading in (
        "arm",
        "right %",
        "",
        "mean\ndepth",
        "segments/\nquestion",
        "tokens/s",
        "speed-\nup",
        "bound",
        "% of\nbound",
    ):
        table.add_column(heading, justify="left" if heading in ("arm", "") else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            percent(row["accuracy"]),
            f"{percent(row['low'])}-{percent(row['high'])}",
            digits(row["mean_depth"]),
            digits(row["segments_per_question"], 1),
            digits(row["tokens_per_s"], 0),
            digits(row["s"]),
            digits(row["s_max"]),
            percent(row["share_of_bound"], 0),
            style="bold" if row["name"] == gate_name(HIGHLIGHT) else "",
        )
    console = Console()
    console.print(table)
    console.print("right %: with 95 % interval; tokens/s: decoding the same tokens in each arm;", highlight=False)
    console.print("speed-up: over never; bound: the speed-up that the work saved allows", highlight=False)
    console.print(
        f"{seconds:.0f} s. Open {folder / 'report.html'} in a browser: answers with every token coloured by its depth.",
        soft_wrap=True,
        highlight=False,
    )
