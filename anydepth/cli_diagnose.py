"""`anydepth diagnose`: why two runs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from anydepth.cli_options import AsJson, finish, read_fields

app = typer.Typer()


@app.command()
def diagnose(
    a: Annotated[str, typer.Argument(help='Folder of a Record, or settings: "signals=sync,exit_threshold=0.5".')],
    b: Annotated[str, typer.Argument(help="What it is held against: a Record, or settings.")],
    arms: Annotated[Path | None, typer.Option(help="An arms.toml; A and B are names of its arms.")] = None,
    bisect: Annotated[bool, typer.Option("--bisect", help="Name the setting that changes outputs.")] = False,
    model: Annotated[str | None, typer.Option("--model", "-m", help="nano; of a Record its own.")] = None,
    task: Annotated[str | None, typer.Option("--task", "-t", help="nano; of a Record its own.")] = None,
    split: Annotated[str | None, typer.Option(help="The task's first if left out.")] = None,
    limit: Annotated[int | None, typer.Option(help="The first n questions by hash ranking.")] = None,
    seed: Annotated[int, typer.Option(help="Of answers drawn at a temperature.")] = 0,
    concurrency: Annotated[int | None, typer.Option(help="Answers at a time, 32; of a Record its own.")] = None,
    baseline: Annotated[int | None, typer.Option(help="Questions that measure batch variance; all.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data files; else ANYDEPTH_DATA.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; 1 for small models if left out.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of diagnosis.json and the Records; goes on there.")] = None,
    as_json: AsJson = False,
) -> None:
    """Two runs, answer by answer: where they first differ, how narrow that was, and whether batch variance explains it.

    Ends with status 0 whatever it finds, as compare does; --json has the counts.
    """
    from anydepth.diagnose import command, show
    from anydepth.eval.arms import Study

    for name, value in (("concurrency", concurrency), ("baseline", baseline), ("threads", threads)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; allowed: whole numbers from 1")
    where: dict[str, Any] = {"split": split, "limit": limit, "seed": seed}
    if arms is not None:
        study = Study.read(arms)
        sources: list[Any] = command.arms_of(study, [a, b])
        model, task = model or study.model, task or study.task
        where = {"split": split or study.split, "limit": limit or study.limit, "seed": seed or study.seed}
        where["ids"] = study.ids if limit is None else None
    else:
        sources = [command.source(text, read_fields) for text in (a, b)]
    with command.results_in(out) as folder:
        place = command.workplace_of(
            sources,
            model=model,
            task=task,
            data=data,
            out=folder,
            concurrency=concurrency or 32,
            threads=threads,
            baseline=baseline,
            **where,
        )
        one, other = command.sides_of(place, sources)
        if bisect:
            command.refuse_other_work(one, other)
        found = command.diagnose_sides(place, one, other, concurrency=concurrency)
        show.print_diagnosis(found)
        result = {"a": a, "b": b, **found.asdict()}
        if bisect:
            ladder = command.bisect_sides(place, one.given, other.given)
            show.print_bisection(ladder)
            result["bisect"] = ladder.asdict()
        if out is not None:
            command.write(out, result)
            print(f"Diagnosis and Records in {out}")
    finish("diagnose", result, as_json)
