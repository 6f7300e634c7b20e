"""The two runs: a Record as it stands, or settings that are run here into one. Imports no torch.

Settings are fields of an arm, options of LLM, and `concurrency`, in one flat mapping: {"exit_threshold": 0.5,
"signals": "exact", "lateness": 1, "concurrency": 8}.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anydepth.diagnose.divergence import Judge
from anydepth.eval.arms import ENGINE_FIELDS, FIELDS, Arm
from anydepth.eval.backends.base import Backend
from anydepth.eval.protocol import prompt_ids
from anydepth.eval.run import question_ids_hash, run
from anydepth.eval.study import tensor_threads
from anydepth.eval.task import Question, Task, load_task
from anydepth.progress import bars
from anydepth.record import Record, Sample, ids_hash
from anydepth.types import Output, Usage, unknown

if TYPE_CHECKING:
    from anydepth.models.base import Model

Settings = Mapping[str, Any]
SUBMISSION = ("streams", "static_buffers", "padding", "graphs")  # how turns reach a device


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two runs. `given`: settings with which it can be run again; `used`: those in force, as in a Record."""

    given: Settings
    used: Settings
    record: Record

    @classmethod
    def of(cls, record: Record, given: Settings | None = None) -> Side:
        """`given` is what the Record was run with, if that is more than it says itself."""
        if given is None:
            passed = {key: value for key, value in record.settings_passed.items() if key != "name"}
            given = {**passed, "concurrency": record.settings_used["concurrency"]}
        beside = {key: value for key, value in given.items() if key not in record.settings_used}
        return cls(given=given, used={"signals": "sync", **beside, **record.settings_used}, record=record)


@dataclass(kw_only=True)
class Workplace:
    """One model, and the questions that both runs answer. Runs settings into Records below `out`, reads Records, and
    has judges. `baseline`: so many answers measure batch variance (None: all). Nothing is loaded before it is needed.
    """

    model: str
    task: str
    out: Path
    limit: int | None = None
    ids: Sequence[str] | None = None
    split: str | None = None
    seed: int = 0
    concurrency: int = 32
    data: Path | None = None
    threads: int | None = None
    baseline: int | None = None
    progress: bool = True
    _backends: dict[str, Backend] = field(default_factory=dict)

    @cached_property
    def loaded_task(self) -> Task:
        return load_task(self.task, data=self.data)

    @cached_property
    def questions(self) -> list[Question]:
        return self.loaded_task.select(split=self.split, limit=self.limit, ids=self.ids)

    def check(self, given: Settings) -> None:
        """ValueError for settings that `run` would refuse, as far as it can be told without a model."""
        from anydepth.engine.signals import named_mode

        _, options, _ = parse(given, concurrency=self.concurrency)
        named_mode(options.get("signals", "sync"), options.get("lateness"))

    def run(self, given: Settings, folder: str) -> Side:
        """Answer the questions under these settings into `folder`; an interrupted run goes on where it stopped.

        Raises ValueError for settings nobody knows, and for those that LLM refuses.
        """
        arm, options, concurrency = parse(given, concurrency=self.concurrency)
        backend = _backend(arm, self.model, {**options, "max_batch": options.get("max_batch", concurrency)})
        with (
            tensor_threads(self.threads, backend) as threads,
            bars(folder, total=len(self.questions) * arm.sampling().n, shown=self.progress) as (answers,),
        ):
            record = run(
                arm,
                task=self.loaded_task,
                backend=backend,
                out=self.out / folder,
                questions=self.questions,
                split=self.split,
                seed=self.seed,
                threads=threads,
                concurrency=concurrency,
                progress=answers.advance,
            )
        return Side.of(record, {**given, "concurrency": concurrency})

    def outputs(self, side: Side, samples: Iterable[Sample] | None = None) -> list[Output]:
        """The answers of a run, by question and answer index, with `request_id` for the question's id.

        Raises ValueError where the prompts or the model are not those that the Record was made with.
        """
        backend, record = self._whole(side), side.record
        if (there := (record.provenance["model"] or {}).get("hash")) != backend.model_hash:
            raise ValueError(
                f"{record.path} was made with a model of hash {str(there)[:12]}, {self.model} has "
                f"{backend.model_hash[:12]}; name the model it was made with (--model)"
            )
        prompts = {question.id: prompt_ids(backend, question) for question in self.questions}
        samples = sorted(record.samples if samples is None else samples, key=lambda s: (s["id"], s["answer_index"]))
        for sample in samples:
            if "choices" in sample:
                raise ValueError(
                    f"{record.path} has choices scored by likelihood; diagnose is for answers that were generated"
                )
            if (asked := prompts.get(sample["id"])) is None or ids_hash(asked) != sample["prompt_ids_sha256"]:
                raise ValueError(
                    f"{record.path}: question {sample['id']!r} had another prompt than task {self.task} gives it now; "
                    f"name the task, and the data, it was made with (--task, --data)"
                )
        return [_output(sample, prompts[sample["id"]]) for sample in samples]

    def judge(self, a: Side, b: Side, *, concurrency: int | None = None) -> Judge:
        """Who replays A and B. concurrency: of the baseline, else the larger of the two runs'."""
        from anydepth.diagnose.judge import Replayer

        answers = self.outputs(a)
        if self.baseline is not None:
            chosen = [question.id for question in self.questions[: self.baseline]]
            answers = [answer for answer in answers if answer.request_id in chosen]
        return Replayer(
            models=tuple(self._model(side) for side in _of_other_dtypes(a, b)),
            settings=a.used,
            answers=answers,
            concurrency=concurrency or max(side.used["concurrency"] for side in (a, b)),
        )

    def replaying(self, side: Side) -> AbstractContextManager[int]:
        """The threads in which this run is replayed: as many as made it."""
        return tensor_threads(self.threads, self._whole(side))

    def _whole(self, side: Side) -> Backend:
        """The engine with the model as this run computed it; one a dtype."""
        key = str(side.used["dtype"])
        if key not in self._backends:
            options = {"dtype": key, "device": side.given.get("device", side.used["device"]), "max_batch": 1}
            options |= {name: side.given[name] for name in ("segments", "heads") if name in side.given}
            if layers := side.used.get("exit_layers"):  # which another arm's heads may have decided
                options["segments"] = layers
            self._backends[key] = _backend(Arm(name="replay"), self.model, options)
        return self._backends[key]

    def _model(self, side: Side) -> Model:
        from anydepth.eval.backends.engine import EngineBackend

        backend = self._whole(side)
        assert isinstance(backend, EngineBackend)
        return backend.llm.engine.model


def parse(given: Settings, *, concurrency: int) -> tuple[Arm, dict[str, Any], int]:
    """(arm, options of LLM, answers at a time) of flat settings. The arm's name says them all, so that
    a folder keeps to one of them. ValueError for a setting nobody knows, naming the nearest."""
    from anydepth.engine.llm import LLM
    from anydepth.engine.submission import Submission

    options = set(inspect.signature(LLM).parameters) - {"model"}
    known = {*FIELDS, *options, *SUBMISSION, "concurrency"} - {"name"}
    for key in given:
        if key not in known:
            raise unknown("setting", key, known)
    name = "_".join(f"{key}-{value}" for key, value in given.items() if value is not None) or "as-it-is"
    slug = "".join(c if c.isalnum() or c in "_.+-" else "-" for c in name).lstrip("_.+-")
    arm = Arm.parse({"name": slug, **{key: given[key] for key in given if key in FIELDS}})
    engine = {key: value for key, value in given.items() if key in {*options, *ENGINE_FIELDS}}
    if submission := {key: given[key] for key in SUBMISSION if key in given}:
        engine["submission"] = Submission(**submission)
    at_a_time = given.get("concurrency", concurrency)
    if isinstance(at_a_time, bool) or not isinstance(at_a_time, int) or at_a_time < 1:
        raise ValueError(f"concurrency is {at_a_time!r}; allowed: whole numbers from 1")
    return arm, engine, at_a_time


def questions_of(record: Record, task: Task) -> list[str]:
    """Ids of a Record's questions, in the order in which they were asked if that was hash order."""
    settings = record.settings_used
    first = task.select(split=settings["split"], limit=settings["questions"])
    if question_ids_hash(first) == settings["question_ids_sha256"]:
        return [question.id for question in first]
    return sorted({sample["id"] for sample in record.samples})


def _backend(arm: Arm, model: str, options: Mapping[str, Any]) -> Backend:
    if arm.backend == "engine":
        from anydepth.engine.llm import LLM
        from anydepth.eval.backends.engine import EngineBackend

        llm = LLM(model, **options)
        own = {} if arm.profile is None else dict(zip([arm.profile], llm.engine.profiles, strict=True))
        return EngineBackend(llm, profiles=own)
    from anydepth.eval.backends.load import load_backend

    if beyond := options.keys() - {*ENGINE_FIELDS, "max_batch"}:
        raise ValueError(f"{', '.join(sorted(beyond))}: options of the engine; leave them out for {arm.backend}")
    return load_backend(arm, model)


def _of_other_dtypes(a: Side, b: Side) -> list[Side]:
    return [a] if a.used["dtype"] == b.used["dtype"] else [a, b]


def _output(sample: Sample, prompt: Sequence[int]) -> Output:
    return Output(
        request_id=sample["id"],
        prompt_ids=tuple(prompt),
        token_ids=tuple(sample["output_ids"]),
        depths=tuple(sample["depths"]),
        text=sample["text"],
        finish_reason=sample["finish_reason"],
        usage=Usage(prompt_tokens=len(prompt), decode_tokens=sample["decode_tokens"]),
        seed=sample["seed"],
        answer_index=sample["answer_index"],
    )
