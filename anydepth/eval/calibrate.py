"""Threshold choice with a finite-sample guarantee: Records on certifying questions in, a certificate out. No torch.

A grid of exit settings is tried from the most conservative on. Learn then test (arXiv 2110.01052): each gets the
Hoeffding-Bentkus p-value of "the mean loss is above epsilon", and the last one before the first p above delta is taken;
with probability 1 - delta its true loss is at most epsilon. Where not even the first holds, it is `never`. Conformal
risk control (arXiv 2208.02814) bounds the expected loss instead, for losses that never fall along the grid.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import fsum
from pathlib import Path
from typing import Any

from anydepth.certificate import (
    DRAW_SETTINGS,
    EXIT_SETTINGS,
    FILE,
    GRID_SETTINGS,
    LOSSES,
    NEVER,
    OF_TOKENS,
    PROFILED,
    Certificate,
    question_set_hash,
)
from anydepth.eval.arms import Arm, Study
from anydepth.eval.calibrate_checks import check_finished, check_paired, check_questions
from anydepth.eval.study import Backends, Options, ask_task, run_study
from anydepth.profile import Profile, profile_path
from anydepth.provenance import source
from anydepth.record import Record, Sample, write_atomically
from anydepth.stats import conformal_risk_control, fixed_sequence, hoeffding_bentkus
from anydepth.types import unknown

METHODS = ("ltt", "conformal_risk_control")
THRESHOLDS = (0.99, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1)
PLAN = "grid.json"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What is to be shown: a mean loss of at most `epsilon`, with confidence 1 - `delta`.

    loss: "lost" (full depth right and early exit wrong; of partial credit, what it loses), "wrong" (1 - score),
    "disagree" (another answer than full depth's). method: "ltt" or "conformal_risk_control", which has no delta (it
    bounds the expected loss) and with `monotonise` takes the largest loss so far where a question's loss falls.
    """

    epsilon: float
    delta: float = 0.05
    loss: str = "lost"
    method: str = "ltt"
    monotonise: bool = False

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
                raise ValueError(f"{name} is {value!r}; allowed: numbers above 0 and below 1")
        if self.loss not in LOSSES or self.loss in OF_TOKENS:  # those are of answers that are forced, not graded
            raise unknown("loss", str(self.loss), [loss for loss in LOSSES if loss not in OF_TOKENS])
        if self.method not in METHODS:
            raise unknown("method", str(self.method), METHODS)
        if self.monotonise and self.method == "ltt":
            raise ValueError("monotonise is for conformal_risk_control; ltt needs no monotone losses: leave it out")
        if self.loss == "wrong" and self.method != "ltt":
            raise ValueError(
                "conformal risk control needs a loss that full depth keeps below epsilon, and 'wrong' it may not; "
                "give loss 'lost' or 'disagree', or method 'ltt'"
            )


def certify(
    goal: Goal,
    *,
    model: str,
    task: str,
    out: str | Path,
    thresholds: Sequence[float] = THRESHOLDS,
    min_depths: Sequence[int] = (1,),
    profiles: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    split: str = "calibration",
    limit: int | None = None,
    fitted_on: Collection[str] = (),
    seed: int = 0,
    options: Options | None = None,
    progress: bool = True,
) -> Certificate:
    """Run full depth and every threshold over the questions, into `out`, and certify; `out`/certificate.json has it.

    settings: fields of an [[arm]] that all runs share, such as fill, dtype, temperature, policy (gate_cdf). profiles:
    the grid instead of thresholds and min_depths, by path or by name in the folder of `heads`, the most conservative
    first; settings then have `heads` and the policy, `confidence` or `probe`. limit: the first n
    questions by hash ranking. fitted_on: ids of questions on which anything was fitted (a gate, the grid).
    Grid, goal and questions are written to `out`/grid.json before the first answer and cannot be changed afterwards.
    An interrupted call goes on when it is made again.

    Raises ValueError, before anything is computed, for all that `calibrate` refuses but what the answers decide.
    """
    options = options or Options()
    full, points = (
        _profile_arms(profiles, settings or {}) if profiles else _arms(thresholds, min_depths, settings or {})
    )
    study = Study(task=task, model=model, arms=(full, *points), limit=limit, split=split, seed=seed)
    asked, questions = ask_task(study, options)
    tests = [question.id for question in asked.questions("test")] if "test" in asked.splits else []
    ids = [question.id for question in questions]
    check_questions(ids, split=split, test_ids=tests, fitted_on=fitted_on)
    backends = Backends(study, options)
    used = backends.check(asked)  # before the plan is written, which cannot be changed afterwards
    grid = (_distinct if profiles else _ordered)([_setting(arm) for arm in points])
    of = [used[arm.name] for arm in points]
    fix_plan(Path(out), _plan(goal, grid=grid, used=of, ids=ids, model=model, task=asked.name))
    records = run_study(study, out=out, options=options, backends=backends, progress=progress)
    return calibrate(goal, full=records[0], grid=records[1:], out=out, fitted_on=fitted_on, test_ids=tests)


def calibrate(
    goal: Goal,
    *,
    full: Record,
    grid: Sequence[Record],
    out: str | Path,
    fitted_on: Collection[str] = (),
    test_ids: Collection[str] | None = None,
) -> Certificate:
    """Choose among the settings of `grid`, one Record each, and write `out`/certificate.json.

    full: the same questions under `never`. fitted_on: ids of questions on which anything was fitted. test_ids: of the
    task's test questions; needed where the Records do not name their split. A question that could not be scored counts
    with loss 1; of several answers to a question the mean loss counts.

    Raises ValueError for Records that are incomplete, of other questions, of another protocol, or that differ in more
    than a threshold; a setting that comes twice; test questions; questions also fitted on; fewer than 500; an `out`
    that has another grid, loss, epsilon, delta or questions; and for conformal risk control where a loss falls.
    """
    check_finished([full, *grid])
    profiled = bool(grid) and _of_profiles(grid[0])
    points = list(grid) if profiled else sorted(grid, key=lambda record: _key(_point(record)))
    order = (_distinct if profiled else _ordered)([_point(record) for record in points])
    ids = check_paired(full, points)
    check_questions(ids, split=full.settings_used.get("split"), test_ids=test_ids, fitted_on=fitted_on)
    used = points[0].settings_used
    folder = Path(out)
    of = [record.settings_used for record in points]
    fix_plan(folder, _plan(goal, grid=order, used=of, ids=ids, model=used["model"], task=used["task"]))
    losses = [_losses(goal.loss, full, record, ids) for record in points]
    count, method, p_values = _tested(goal, losses, points, ids)
    certificate = Certificate(
        model_hash=points[0].provenance["model"]["hash"],
        head_hash=points[0].provenance["model"].get("head_hash"),
        policy={
            "exit_policy": points[0].settings_passed.get("policy", used["policy"]),  # an own one's importable name
            # Older Records do not speak of the policies that came later.
            **{n: used[n] for n in EXIT_SETTINGS if n in used and n not in ("exit_policy", *order[0])},
            "segments": used["segments"],
        },
        fill=used["fill"],
        signals=used.get("signals", "sync"),
        dtype=used["dtype"],
        gate_dtype=used["gate_dtype"],
        sampling={name: used[name] for name in DRAW_SETTINGS},
        protocol_hash=str(full.protocol_hash),
        loss=goal.loss,
        grid=tuple(order),
        n=len(ids),
        eps=goal.epsilon,
        delta=goal.delta if goal.method == "ltt" else None,
        method=method,
        points=tuple(
            {
                "n": len(ids),
                "losses": fsum(lost),
                "unscored": _unscored(goal.loss, full, record),
                "p": p,
                **({"profile_hash": record.settings_used.get("profile_hash")} if profiled else {}),
            }
            for lost, record, p in zip(losses, points, p_values, strict=True)
        ),
        chosen=order[count - 1] if count else NEVER,
        fitted_on=question_set_hash(fitted_on) if fitted_on else None,
        certified_on=question_set_hash(ids),
        seed=used["seed"],
        made_by=source(),
    )
    certificate.write(folder / FILE)
    return certificate


def _arms(
    thresholds: Sequence[float], min_depths: Sequence[int], settings: Mapping[str, Any]
) -> tuple[Arm, tuple[Arm, ...]]:
    """Full depth, and an arm for each setting, the most conservative first."""
    for name in ("name", "backend", *GRID_SETTINGS, "depth", "trace", "certificate"):
        if name in settings:
            raise ValueError(
                f"{name} was given for all settings; give what they share, thresholds and min_depths apart"
            )
    shared = {name: value for name, value in settings.items() if name not in (*EXIT_SETTINGS, "policy")}
    full = Arm.parse({**shared, "name": "full-depth", "policy": NEVER})
    grid = _ordered([{"exit_threshold": tau, "min_depth": low} for tau, low in product(thresholds, min_depths)])
    names = [f"threshold-{point['exit_threshold']!r}-min-{point['min_depth']}" for point in grid]
    arms = [
        Arm.parse({"policy": "gate_cdf", **settings, **point, "name": name})
        for point, name in zip(grid, names, strict=True)
    ]
    return full, tuple(arms)


def _profile_arms(profiles: Sequence[str], settings: Mapping[str, Any]) -> tuple[Arm, tuple[Arm, ...]]:
    """Full depth, and an arm for each profile, in their order."""
    for name in ("name", "backend", "profile", *GRID_SETTINGS, "depth", "trace", "certificate"):
        if name in settings:
            raise ValueError(f"{name} was given for all settings; give what they share, and profiles apart")
    if settings.get("policy") not in PROFILED or not settings.get("heads"):
        raise ValueError(f"profiles are of heads and of a policy, {' or '.join(PROFILED)}; give both")
    shared = {name: value for name, value in settings.items() if name not in (*EXIT_SETTINGS, "policy")}
    full = Arm.parse({**shared, "name": "full-depth", "policy": NEVER})
    named = [(Profile.read(profile_path(profile, settings["heads"])).name, profile) for profile in profiles]
    return full, tuple(Arm.parse({**settings, "name": name, "profile": profile}) for name, profile in named)


def _setting(arm: Arm) -> dict[str, Any]:
    """The setting of the grid that an arm has."""
    return {"profile": arm.name} if "exit_threshold" not in arm.options else {n: arm.options[n] for n in GRID_SETTINGS}


def _point(record: Record) -> dict[str, Any]:
    """The setting of the grid that a Record is of."""
    names = ("profile",) if _of_profiles(record) else GRID_SETTINGS
    return {name: record.settings_used[name] for name in names}


def _of_profiles(record: Record) -> bool:
    return record.settings_used["policy"] in PROFILED


def _key(point: Mapping[str, Any]) -> tuple[float, int]:
    return -point["exit_threshold"], -point["min_depth"]


def _ordered(grid: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The settings, the most conservative first: high thresholds, and of equal ones the later exit."""
    return _distinct(sorted(grid, key=_key))


def _distinct(grid: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The settings as they are; ValueError for none, and for one that comes twice."""
    if not grid:
        raise ValueError("the grid is empty; give at least one setting to certify")
    for at, one in enumerate(grid):
        if one in grid[:at]:
            raise ValueError(f"the grid has {dict(one)} twice; give each setting once")
    return list(grid)


def _plan(
    goal: Goal,
    *,
    grid: Sequence[Mapping[str, Any]],
    used: Sequence[Mapping[str, Any]],
    ids: Sequence[str],
    model: str,
    task: str,
) -> dict[str, Any]:
    """What must be fixed before the answers are looked at; `used` are all settings of each point of the grid."""
    heads = dict[str, Any]()
    if used[0]["policy"] in PROFILED:  # whose names in the grid do not say which thresholds they are
        heads = {"policy": used[0]["policy"], "head_hash": used[0].get("head_hash")}
        heads["profile_hashes"] = [settings.get("profile_hash") for settings in used]
    return {
        "version": _VERSION,
        "model": model,
        "task": task,
        "grid": [dict(point) for point in grid],
        "loss": goal.loss,
        "eps": goal.epsilon,
        "delta": goal.delta if goal.method == "ltt" else None,
        "method": goal.method,
        "monotonise": goal.monotonise,
        "n": len(ids),
        "question_ids_sha256": question_set_hash(ids),
        **heads,
    }


def fix_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Write the plan, once; ValueError where another one was written before."""
    path = folder / PLAN
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(plan, indent=1).encode() + b"\n")
        return
    try:
        fixed = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no plan of a calibration ({error!r}); give another folder") from error
    if changed := [name for name in {**fixed, **plan} if fixed.get(name) != plan.get(name)]:
        said = "; ".join(f"{name} was {fixed.get(name)!r} and is {plan.get(name)!r}" for name in changed)
        raise ValueError(
            f"{path} was fixed before the answers were looked at, and something is altered: {said}. Keep to it, or "
            f"take another folder and questions that were not looked at (delete the file only if no answer was made)"
        )


def _losses(loss: str, full: Record, early: Record, ids: Sequence[str]) -> list[float]:
    """A question's loss, the mean over its answers, in the order of `ids`."""
    deep = {(sample["id"], sample["answer_index"]): sample for sample in full.samples}
    found: dict[str, list[float]] = {id: [] for id in ids}
    for sample in early.samples:
        found[sample["id"]].append(_loss(loss, deep[sample["id"], sample["answer_index"]], sample))
    return [fsum(each) / len(each) for each in found.values()]


def _loss(loss: str, full: Sample, early: Sample) -> float:
    if early["score"] is None or (full["score"] is None and loss != "wrong"):
        return 1.0
    if loss == "lost":
        return max(0.0, float(full["score"] - early["score"]))
    if loss == "wrong":
        return 1.0 - float(early["score"])
    one, other = (next(iter(sample["prediction"].values()), None) for sample in (full, early))
    return float(full["text"] != early["text"] and (one is None or one != other))


def _unscored(loss: str, full: Record, early: Record) -> int:
    """How many questions have loss 1 because an answer has no score."""
    records = (early,) if loss == "wrong" else (full, early)
    return len({sample["id"] for record in records for sample in record.samples if sample["score"] is None})


def _tested(
    goal: Goal, losses: list[list[float]], points: Sequence[Record], ids: Sequence[str]
) -> tuple[int, str, list[float | None]]:
    """How many settings are certified, by which method, and each one's p-value."""
    if goal.method == "ltt":
        p_values = [hoeffding_bentkus(fsum(lost) / len(lost), len(lost), goal.epsilon) for lost in losses]
        return fixed_sequence(p_values, goal.delta), goal.method, [*p_values]
    if not goal.monotonise:
        _check_monotone(losses, points, ids)
    found = conformal_risk_control(losses, goal.epsilon, monotonise=goal.monotonise)
    raised = f", losses of {found.raised} questions monotonised" if found.raised else ""
    return found.certified, goal.method + raised, [None] * len(losses)


def _check_monotone(losses: Sequence[Sequence[float]], points: Sequence[Record], ids: Sequence[str]) -> None:
    for question, along in zip(ids, zip(*losses, strict=True), strict=True):
        for at, (before, after) in enumerate(pairwise(along)):
            if after < before:
                raise ValueError(
                    f"question {question!r} has loss {before:g} in {points[at].path} and {after:g} in "
                    f"{points[at + 1].path}, which leaves earlier; conformal risk control needs losses that never "
                    f"fall: monotonise them (which the certificate then says), or use method 'ltt'"
                )
