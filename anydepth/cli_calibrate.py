"""`anydepth calibrate`: a threshold or profile of early exit, with a guarantee: on a task's questions, or with --heads
on prompts of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from anydepth.cli_options import AsJson, Device, Dtype, Model, Revision, finish, passed, read_fields

app = typer.Typer()

_OF_A_TASK = ("task", "split", "threshold", "min_depth", "setting", "loss", "method", "monotonise", "fitted_on")
_OF_FITTING = ("level", "install", "fill", "eps", "delta")
_OF_HEADS = ("level", "answer_tokens", "answers", "install", "check", "fill", "dtype", "device", "revision")


@app.command()
def calibrate(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder of all that is made; goes on there.")],
    eps: Annotated[float | None, typer.Option(help="Risk that is allowed; 0.05 with --heads.")] = None,
    delta: Annotated[float, typer.Option(help="Chance that the certificate is wrong.")] = 0.05,
    model: Model = "nano",
    heads: Annotated[Path | None, typer.Option(help="Exit heads of a layered model.")] = None,
    policy: Annotated[str | None, typer.Option(help="With heads: probe or confidence.")] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(help="With heads: JSONL of prompts, or FILE:500; repeat. Of a task: folder of data files."),
    ] = None,
    fill: Annotated[str, typer.Option(help="With heads: full, deferred or project.")] = "full",
    level: Annotated[list[float] | None, typer.Option(help="Agreement that a profile aims at; repeat.")] = None,
    answer_tokens: Annotated[int, typer.Option(help="Longest of full depth's answers.")] = 128,
    answers: Annotated[Path | None, typer.Option(help="Folder of them, made once; OUT/answers if left out.")] = None,
    install: Annotated[bool, typer.Option("--install", help="Copy the profiles to the heads' folder.")] = False,
    check: Annotated[Path | None, typer.Option(help="Fit nothing; report on this profile.")] = None,
    profile: Annotated[
        list[str] | None, typer.Option(help="Of a task, with heads: a grid point, strictest first; repeat.")
    ] = None,
    task: Annotated[str, typer.Option("--task", "-t", help="nano, gsm8k, ... or a .py file.")] = "nano",
    split: Annotated[str, typer.Option(help="Certifying questions: no test split.")] = "calibration",
    limit: Annotated[int | None, typer.Option(help="The first n questions by hash ranking.")] = None,
    threshold: Annotated[list[float] | None, typer.Option(help="A grid point; repeat.")] = None,
    min_depth: Annotated[list[int] | None, typer.Option(help="Another axis of the grid; repeat.")] = None,
    setting: Annotated[str, typer.Option("--set", help='Of all arms, such as "fill=full,dtype=float64".')] = "",
    loss: Annotated[str, typer.Option(help="lost (full depth right, early wrong), wrong or disagree.")] = "lost",
    method: Annotated[str, typer.Option(help="ltt (learn then test) or conformal_risk_control.")] = "ltt",
    monotonise: Annotated[bool, typer.Option("--monotonise", help="Conformal: make losses monotone.")] = False,
    fitted_on: Annotated[list[Path] | None, typer.Option(help="Record or file of ids the grid was fitted on.")] = None,
    seed: Annotated[int, typer.Option(help="Of answers drawn at a temperature; with --heads of the split.")] = 0,
    concurrency: Annotated[int, typer.Option(help="Answers at a time.")] = 32,
    threads: Annotated[int | None, typer.Option(help="CPU threads; 1 for small models if left out.")] = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Choose a threshold with a finite-sample guarantee, and write its certificate.

    Of a task: anydepth calibrate --task nano --eps 0.05 --out certified
    Of exit heads, whose profiles are fitted first: anydepth calibrate --model M --heads H --policy probe --data
    prompts.jsonl --out calibrated
    """
    given = [*passed(context)]
    if heads is not None and "model" not in given:
        raise ValueError("--heads needs --model, the one that they were made for (heads.json has its name as base)")
    if heads is not None and not {"task", "profile"} & {*given}:
        _refuse(given, (*_OF_A_TASK, "concurrency"), "is for a task's questions, not for --heads; leave one out")
        if check is not None:
            _refuse(given, _OF_FITTING, "is for fitting profiles, and --check reports on one; leave one out")
        _calibrate_heads(
            out,
            check=check,
            answers=answers,
            install=install,
            threads=threads,
            as_json=as_json,
            model=model,
            heads=heads,
            policy=policy,
            data=data,
            fill=fill,
            level=level,
            eps=eps,
            delta=delta,
            answer_tokens=answer_tokens,
            limit=limit,
            seed=seed,
            dtype=dtype,
            device=device,
            revision=revision,
        )
        return
    _refuse(given, _OF_HEADS, "is for fitting profiles, with --heads and without --task or --profile; leave one out")
    if eps is None:
        raise ValueError("a task's certificate needs --eps, the risk that is allowed, such as 0.05")
    if data is not None and len(data) > 1:
        raise ValueError("a task has one folder of data files; give --data once")
    if profile and (heads is None or threshold or min_depth):
        raise ValueError("--profile needs --heads, and stands in place of --threshold and --min-depth")
    if not profile and (heads is not None or policy is not None):
        raise ValueError("--heads and --policy of a task need the grid's points: give --profile, the strictest first")
    settings = read_fields(setting)
    if profile:
        settings |= {"heads": str(heads)} | ({} if policy is None else {"policy": policy})

    from dataclasses import asdict

    from anydepth.certificate import describe
    from anydepth.eval.calibrate import THRESHOLDS, Goal, certify
    from anydepth.eval.data import read_ids
    from anydepth.eval.study import Options

    certificate = certify(
        Goal(epsilon=eps, delta=delta, loss=loss, method=method, monotonise=monotonise),
        model=model,
        task=task,
        out=out,
        thresholds=threshold or THRESHOLDS,
        min_depths=min_depth or (1,),
        profiles=profile or (),
        settings=settings,
        split=split,
        limit=limit,
        fitted_on=[id for path in fitted_on or () for id in read_ids(path)],
        seed=seed,
        options=Options(data=data[0] if data else None, concurrency=concurrency, threads=threads),
    )
    print(describe(certificate))
    print(f"Certificate in {out / 'certificate.json'}")
    result = {**asdict(certificate), "file": str(out / "certificate.json"), "says": describe(certificate)}
    finish("calibrate", result, as_json)


def _calibrate_heads(
    out: Path,
    *,
    check: Path | None,
    answers: Path | None,
    install: bool,
    threads: int | None,
    as_json: bool,
    policy: str | None,
    data: list[Path] | None,
    level: list[float] | None,
    eps: float | None,
    **options: Any,
) -> None:
    """Fit profiles to heads and certify them, or report on one."""
    import torch

    from anydepth.calibrate.fit import LEVELS
    from anydepth.calibrate.job import Job
    from anydepth.calibrate.run import calibrate_heads, check_profile
    from anydepth.train.head_data import Source

    if policy is None:
        raise ValueError("no policy was given; name one with --policy: probe or confidence")
    if threads is not None:
        torch.set_num_threads(threads)
    sources = [Source.parse(str(path), own_answers=True) for path in data or ()]
    levels = tuple(level or LEVELS)
    job = Job(policy=policy, data=tuple(sources), levels=levels, epsilon=0.05 if eps is None else eps, **options)
    if check is not None:
        found = check_profile(job, check, out, answers=answers)
    else:
        found = calibrate_heads(job, out, answers=answers, install=install)
        print(f"Profiles, calibration.json and what was certified are in {out}")
    finish("calibrate", found, as_json)


def _refuse(given: list[str], names: tuple[str, ...], why: str) -> None:
    """ValueError for options of the other kind: they would change nothing."""
    if wrong := [f"--{'set' if name == 'setting' else name.replace('_', '-')}" for name in names if name in given]:
        raise ValueError(f"{', '.join(wrong)} {why}")
