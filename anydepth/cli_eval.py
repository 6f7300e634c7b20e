"""Commands about results: eval, compare, report, bench, lm-eval. One function call a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from anydepth.cli_options import AsJson, Model, finish, passed, read_fields

app = typer.Typer()


@app.command("eval")
def evaluate(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option(help="Folder of the Records, one folder an arm; goes on there.")] = None,
    study: Annotated[Path | None, typer.Option(help="Arms, questions and rules: an arms.toml.")] = None,
    protocol: Annotated[Path | None, typer.Option(help="A frozen study; refuses anything changed since.")] = None,
    freeze: Annotated[Path | None, typer.Option(help="Write the study to this file, so that it can't change.")] = None,
    model: Model = "nano",
    task: Annotated[str, typer.Option("--task", "-t", help="nano, gsm8k, mmlu, ifeval, ... or a .py file.")] = "nano",
    arm: Annotated[list[str] | None, typer.Option(help='Such as "exit_threshold=0.5,min_depth=2"; repeat.')] = None,
    split: Annotated[str | None, typer.Option(help="The task's first if left out.")] = None,
    limit: Annotated[int | None, typer.Option(help="The first n questions by hash ranking.")] = None,
    ids: Annotated[Path | None, typer.Option(help="Record or file of question ids, one a line.")] = None,
    seed: Annotated[int, typer.Option(help="Of answers drawn at a temperature.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Folder of data files; else ANYDEPTH_DATA.")] = None,
    concurrency: Annotated[int, typer.Option(help="Answers at a time.")] = 32,
    threads: Annotated[int | None, typer.Option(help="CPU threads; 1 for small models if left out.")] = None,
    trust_remote_code: Annotated[str | None, typer.Option(help="Name of the one model whose own code may run.")] = None,
    outputs: Annotated[Path | None, typer.Option(help="alpacaeval: folder for what its judge reads.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="An arm to run now, by name; repeat. Others stay.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run arms over the same questions, one Record an arm; an interrupted run goes on where it stopped."""
    from anydepth.eval.arms import Study
    from anydepth.eval.data import read_ids
    from anydepth.eval.protocol import read_frozen, study_of, write_frozen
    from anydepth.eval.show import show_arms
    from anydepth.eval.study import Options, freeze_study, run_study

    if study is not None and protocol is not None:
        raise ValueError("--study and --protocol were given together; give one of them")
    if study is not None or protocol is not None:
        _refuse_beside_a_file(context, "arm", "model", "task", "split", "limit", "ids", "seed")
    if out is None and freeze is None:
        raise ValueError("nothing to do: give --out to run the study, --freeze to write it down, or both")
    frozen = read_frozen(protocol) if protocol else None
    if frozen is not None:
        plan = study_of(frozen)
    elif study is not None:
        plan = Study.read(study)
    else:
        head: dict[str, Any] = {"task": task, "model": model, "split": split, "limit": limit, "seed": seed}
        if ids is not None:
            head["ids"] = read_ids(ids)
        arms = [_arm(text) for text in arm or ["name=never"]]
        plan = Study.parse({"study": {k: v for k, v in head.items() if v is not None}, "arm": arms})
    if outputs is not None and (out is None or plan.task != "alpacaeval"):
        raise ValueError(f"--outputs is for answers to alpacaeval, this is {plan.task}; leave it out, or add --out")
    options = Options(data=data, concurrency=concurrency, threads=threads, trust_remote_code=trust_remote_code)
    if freeze is not None:
        frozen = freeze_study(plan, options=options)
        write_frozen(freeze, frozen)
        print(f"frozen in {freeze}: study_hash {frozen['study_hash'][:16]}")
    records = [] if out is None else run_study(plan, out=out, frozen=frozen, options=options, only=only)
    if outputs is not None:
        from anydepth.eval.alpaca_outputs import write_outputs
        from anydepth.eval.task import load_task

        outputs.mkdir(parents=True, exist_ok=True)
        judged = load_task(plan.task, data=data)
        for record in records:
            path = outputs / f"{record.settings_used['name']}.json"
            print(f"for the judge: {write_outputs(record, judged, path)}")
    finish("eval", show_arms(records, folder=out), as_json)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="Folder of a Record.")],
    b: Annotated[Path, typer.Argument(help="Folder of the Record it is held against.")],
    margin_pp: Annotated[float | None, typer.Option(help="Non-inferior: A at most so many points below B.")] = None,
    clustered: Annotated[bool, typer.Option("--clustered", help="Several answers a question.")] = False,
    as_json: AsJson = False,
) -> None:
    """Two arms on the same questions: what differs, gains and losses, tests, where answers part ways."""
    from anydepth.eval.compare.compare import compare as run
    from anydepth.eval.compare.words import print_comparison
    from anydepth.record import Record

    found = run(Record.read(a), Record.read(b), margin_pp=margin_pp, clustered=clustered)
    print_comparison(found)
    finish("compare", found.asdict(), as_json)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of studies, Records and benches; all below is read.")],
    out: Annotated[Path, typer.Option(help="Folder of report.html, report.md and pictures.")] = Path("report"),
    margin_pp: Annotated[float, typer.Option(help="Margin of non-inferiority, in percentage points.")] = 1.0,
    baseline: Annotated[str | None, typer.Option(help="Hold every arm against this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """One page from Records alone: accuracy against work, pairs, rules, throughput, a proposal."""
    from anydepth.eval.report.report import report as run

    result = run(folders, out, margin_pp=margin_pp, baseline=baseline)
    for section in result["sections"]:
        print("\n".join([section["title"], *section["proposal"]["lines"]]))
        for rule in section["rules"]:
            met = {True: "met", False: "not met", None: "open"}[rule["met"]]
            print(f"Rule {rule['rule']['name']!r}, {rule['since']}: {met}; {'; '.join(rule['because'])}")
    print(f"Open {result['files']['html']}, or read {result['files']['markdown']}")
    finish("report", result, as_json)


@app.command()
def bench(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of the Record; goes on there.")],
    arm: Annotated[list[str] | None, typer.Option(help='Such as "exit_threshold=0.5,fill=full"; repeat.')] = None,
    study: Annotated[Path | None, typer.Option(help="Arms, task and model of an arms.toml instead.")] = None,
    model: Model = "nano",
    task: Annotated[str, typer.Option("--task", "-t", help="Where the prompts are from.")] = "nano",
    limit: Annotated[int, typer.Option(help="Prompts, the first by hash ranking.")] = 64,
    concurrency: Annotated[str, typer.Option(help="Requests at a time, a list.")] = "1,8,32",
    repetitions: Annotated[int, typer.Option(help="Runs of each cell, in shuffled order.")] = 3,
    requests: Annotated[int | None, typer.Option(help="Of a run; four a slot if left out.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Arrivals for the open loop, a JSONL.")] = None,
    trace_requests: Annotated[int, typer.Option(help="How many of them.")] = 100,
    requests_per_s: Annotated[float | None, typer.Option(help="Mean rate to which the trace is scaled.")] = None,
    rate_scale: Annotated[float | None, typer.Option(help="Or: trace seconds a second.")] = None,
    max_batch: Annotated[int, typer.Option(help="Slots of the open loop's engine.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the order of runs, and of what is drawn.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Folder of data files; else ANYDEPTH_DATA.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; 1 for small models if left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time arms on the same work at several concurrencies, beside their bounds, and under recorded arrivals."""
    from anydepth.bench.table import print_tables
    from anydepth.bench_arms import bench_arms
    from anydepth.eval.arms import Arm, Study

    if study is not None:
        _refuse_beside_a_file(context, "arm", "model", "task")
    plan = Study.read(study) if study else None
    record = bench_arms(
        plan.arms if plan else [Arm.parse(_arm(text)) for text in arm or ["name=never"]],
        model=plan.model if plan else model,
        task=plan.task if plan else task,
        out=out,
        limit=limit,
        concurrency=_whole_numbers(concurrency),
        repetitions=repetitions,
        requests=requests,
        trace=trace,
        trace_requests=trace_requests,
        requests_per_s=requests_per_s,
        rate_scale=rate_scale,
        max_batch=max_batch,
        seed=seed,
        data=data,
        threads=threads,
    )
    print_tables(record)
    print(f"Record in {out}")
    finish("bench", {**record.aggregates, "folder": str(out)}, as_json)


@app.command(
    "lm-eval",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def lm_eval(context: typer.Context) -> None:
    """Run lm-evaluation-harness, all of its tasks and options, with the engine as its model."""
    from anydepth.eval.lm_eval.command import main as run

    run(context.args)


def _refuse_beside_a_file(context: typer.Context, *names: str) -> None:
    """ValueError for options that the study's file decides: they would change nothing."""
    if given := [f"--{name}" for name in names if name in passed(context)]:
        raise ValueError(f"{', '.join(given)} stands beside the study's file, which says that itself; give one of them")


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(
            f"concurrency is {text!r}; allowed: whole numbers separated by commas, such as 1,8,32"
        ) from error


def _arm(text: str) -> dict[str, Any]:
    """ "exit_threshold=0.5,fill=full" as the fields of an [[arm]]; without a name, the text itself becomes it, with
    the folder's own name for heads."""
    given = read_fields(text)
    said = {"exit_threshold": "gate-", **dict.fromkeys(("fill", "policy", "backend", "dtype", "signals"), "")}
    short = {key: Path(str(value)).name if key == "heads" else value for key, value in given.items()}
    name = "_".join(f"{said.get(key, f'{key}-')}{value}" for key, value in short.items())
    return {"name": "".join(c if c.isalnum() or c in "_.+-" else "-" for c in name), **given}
