"""One arm over one task's questions: from an engine to a Record. Imports no torch.

Questions wait in the engine and are answered together, as many at a time as it has slots. Each answer is graded and
written as it is finished, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anydepth.engine.text import TextStream
from anydepth.eval.aggregate import aggregate
from anydepth.eval.arms import Arm
from anydepth.eval.task import Grade, Question, Task
from anydepth.provenance import provenance
from anydepth.record import Record, RecordWriter, Sample
from anydepth.types import Output, Request, Sampling

if TYPE_CHECKING:
    from anydepth.engine.llm import LLM


class Ask(NamedTuple):
    """An answer that is still to be made."""

    question: Question
    answer_index: int
    request: Request


def run(
    arm: Arm,
    *,
    task: Task,
    llm: LLM,
    out: str | Path,
    questions: Sequence[Question],
    seed: int = 0,
    threads: int | None = None,
    concurrency: int = 32,
    progress: Callable[[int], object] | None = None,
) -> Record:
    """Ask the questions, grade and write the answers, and return the Record in the folder `out`.

    A Record that is there already is completed; a complete one is returned as it is. seed: answers drawn at a
    temperature depend on it, the question and the answer's index alone, so they are paired between arms. threads: of
    the tensor library, for the provenance. concurrency: answers in the engine at a time; latency_s of a sample is its
    time there. progress: called with the number of answers that came to be done, those found done first.

    Raises ValueError where the arm does not fit the model or `out` holds another run, before anything is computed.
    """
    sampling = arm.sampling(max_tokens=task.max_tokens, stop=tuple(task.stop))
    fill = llm.engine.fill.name
    if arm.fill not in (None, fill):
        raise ValueError(
            f"arm {arm.name!r} wants fill {arm.fill!r}, this LLM was made with {fill!r}; make one with "
            f"fill={arm.fill!r}"
        )
    asks = [
        Ask(question, index, _request(llm, question, index, sampling, seed))
        for question in questions
        for index in range(sampling.n)
    ]
    if not asks:
        raise ValueError("there are no questions to ask; give at least one")
    with RecordWriter(
        out,
        kind="eval",
        settings_used=_settings(arm, task, llm, sampling, asks, seed, concurrency),
        settings_passed={"name": arm.name, **arm.passed()},
        provenance=provenance_of(task, llm, seed=seed, threads=threads),
    ) as writer:
        left = [ask for ask in asks if (ask.question.id, ask.answer_index) not in writer.done]
        if progress is not None and left != asks:
            progress(len(asks) - len(left))
        for ask, output, seconds in _answers(llm, left, concurrency):
            writer.append(
                sample(ask.question, output, task=task, llm=llm, latency_s=seconds, answer_index=ask.answer_index)
            )
            if progress is not None:
                progress(1)
        return writer.finish(aggregate(writer.samples))


def sample(
    question: Question, output: Output, *, task: Task, llm: LLM, latency_s: float, answer_index: int = 0
) -> Sample:
    """One line of samples.jsonl: what was answered, at which depths, at what cost, and what it is worth."""
    assert llm.tokenizer is not None and output.text is not None, "prompts are strings"
    levels = task.levels(question, token_pieces(llm.tokenizer.decode, output.token_ids))
    ended = output.finish_reason in ("stop", "length")
    grade = (
        task.grade(question, output.text)
        if ended
        else Grade(prediction={}, score=None, unscored=f"finish_reason is {output.finish_reason}")
    )
    return {
        "id": question.id,
        "answer_index": answer_index,
        "group": question.group,
        "prompt_ids_sha256": ids_hash(output.prompt_ids),
        "output_ids": list(output.token_ids),
        "depths": list(output.depths),
        "decode_tokens": output.usage.decode_tokens,
        "segments_read": output.usage.segments_read,
        "segments_executed": output.usage.segments_executed,
        "finish_reason": output.finish_reason,
        "text": output.text,
        "prediction": dict(grade.prediction),
        "score": grade.score,
        "unscored": grade.unscored,
        "levels": list(levels) if levels is not None else None,
        "seed": output.seed,
        "latency_s": round(latency_s, 6),
    }


def token_pieces(decode: Callable[..., str], ids: Sequence[int]) -> list[str]:
    """What each token adds to the text. Special tokens show as they are written; a token that only begins a character
    adds nothing, the one that completes it adds it all."""
    stream = TextStream(partial(decode, skip_special=False))
    pieces = [stream.push(token) for token in ids]
    return [*pieces[:-1], pieces[-1] + stream.end()] if pieces else []


def ids_hash(ids: Sequence[int]) -> str:
    """sha256 (hex) of token ids, written as compact JSON."""
    return hashlib.sha256(json.dumps(list(ids), separators=(",", ":")).encode()).hexdigest()


def question_ids_hash(questions: Sequence[Question]) -> str:
    """sha256 (hex) of which questions are asked, in which order."""
    return hashlib.sha256("\n".join(question.id for question in questions).encode()).hexdigest()


def _request(llm: LLM, question: Question, index: int, sampling: Sampling, seed: int) -> Request:
    base = seed if sampling.seed is None else sampling.seed
    digest = hashlib.sha256(f"{base}:{question.id}:{index}".encode()).digest()
    try:
        return llm.engine.prepare(
            question.prompt,
            replace(sampling, n=1),
            id=f"{question.id}:{index}",
            seed=int.from_bytes(digest[:8], "big"),
            streaming=False,
            answer_index=index,
        )
    except ValueError as error:
        raise ValueError(f"question {question.id!r}: {error}") from error


def _answers(llm: LLM, asks: Sequence[Ask], concurrency: int) -> Iterator[tuple[Ask, Output, float]]:
    """Every answer as it is finished, with its seconds in the engine. Leaves the engine empty, however it ends."""
    engine = llm.engine
    waiting, flying = list(reversed(asks)), dict[str, tuple[Ask, float]]()
    try:
        while waiting or flying:
            while waiting and len(flying) < concurrency:
                ask = waiting.pop()
                engine.submit(ask.request)
                flying[ask.request.id] = ask, time.perf_counter()
            for chunk in engine.step():
                if chunk.output is not None and chunk.request_id in flying:
                    ask, start = flying.pop(chunk.request_id)
                    yield ask, chunk.output, time.perf_counter() - start
    finally:
        for id in flying:
            engine.abort(id)
        if flying:
            engine.step()  # takes the last chunks of what was aborted away


def _settings(
    arm: Arm, task: Task, llm: LLM, sampling: Sampling, asks: Sequence[Ask], seed: int, concurrency: int
) -> dict[str, Any]:
    """Every setting in force, by the names of arms.toml."""
    engine, request = llm.engine, asks[0].request
    used = asdict(sampling)
    used.pop("exit_policy")
    low, high = request.bounds
    questions = [ask.question for ask in asks if ask.answer_index == 0]
    return {
        "name": arm.name,
        "task": task.name,
        "questions": len(questions),
        "question_ids_sha256": question_ids_hash(questions),
        "model": llm.checkpoint.name,
        "backend": arm.backend,
        "fill": engine.fill.name,
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "gate_dtype": engine.gate_dtype,
        "device": engine.model.device.type,
        "segments": engine.model.shape.segments,
        "concurrency": concurrency,
        "policy": request.policy.name,
        **used,
        "min_depth": low,
        "max_depth": high,
        "stop_token_ids": sorted(request.stop_ids),
        "seed": seed if sampling.seed is None else sampling.seed,
    }


def provenance_of(task: Task, llm: LLM, *, seed: int, threads: int | None) -> dict[str, Any]:
    """The provenance block of a run of this model over this task."""
    checkpoint = llm.checkpoint
    return provenance(
        threads=threads,
        seed=seed,
        model={"name": checkpoint.name, "hash": checkpoint.model_hash},
        tokenizer={"hash": checkpoint.tokenizer_hash},
        task={"name": task.name, "hash": task.hash},
    )
