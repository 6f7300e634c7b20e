"""From a file of prompts to a Record of answers, one line an answer; an interrupted run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from anydepth.engine.in_force import settings_in_force
from anydepth.engine.llm import LLM
from anydepth.provenance import provenance
from anydepth.record import Record, RecordWriter, Sample, ids_hash
from anydepth.rollout.answers import Answer
from anydepth.rollout.rollout import Rollout
from anydepth.types import Sampling, Usage

FORMS = ("prompt", "prompt_ids", "messages")
USAGE = ("decode_tokens", "segments_read", "segments_executed")  # what an answer costs whoever is asked beside it


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One line of a file of prompts: its id (the line's number where it has none) and the prompt's token ids."""

    id: str
    prompt_ids: tuple[int, ...]


def read_prompts(path: str | Path, llm: LLM, sampling: Sampling) -> list[Ask]:
    """The prompts in a JSONL: per line an object with one of `prompt` (a string), `prompt_ids` (token ids) and
    `messages` (a conversation, for the chat template), and perhaps an `id`; whatever else it has is passed over.

    Every prompt is checked as it is asked with `sampling`. ValueError names file and line.
    """
    path, asks, lines = Path(path), list[Ask](), dict[str, int]()
    llm.engine.prepare([0], replace(sampling, n=1))  # what is wrong with any prompt is no line's fault
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            ask = _ask(_parsed(line), llm, default=str(number))
            llm.engine.prepare(ask.prompt_ids, replace(sampling, n=1), streaming=False)
            if ask.id in lines:
                raise ValueError(f"the id {ask.id!r} stands in line {lines[ask.id]} too; give each prompt its own")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        lines[ask.id] = number
        asks.append(ask)
    if not asks:
        raise ValueError(f"{path} has no prompts; give one JSON object a line")
    return asks


def write_rollout(
    llm: LLM,
    asks: Sequence[Ask],
    sampling: Sampling,
    *,
    out: str | Path,
    passed: Mapping[str, Any],
    threads: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> Record:
    """Answer the prompts, n times each, into the Record in the folder `out`; the finished Record.

    A Record that is there already is completed: answer j to prompt i has the seed it would have had in one go.
    sampling: its seed must be given. passed: the settings that the caller gave. progress: called with the number of
    answers that came to be done, those found done first. Raises ValueError where `out` holds another run, and for an
    LLM whose weights were exchanged, since nothing would say which they were.
    """
    if sampling.seed is None:
        raise ValueError("seed is None; give one, so that the run can go on after an interruption")
    if llm.engine.weight_version:
        raise ValueError(
            f"the weights of {llm.checkpoint.name} were exchanged after it was loaded; load them from a file"
        )
    keys = {(i, j): (ask.id, j) for i, ask in enumerate(asks) for j in range(sampling.n)}
    with RecordWriter(
        out,
        kind="rollout",
        settings_used=_settings(llm, asks, sampling),
        settings_passed=passed,
        provenance=provenance(
            threads=threads,
            seed=sampling.seed,
            model={"name": llm.checkpoint.name, "hash": llm.checkpoint.model_hash},
            tokenizer={"hash": llm.checkpoint.tokenizer_hash},
        ),
    ) as writer:
        if foreign := writer.done - set(keys.values()):
            raise ValueError(
                f"{writer.record.path} has answer {min(foreign)[1]} to prompt {min(foreign)[0]!r}, which this run does "
                f"not ask; its samples were edited, give another folder"
            )
        tell = progress or (lambda count: None)
        tell(len(writer.done))
        start = time.perf_counter()
        prompts, done = [ask.prompt_ids for ask in asks], {key for key, name in keys.items() if name in writer.done}
        for answer in Rollout(llm).answers(prompts, sampling, skip=done):
            writer.append(sample(asks[answer.prompt_index].id, answer, seconds=time.perf_counter() - start))
            tell(1)
        return writer.finish(aggregate(writer.samples))


def sample(id: str, answer: Answer, *, seconds: float) -> Sample:
    """One line of samples.jsonl: an answer with all that its probability can be replayed from. `latency_s` counts from
    when the run queued its answers."""
    usage = answer.usage
    return {
        "id": id,
        "answer_index": answer.answer_index,
        "prompt_index": answer.prompt_index,
        "prompt_ids_sha256": ids_hash(answer.prompt_ids),
        "prompt_ids": answer.prompt_ids,
        "output_ids": answer.token_ids,
        "depths": answer.depths,
        "logprobs": answer.logprobs,
        "logprobs_mode": answer.logprobs_mode,
        **{name: getattr(usage, name) for name in USAGE},
        "finish_reason": answer.finish_reason,
        "text": answer.text,
        "prediction": {},
        "score": None,
        "unscored": "a rollout is not graded",
        "seed": answer.seed,
        "weight_version": answer.weight_version,
        "fill": answer.fill,
        "latency_s": round(seconds, 6),
    }


def read_answers(record: Record) -> list[Answer]:
    """The answers of a rollout's Record, by prompt and answer index, for `replay` or a trainer. ValueError for a Record
    of something else, and for one that was published without its samples."""
    if record.kind != "rollout":
        raise ValueError(f"{record.path} is a Record of kind {record.kind!r}; answers are read from a rollout's")
    known, used = {field.name for field in fields(Sampling)}, record.settings_used
    asked = {name: value for name, value in used.items() if name in known} | {"exit_policy": used["policy"], "n": 1}
    if used["policy"] == "never":
        asked["exit_threshold"] = 1.0
    return [
        Answer(
            prompt_ids=tuple(line["prompt_ids"]),
            token_ids=tuple(line["output_ids"]),
            depths=tuple(line["depths"]),
            logprobs=tuple(line["logprobs"]),
            logprobs_mode=line["logprobs_mode"],
            text=line["text"],
            finish_reason=line["finish_reason"],
            seed=line["seed"],
            weight_version=line["weight_version"],
            usage=Usage(
                prompt_tokens=len(line["prompt_ids"]),
                output_tokens=len(line["output_ids"]),
                **{name: line[name] for name in USAGE},
            ),
            fill=line["fill"],
            sampling=Sampling(**asked | {"seed": line["seed"]}),
            prompt_index=line["prompt_index"],
            answer_index=line["answer_index"],
        )
        for line in sorted(record.samples, key=lambda line: (line["prompt_index"], line["answer_index"]))
    ]


def aggregate(samples: Sequence[Sample]) -> dict[str, Any]:
    """Lengths, depths and segments of a rollout. The mean depth is over decode tokens, None where there are none."""
    total = Counter[str]()
    for one in samples:
        total.update({name: one[name] for name in ("decode_tokens", "segments_read", "segments_executed")})
    decoded = total["decode_tokens"]
    return {
        "n": len(samples),
        "prompts": len({one["id"] for one in samples}),
        "output_tokens": sum(len(one["output_ids"]) for one in samples),
        **total,
        "mean_depth": total["segments_read"] / decoded if decoded else None,
        "finish_reasons": dict(sorted(Counter(one["finish_reason"] for one in samples).items())),
    }


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error


def _ask(line: Any, llm: LLM, *, default: str) -> Ask:
    if not isinstance(line, dict):
        raise ValueError(f'{line!r} is no object; write {{"prompt": ...}}')
    given, id = [form for form in FORMS if form in line], line.get("id", default)
    if len(given) != 1:
        raise ValueError(f"it has {' and '.join(given) or 'no prompt'}; allowed: exactly one of {', '.join(FORMS)}")
    if not isinstance(id, str) or not id:
        raise ValueError(f"id is {id!r}; allowed: a string that is not empty")
    value = line[given[0]]
    if given[0] == "prompt" and not isinstance(value, str):
        raise ValueError(f"prompt is {value!r}; allowed: a string (token ids are prompt_ids)")
    if given[0] == "prompt_ids" and not isinstance(value, list):
        raise ValueError(f"prompt_ids is {value!r}; allowed: a list of token ids")
    if given[0] == "messages":
        if not isinstance(value, list) or not value or not all(_is_message(message) for message in value):
            raise ValueError(f'messages is {value!r}; allowed: a list of {{"role": ..., "content": ...}}')
        (value,) = llm.chat_ids(value)
    return Ask(id=id, prompt_ids=llm.engine.requests.prompt_ids(value))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _settings(llm: LLM, asks: Sequence[Ask], sampling: Sampling) -> dict[str, Any]:
    """Every setting in force."""
    content = json.dumps([[ask.id, ask.prompt_ids] for ask in asks], separators=(",", ":"))
    used = asdict(sampling)
    used.pop("exit_policy")  # as `policy`, by its name
    return {
        "model": llm.checkpoint.name,
        "prompts": len(asks),
        "prompts_sha256": hashlib.sha256(content.encode()).hexdigest(),
        **used,
        **settings_in_force(llm.engine, sampling),
        "logprobs": sampling.logprobs or "processed",
    }
