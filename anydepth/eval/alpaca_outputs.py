"""Answers in the format that AlpacaEval's judge reads: a JSON list of what each instruction was answered.

Apart from the task's file, whose bytes are part of the protocol. Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from anydepth.eval.task import Task
from anydepth.record import Record, write_atomically


def write_outputs(record: Record, task: Task, path: str | Path, *, generator: str | None = None) -> Path:
    """Write the answers of a complete AlpacaEval Record to `path`, in the order of the data file; the path.

    Each entry has dataset, instruction, output and generator: the name under which the judge lists the model (None:
    its own and the arm's). Questions that were not asked are left out.

    Raises ValueError for a Record that is unfinished, of another task or of other questions than the data has now, with
    several answers a question, or with questions that got none.
    """
    used = record.settings_used
    if record.status != "complete":
        raise ValueError(f"{record.path} is {record.status}; finish the run before its outputs are written")
    if used["task"] != task.name:
        raise ValueError(f"{record.path} answers the task {used['task']}; give a Record of {task.name}")
    if any(sample["answer_index"] for sample in record.samples):
        raise ValueError(f"{record.path} has several answers a question; the judge reads one, give an arm with n = 1")
    answers = {sample["id"]: sample for sample in record.samples}
    unanswered = [id for id, sample in answers.items() if sample["finish_reason"] not in ("stop", "length")]
    if unanswered:
        raise ValueError(
            f"{record.path} has no answer to {len(unanswered)} questions (the first is {unanswered[0]!r}: "
            f"{answers[unanswered[0]]['unscored']}); the judge needs one each, run the arm without them"
        )
    name = generator or f"{Path(used['model']).name}-{used['name']}"
    entries = [
        {
            "dataset": question.group,
            "instruction": question.data,
            "output": answers.pop(question.id)["text"],
            "generator": name,
        }
        for question in task.questions(task.splits[0])
        if question.id in answers
    ]
    if answers:
        raise ValueError(f"{record.path} answers {min(answers)!r}, which the data of {task.name} do not have")
    write_atomically(Path(path), json.dumps(entries, indent=2, ensure_ascii=False).encode() + b"\n")
    return Path(path)
