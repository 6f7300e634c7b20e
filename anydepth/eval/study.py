"""A study: every arm over the same questions, into DIR/<arm name>/, resumable at any point. Imports no torch.

DIR/study.jsonl keeps what was planned, one line each time the plan changed, with the number of answers there were by
then: rules written down before the first answer can be told from later ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from anydepth.eval.arms import Arm, Study
from anydepth.eval.backends.base import Backend
from anydepth.eval.backends.load import load_backend
from anydepth.eval.protocol import check_unchanged, freeze, prompt_ids, protocol
from anydepth.eval.run import in_force, run, sampling_of
from anydepth.eval.task import Question, Task, load_task
from anydepth.progress import bars
from anydepth.record import HEADER, SAMPLES, Record, write_atomically
from anydepth.types import unknown

PLAN = "study.jsonl"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a study is run, without effect on its results: the folder of data files, answers at a time, tensor threads
    (None: 1 for a small model, else the library's own), and the name of the one model whose own code may run."""

    data: str | Path | None = None
    concurrency: int = 32
    threads: int | None = None
    trust_remote_code: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("concurrency", self.concurrency), ("threads", self.threads)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; allowed: whole numbers from 1")


def run_study(
    study: Study,
    *,
    out: str | Path,
    frozen: Mapping[str, Any] | None = None,
    options: Options | None = None,
    backends: Backends | None = None,
    progress: bool = True,
    finished: Callable[[Record], object] | None = None,
    only: Collection[str] | None = None,
) -> list[Record]:
    """Run what is missing of every arm; the Records, in the arms' order. `frozen`: refuse if anything differs from it.
    `backends`: of this study, where they are loaded already. `finished`: called with each Record when it is complete.
    `only`: these arms, the others are left to other processes or days.

    Raises ValueError, before anything is computed, for a task or model nobody knows and arms that do not fit it.
    """
    folder, options = Path(out), options or Options()
    chosen = _chosen(study, only)
    task, questions = ask_task(study, options)
    backends = backends or Backends(study, options)
    for name, settings in backends.check(task).items():
        if settings.get("certificate"):
            print(f"{name}: {settings['certificate']['says']}", file=sys.stderr)
    if frozen is not None:
        check_unchanged(frozen, _frozen(study, task, questions, backends.of(study.arms[0])))
    _plan(folder, study, frozen)
    records = []
    with bars(*[arm.name for arm in chosen], total=len(questions), waiting=True, shown=progress) as lines:
        for arm, line in zip(chosen, lines, strict=True):
            line.begin(len(questions) * sampling_of(arm, task).n)
            backend = backends.of(arm)
            with tensor_threads(options.threads, backend) as threads:
                record = run(
                    arm,
                    task=task,
                    backend=backend,
                    out=folder / arm.name,
                    questions=questions,
                    split=study.split,
                    seed=study.seed,
                    threads=threads,
                    concurrency=options.concurrency,
                    progress=line.advance,
                )
            records.append(record)
            if finished is not None:
                finished(record)
    return records


def _chosen(study: Study, only: Collection[str] | None) -> list[Arm]:
    names = [arm.name for arm in study.arms]
    if strange := [name for name in only or () if name not in names]:
        raise unknown("arm", strange[0], names)
    return [arm for arm in study.arms if only is None or arm.name in only]


def ask_task(study: Study, options: Options) -> tuple[Task, list[Question]]:
    """The study's task and the questions it asks."""
    task = load_task(study.task, data=options.data)
    return task, task.select(split=study.split, limit=study.limit, ids=study.ids)


def freeze_study(study: Study, *, options: Options | None = None) -> dict[str, Any]:
    """The content of protocol.json: everything that decides the study's results, with hashes.

    Raises ValueError as `run_study` does: an arm that cannot be run is not frozen."""
    options = options or Options()
    task, questions = ask_task(study, options)
    backends = Backends(study, options)
    backends.check(task)
    return _frozen(study, task, questions, backends.of(study.arms[0]))


def _frozen(study: Study, task: Task, questions: Sequence[Question], backend: Backend) -> dict[str, Any]:
    prompts = [prompt_ids(backend, question) for question in questions]
    caps = sampling_of(Arm(name="task"), task)
    return freeze(study, protocol(task, questions, prompts, caps, backend, task_hash=task.hash(questions)))


class Backends:
    """Backends of a study's arms. All are kept of a small model; of another one at a time, and the model is loaded
    again where an arm needs a different one: two may not fit. A full-depth arm without heads has the segments of the
    others' heads: of them depths and work are told in all arms."""

    def __init__(self, study: Study, options: Options) -> None:
        self._study, self._options = study, options
        self._loaded: dict[str, Backend] = {}

    def of(self, arm: Arm) -> Backend:
        arm = _with_segments(arm, self._study)
        key = _kind(arm)
        if key not in self._loaded:
            if not all(backend.small for backend in self._loaded.values()):
                self._loaded.clear()
            options = self._options
            alike = [other.profile for other in (arm, *self._study.arms) if _kind(other) == key]
            self._loaded[key] = load_backend(
                arm,
                self._study.model,
                concurrency=options.concurrency,
                trust_remote_code=options.trust_remote_code,
                profiles=list(dict.fromkeys(name for name in alike if name is not None)),
            )
        return self._loaded[key]

    def check(self, task: Task) -> dict[str, dict[str, Any]]:
        """The settings in force of every arm, by name; ValueError for an arm that does not fit its backend."""
        # A mistake in heads is told of the arm that names them.
        heads_first = sorted(self._study.arms, key=lambda arm: arm.heads is None)
        found = {arm.name: in_force(arm, self.of(arm), sampling_of(arm, task)) for arm in heads_first}
        return {arm.name: found[arm.name] for arm in self._study.arms}


def _with_segments(arm: Arm, study: Study) -> Arm:
    """A full-depth arm with the segments that all the study's arms with heads have; any other as it is."""
    from anydepth.exits.load import policy_name
    from anydepth.models.heads_about import read_about

    own = {"heads", "segments", "certificate"} & arm.engine.keys()
    if arm.backend != "engine" or own or policy_name(arm.sampling()) != "never":
        return arm
    ends = [
        other.engine.get("segments") or sorted(map(int, read_about(other.heads)["exits"]))
        for other in study.arms
        if other.heads is not None
    ]
    if not ends or any(other != ends[0] for other in ends):
        return arm
    return replace(arm, engine={**arm.engine, "segments": ends[0]})


def _kind(arm: Arm) -> str:
    """What arms must share to be answered by one backend: all but their Sampling, and so their profile."""
    return json.dumps([arm.backend, dict(arm.engine)], sort_keys=True)


@contextmanager
def tensor_threads(threads: int | None, backend: Backend) -> Iterator[int]:
    """So many threads of the tensor library (the number is given out), as before afterwards. A small model has one if
    nothing is said: a second one that has to wait for a core stalls every product (sixty times slower on a busy
    machine)."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads or (1 if backend.small else before))
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def read_plan(folder: Path) -> list[dict[str, Any]]:
    """What was planned, first to last: lines of study.jsonl. [] where there is none; ValueError for a broken line."""
    path, plans = folder / PLAN, []
    for number, line in enumerate(path.read_text().splitlines() if path.is_file() else (), start=1):
        try:
            plans.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); restore the line as it was") from error
    return plans


def _plan(folder: Path, study: Study, frozen: Mapping[str, Any] | None) -> None:
    """Add a line to study.jsonl where the plan is not the last one's."""
    lines = read_plan(folder)
    plan = {
        "study": study.head(),
        "arms": [{"name": arm.name, **arm.passed()} for arm in study.arms],
        "rules": [rule.asdict() for rule in study.rules],
        "study_hash": frozen["study_hash"] if frozen else None,
    }
    if lines and all(lines[-1][key] == value for key, value in plan.items()):
        return
    folder.mkdir(parents=True, exist_ok=True)
    answers = sum(_lines(path) for path in folder.glob(f"*/{SAMPLES}"))
    lines.append({"planned": datetime.now(UTC).isoformat(timespec="seconds"), "answers": answers, **plan})
    write_atomically(folder / PLAN, b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if (path.parent / HEADER).exists() else 0
