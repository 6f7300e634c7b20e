"""`anydepth bench`: the arms of an evaluation timed on matched work. A thin caller of `eval` and `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from anydepth.eval.arms import Arm
from anydepth.progress import bars
from anydepth.record import Record

TIMED_HERE = {"fill", "signals", "lateness", "heads"}  # options of LLM; all but the heads may differ between cells


def bench_arms(
    arms: Sequence[Arm],
    *,
    model: str,
    task: str,
    out: Path,
    limit: int = 64,
    concurrency: Sequence[int] = (1, 8, 32),
    repetitions: int = 3,
    requests: int | None = None,
    trace: Path | None = None,
    trace_requests: int = 100,
    requests_per_s: float | None = None,
    rate_scale: float | None = None,
    max_batch: int = 32,
    seed: int = 0,
    data: Path | None = None,
    threads: int | None = None,
) -> Record:
    """Time every arm on the first `limit` questions of a task; the Record in `out`.

    The baseline, `never`, is added in front where no arm has that policy. trace: a JSONL of arrivals, whose first
    `trace_requests` are replayed at requests_per_s (or rate_scale trace seconds a second). threads: None is 1 for a
    small model. An interrupted bench goes on with the next concurrency. Raises ValueError for arms that differ in
    something else than policy, profile, fill and signals: all have the same exit heads, but one at full depth may leave
    them out.
    """
    from anydepth.bench.arrivals import fit, read_trace
    from anydepth.bench.run import run_bench
    from anydepth.bench.throughput import Cell
    from anydepth.engine.llm import LLM
    from anydepth.eval.backends.engine import EngineBackend
    from anydepth.eval.protocol import prompt_ids
    from anydepth.eval.study import tensor_threads
    from anydepth.eval.task import load_task

    loaded = load_task(task, data=data)
    questions = loaded.select(limit=limit)
    heads, profiles = _heads(arms), list(dict.fromkeys(arm.profile for arm in arms if arm.profile is not None))
    backend = EngineBackend(LLM(model, heads=heads, profile=profiles))
    loaded_profiles = dict(zip(profiles, backend.llm.engine.profiles.values(), strict=True))
    checkpoint = backend.llm.checkpoint
    shape = checkpoint.model.shape
    load = None
    if trace is not None:
        arrivals = read_trace(trace, limit=trace_requests)
        if requests_per_s is None and rate_scale is None:
            raise ValueError("a trace needs a rate: give --requests-per-s, or --rate-scale")
        load = fit(arrivals, max_positions=shape.max_positions, rate_scale=rate_scale, requests_per_s=requests_per_s)
    cells = []
    for arm in with_baseline(arms):
        if arm.backend != "engine" or arm.engine.keys() - TIMED_HERE:
            raise ValueError(
                f"arm {arm.name!r} has {arm.passed()}; a bench times policies, fills and signals of one engine"
            )
        sampling = arm.sampling(max_tokens=loaded.max_tokens, stop=tuple(loaded.stop))
        profile = None if arm.profile is None else loaded_profiles[arm.profile]
        if profile is not None:
            sampling = replace(sampling, profile=profile.name)
        options = {name: value for name, value in arm.engine.items() if name != "heads"}
        cells.append(Cell(arm.name, sampling, **options, profile=profile))
    with tensor_threads(threads, backend), bars("runs") as (runs,):
        return run_bench(
            checkpoint,
            cells=cells,
            prompts=[prompt_ids(backend, question) for question in questions],
            out=out,
            concurrency=concurrency,
            requests=requests,
            repetitions=repetitions,
            arrivals=load,
            max_batch=max_batch,
            task={"name": loaded.name, "hash": loaded.hash(questions)},
            heads=backend.llm.heads,
            seed=seed,
            settings_passed={"arms": [{"name": arm.name, **arm.passed()} for arm in arms]},
            progress=runs.reached,
        )


def _heads(arms: Sequence[Arm]) -> str | None:
    """The one folder of exit heads; ValueError where there are several, or an arm that may leave early has none."""
    from anydepth.exits.load import policy_name

    named = {arm.name: arm.heads for arm in arms if arm.heads is not None or policy_name(arm.sampling()) != "never"}
    if len(set(named.values())) > 1:
        said = ", ".join(f"{name} has {heads or 'none'}" for name, heads in named.items())
        raise ValueError(f"a bench times one model, with the same exit heads in all arms; here {said}: time them apart")
    return next(iter(named.values()), None)


def with_baseline(arms: Sequence[Arm]) -> list[Arm]:
    """The arms with a `never` one in front: the first that there is, else one that is added."""
    from anydepth.exits.load import policy_name

    plain = [arm for arm in arms if policy_name(arm.sampling()) == "never"]
    first = plain[0] if plain else Arm.parse({"name": "never", "policy": "never"})
    return [first, *(arm for arm in arms if arm is not first)]
