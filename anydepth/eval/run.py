"""One arm over one task's questions: from a backend to a Record. Imports no torch.

Each answer is graded and written as it is finished, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

from anydepth.engine.text import INCOMPLETE, TextStream
from anydepth.eval.aggregate import aggregate
from anydepth.eval.arms import Arm
from anydepth.eval.backends.base import Ask, Backend, Reply
from anydepth.eval.protocol import prompt_ids, protocol, protocol_hash
from anydepth.eval.task import Grade, Question, Task
from anydepth.provenance import provenance
from anydepth.record import Record, RecordWriter, Sample, ids_hash
from anydepth.types import Output, Sampling, Score, Usage


def run(
    arm: Arm,
    *,
    task: Task,
    backend: Backend,
    out: str | Path,
    questions: Sequence[Question],
    split: str | None = None,
    seed: int = 0,
    threads: int | None = None,
    concurrency: int = 32,
    progress: Callable[[int], object] | None = None,
) -> Record:
    """Ask the questions, grade and write the answers, and return the Record in the folder `out`.

    A Record that is there already is completed; a complete one is returned as it is. split: the questions' (None: the
    task's first). seed: answers drawn at a temperature depend on it, the question and the answer's index alone, so they
    are paired between arms. threads: of the tensor library, for the provenance. concurrency: answers under way at a
    time; latency_s of a sample is its time there. progress: called with the number of answers that came to be done,
    those found done first.

    A question too long for the model is unscored, with the reason. Raises ValueError where the arm does not fit the
    model or `out` holds another run, before anything is computed.
    """
    if not questions:
        raise ValueError("there are no questions to ask; give at least one")
    sampling = sampling_of(arm, task)
    settings = _settings(arm, task, backend, sampling, questions, split or task.splits[0], seed, concurrency)
    prompts = [prompt_ids(backend, question) for question in questions]
    task_hash = task.hash(questions)
    known = {question.id: question for question in questions}
    asks = [
        _ask(backend, question, ids, index, seed if sampling.seed is None else sampling.seed)
        for question, ids in zip(questions, prompts, strict=True)
        for index in range(1 if question.choices else sampling.n)
    ]
    with RecordWriter(
        out,
        kind="eval",
        settings_used=settings,
        settings_passed={"name": arm.name, **arm.passed()},
        provenance=provenance_of(task, backend, task_hash, seed=seed, threads=threads),
        protocol_hash=protocol_hash(protocol(task, questions, prompts, sampling, backend, task_hash=task_hash)),
    ) as writer:
        if foreign := writer.done - {ask.key for ask in asks}:
            raise ValueError(
                f"{writer.record.path} has answer {min(foreign)[1]} of question {min(foreign)[0]!r}, which this run "
                f"does not ask; its samples were edited, give another folder"
            )
        left = [ask for ask in asks if ask.key not in writer.done]
        tell = progress or (lambda count: None)
        tell(len(asks) - len(left))
        fitting = []
        for ask in left:
            if _room(ask, backend.max_positions):
                fitting.append(ask)
            else:
                writer.append(_too_long(known[ask.key[0]], ask, backend.max_positions))
                tell(1)
        for reply in backend.replies(fitting, sampling, concurrency=concurrency):
            writer.append(sample(known[reply.ask.key[0]], reply, task=task, backend=backend))
            tell(1)
        return writer.finish({**aggregate(writer.samples), "metrics": task.metrics(writer.samples)})


def in_force(arm: Arm, backend: Backend, sampling: Sampling) -> dict[str, Any]:
    """The backend's settings for an arm; ValueError, naming the arm, where they are not what it wants."""
    try:
        settings = backend.settings(sampling)
    except ValueError as error:
        raise ValueError(f"arm {arm.name!r}: {error}") from error
    for key, wanted in arm.engine.items():
        if key in ("fill", "signals", "lateness", "dtype", "gate_dtype", "batch_invariant") and settings[key] != wanted:
            raise ValueError(
                f"arm {arm.name!r} wants {key} {wanted!r}, this {backend.name} was made with {settings[key]!r}; make "
                f"one with {key}={wanted!r}"
            )
    if "certificate" in arm.engine and not settings.get("certificate"):
        raise ValueError(f"arm {arm.name!r} wants a certificate, this {backend.name} was made without; give it one")
    if arm.heads is not None and settings.get("heads") != Path(arm.heads).name:
        raise ValueError(
            f"arm {arm.name!r} wants the exit heads {arm.heads!r}, this {backend.name} was made with "
            f"{settings.get('heads')!r}; make one with heads={arm.heads!r}"
        )
    return settings


def sampling_of(arm: Arm, task: Task) -> Sampling:
    """How an arm answers a task's questions: its own fields, else the task's caps and stop strings."""
    return arm.sampling(max_tokens=task.max_tokens, stop=tuple(task.stop), first_token=task.first_token)


def sample(question: Question, reply: Reply, *, task: Task, backend: Backend) -> Sample:
    """One line of samples.jsonl: what was answered, at which depths, at what cost, and what it is worth."""
    if reply.scores:
        answered = _scored(question, reply.scores, task)
    else:
        assert reply.output is not None
        answered = _generated(question, reply.output, task, backend)
    tallies = {"tallies": dict(reply.tallies)} if reply.tallies else {}
    return _line(question, reply.ask, {**answered, **tallies}, seconds=reply.seconds)


def _generated(question: Question, output: Output, task: Task, backend: Backend) -> dict[str, Any]:
    assert output.text is not None, "every backend has a tokenizer"
    levels = task.levels(question, token_pieces(backend.tokenizer.decode, output.token_ids))
    ended = output.finish_reason in ("stop", "length")
    return {
        "output_ids": list(output.token_ids),
        "depths": list(output.depths),
        **_cost(output.usage),
        "finish_reason": output.finish_reason,
        "text": output.text,
        **_worth(task.grade(question, output.text) if ended else _unscored(f"finish_reason is {output.finish_reason}")),
        "levels": list(levels) if levels is not None else None,
    }


def _scored(question: Question, scores: Sequence[Score], task: Task) -> dict[str, Any]:
    """The most likely choice (of equal ones the first) is the answer. A token that its exit's head does not list is
    impossible there, a logprob of -inf, which JSON has not: it is written as null."""
    sums = [sum(score.logprobs) for score in scores]
    possible = max(sums) > -inf
    text = question.choices[sums.index(max(sums))] if possible else ""
    worth = task.grade(question, text) if possible else _unscored("each choice has a token that its head does not list")
    return {
        "output_ids": [],
        "depths": [],
        "choices": [
            {"logprobs": [None if x == -inf else x for x in score.logprobs], "depths": list(score.depths)}
            for score in scores
        ],
        **_cost(sum((score.usage for score in scores), Usage())),
        "finish_reason": "stop",
        "text": text,
        **_worth(worth),
        "levels": None,
    }


def _too_long(question: Question, ask: Ask, max_positions: int) -> Sample:
    reason = f"the prompt has {len(ask.prompt_ids)} tokens, which leaves no room in the model's {max_positions}"
    nothing = {"output_ids": [], "depths": [], **_cost(Usage()), "finish_reason": "error", "text": ""}
    return _line(question, ask, {**nothing, **_worth(_unscored(reason)), "levels": None}, seconds=0.0)


def _line(question: Question, ask: Ask, answered: dict[str, Any], *, seconds: float) -> Sample:
    return {
        "id": question.id,
        "answer_index": ask.key[1],
        "group": question.group,
        "prompt_ids_sha256": ids_hash(ask.prompt_ids),
        **answered,
        "seed": ask.seed,
        "latency_s": round(seconds, 6),
    }


def _cost(usage: Usage) -> dict[str, int]:
    return {
        "decode_tokens": usage.decode_tokens,
        "segments_read": usage.segments_read,
        "segments_executed": usage.segments_executed,
    }


def _worth(grade: Grade) -> dict[str, Any]:
    return {
        "prediction": dict(grade.prediction),
        "score": grade.score,
        "scores": dict(grade.scores),
        "unscored": grade.unscored,
    }


def _unscored(reason: str) -> Grade:
    return Grade(prediction={}, score=None, unscored=reason)


def token_pieces(decode: Callable[..., str], ids: Sequence[int]) -> list[str]:
    """What each token adds to the text. Special tokens show as they are written; a token that only begins a character
    adds nothing, the one that completes it adds it all."""
    alone = [_piece(decode, before, id) for before, id in pairwise((None, *ids))]
    pieces = [piece for piece in alone if piece is not None]
    if len(pieces) == len(ids):
        return pieces
    stream = TextStream(partial(decode, skip_special=False))
    pieces = [stream.push(token) for token in ids]
    return [*pieces[:-1], pieces[-1] + stream.end()]


@lru_cache(maxsize=1 << 16)
def _piece(decode: Callable[..., str], before: int | None, id: int) -> str | None:
    """What a token adds after the one before it, as TextStream finds it; None where more than these two decide."""
    first = [] if before is None else [before]
    text, known = decode([*first, id], skip_special=False), decode(first, skip_special=False)
    fresh = text[len(known) :]
    return fresh if fresh and (known or not first) and not text.endswith(INCOMPLETE) else None


def question_ids_hash(questions: Sequence[Question]) -> str:
    """sha256 (hex) of which questions are asked, in which order."""
    return hashlib.sha256("\n".join(question.id for question in questions).encode()).hexdigest()


def _ask(backend: Backend, question: Question, ids: Sequence[int], index: int, seed: int) -> Ask:
    digest = hashlib.sha256(f"{seed}:{question.id}:{index}".encode()).digest()
    continuations = []
    for choice in question.choices:
        assert isinstance(question.prompt, str), "choices continue a plain prompt"
        continuations.append(tuple(backend.tokenizer.encode(question.prompt + choice)[len(ids) :]))
    return Ask(
        key=(question.id, index),
        prompt_ids=tuple(ids),
        seed=int.from_bytes(digest[:8], "big"),
        continuations=tuple(continuations),
    )


def _room(ask: Ask, max_positions: int) -> bool:
    """Whether the model's length holds the prompt and a token, or every continuation but its last token."""
    return len(ask.prompt_ids) + max((len(ids) for ids in ask.continuations), default=1) - 1 <= max_positions


def _settings(
    arm: Arm,
    task: Task,
    backend: Backend,
    sampling: Sampling,
    questions: Sequence[Question],
    split: str,
    seed: int,
    concurrency: int,
) -> dict[str, Any]:
    """Every setting in force, by the names of arms.toml."""
    used = asdict(sampling)
    used.pop("exit_policy")
    return {
        "name": arm.name,
        "task": task.name,
        "split": split,
        "questions": len(questions),
        "question_ids_sha256": question_ids_hash(questions),
        "model": backend.model_name,
        "backend": backend.name,
        "concurrency": concurrency,
        **used,
        **in_force(arm, backend, sampling),
        **({"lateness": 0} if any(question.choices for question in questions) else {}),  # scored without
        "seed": seed if sampling.seed is None else sampling.seed,
    }


def provenance_of(task: Task, backend: Backend, task_hash: str, *, seed: int, threads: int | None) -> dict[str, Any]:
    """The provenance block of a run of this model over this task."""
    heads = {} if backend.head_hash is None else {"head_hash": backend.head_hash}
    return provenance(
        threads=threads,
        seed=seed,
        model={"name": backend.model_name, "hash": backend.model_hash, **heads},
        tokenizer={"hash": backend.tokenizer.hash},
        task={"name": task.name, "hash": task_hash},
    )
