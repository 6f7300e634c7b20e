"""Full depth's own greedy answers, kept in a folder as they are made: a run that was stopped goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from anydepth.calibrate.lines import whole_lines
from anydepth.calibrate.prompts import prompt_id
from anydepth.dtypes import dtype_name
from anydepth.engine.llm import LLM
from anydepth.progress import Countdown
from anydepth.train.head_data import keep_plan, prompt_ids
from anydepth.types import Sampling

PLAN, LINES, VERSION = "answers.json", "answers.jsonl", 1


@dataclass(frozen=True)
class Answer:
    """Token ids of a question and of its answer; `id` is the prompt's hash."""

    id: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def full_depth_answers(
    llm: LLM,
    prompts: Sequence[str],
    folder: Path,
    *,
    tokens: int = 128,
    report: Callable[[str], None] = print,
) -> list[Answer]:
    """An answer to every prompt, in their order, of at most `tokens` tokens, through the chat template if there is one.

    Prompts too long for an answer are left out. ValueError for a checkpoint without a tokenizer, and for a folder with
    answers of another model or length, or a line that is broken.
    """
    if llm.tokenizer is None:
        raise ValueError(f"{llm.checkpoint.name} has no tokenizer; give a checkpoint that has one")
    words = llm.tokenizer
    plan = {
        "version": VERSION,
        "model_hash": llm.checkpoint.model_hash,
        "tokenizer_hash": words.hash,
        "template_hash": words.template_hash,
        "dtype": dtype_name(llm.checkpoint.model.dtype),
        "answer_tokens": tokens,
    }
    keep_plan(folder / PLAN, plan, what="answers")
    made = _read(folder / LINES)
    ids = {prompt_id(prompt): prompt_ids(words, prompt) for prompt in prompts}
    room = llm.checkpoint.model.shape.max_positions - 1
    long = [id for id, given in ids.items() if not 0 < len(given) < room]
    left = [id for id in ids if id not in made and id not in long]
    if long:
        report(f"{len(long)} prompts are too long for an answer and are left out")
    requests = llm.prepare([ids[id] for id in left], Sampling(max_tokens=tokens)) if left else []
    names = dict(zip((request.id for request in requests), left, strict=True))
    countdown = Countdown("made", len(ids) - len(long), "answers", report, before=sum(id in made for id in ids))
    with (folder / LINES).open("a", encoding="utf-8") as file:
        for chunk in llm.run(requests):
            if chunk.output is None:
                continue
            answer = Answer(names[chunk.request_id], chunk.output.prompt_ids, chunk.output.token_ids)
            made[answer.id] = answer
            file.write(json.dumps(vars(answer)) + "\n")
            file.flush()
            countdown.advance()
    return [made[id] for id in ids if id in made]


def answers_hash(answers: Sequence[Answer]) -> str:
    """sha256 (hex) of answers, whatever their order."""
    lines = sorted(json.dumps(vars(answer)) for answer in answers)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _read(path: Path) -> dict[str, Answer]:
    """Answers there are."""
    found = {}
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            row = json.loads(line)
            answer = Answer(str(row["id"]), tuple(row["prompt_ids"]), tuple(row["answer_ids"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number} is no answer ({error!r}); remove the line") from error
        found[answer.id] = answer
    return found
