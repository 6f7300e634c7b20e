"""Training data of exit heads: prompts and answers, tokenised once into a folder that every later run reads.

A folder holds plan.json (what it is made of), a shard for every 256 rows of a source, each written as a whole, and at
the end manifest.json with the shards' hashes. Preparing goes on where it was stopped.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from anydepth.models.load import Checkpoint
from anydepth.models.tokenizer import Tokenizer
from anydepth.record import files_hash, write_atomically
from anydepth.train.prepared import MANIFEST, VERSION, Prepared, held_out, load_prepared, prompt_number

PLAN = "plan.json"
SHARD_ROWS, OWN_SHARD_ROWS = 256, 64
_TEST_FILE = re.compile(r"(^|[_.-])(test|ifeval|alpacaeval|humaneval|mmlu[_.-]val(idation)?)([_.-]|$)")
_CALCULATOR = re.compile(r"<<[^>\n]*>>")  # GSM8K writes its sums a second time for a calculator

Answer = Callable[[list[list[int]]], list[list[int]]]  # prompts' ids -> greedy answers' ids, the ending one included


@dataclass(frozen=True, kw_only=True)
class Source:
    """A JSONL file of objects with `prompt` and `response` (or `question` and `answer`), or with prompts alone that the
    model itself answers. `rows`: that many of them, by hash ranking of the prompt; None: all.

    ValueError: a file named as the questions that a task is scored on are (gsm8k_test.jsonl, mmlu_val.jsonl,
    ifeval.jsonl; names are all that is looked at): heads are trained, and thresholds chosen, on others.
    """

    path: Path
    rows: int | None = None
    own_answers: bool = False

    def __post_init__(self) -> None:
        if _TEST_FILE.search(self.path.stem.lower()):
            raise ValueError(
                f"{self.path.name} has test questions by its name; heads are trained, and thresholds chosen, on "
                f"others: give other data"
            )

    @classmethod
    def parse(cls, text: str, *, own_answers: bool = False) -> Source:
        """ "file.jsonl" or "file.jsonl:500"."""
        name, colon, count = text.rpartition(":")
        if colon and count.isdigit():
            return cls(path=Path(name).expanduser(), rows=int(count), own_answers=own_answers)
        return cls(path=Path(text).expanduser(), own_answers=own_answers)

    def read(self) -> list[tuple[str, str]]:
        """(prompt, response) of its rows; ValueError, naming the line, for rows that have none, and for no rows."""
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n")  # texts may hold other ends of lines
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{self.path} cannot be read ({error}); give a JSONL file of prompts and responses"
            ) from error
        found = [self._row(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        if self.rows is not None:
            # Salted: what is held out has the lowest plain hashes, and a small number of rows would be of these alone.
            found = sorted(found, key=lambda row: hashlib.sha256(f"rows:{row[0]}".encode()).hexdigest())[: self.rows]
        if not found:
            raise ValueError(f"{self.path} has no rows to train on; give a JSONL file of prompts and responses")
        return found

    def _row(self, number: int, line: str) -> tuple[str, str]:
        try:
            row = dict(json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path}, line {number} is no JSON object ({error})") from error
        prompt = row.get("prompt", row.get("question"))
        response = "" if self.own_answers else row.get("response", row.get("answer"))
        for what, value in (("prompt (or question)", prompt), ("response (or answer)", response)):
            if not isinstance(value, str) or (not value and not self.own_answers):
                raise ValueError(f"{self.path}, line {number} has no {what}; every row needs one, a text")
        return str(prompt), _CALCULATOR.sub("", str(response))


def prepare(
    folder: Path,
    sources: Sequence[Source],
    checkpoint: Checkpoint,
    *,
    max_tokens: int = 512,
    answer_tokens: int = 128,
    answer: Answer | None = None,
    report: Callable[[str], None] = print,
) -> Prepared:
    """Tokenise the sources into `folder`, or go on with that, or read what is there already.

    Rows longer than `max_tokens` are cut in the response; those whose prompt fills them are left out; both are counted.
    `answer` makes the model's own greedy answers, of at most `answer_tokens`.
    ValueError: files that are empty or malformed, a folder of other data or another tokenizer, a checkpoint without a
    tokenizer.
    """
    if checkpoint.tokenizer is None:
        raise ValueError(f"{checkpoint.name} has no tokenizer; give a checkpoint that has one")
    if not 2 <= max_tokens <= checkpoint.model.shape.max_positions:
        raise ValueError(f"rows of {max_tokens} tokens; allowed: 2 .. {checkpoint.model.shape.max_positions}")
    if sources:
        rows = [source.read() for source in sources]
        plan = _plan(sources, checkpoint, max_tokens, answer_tokens)
        keep_plan(folder / PLAN, plan, what="data")
        maker = _Maker(checkpoint, max_tokens, answer)
        for source, found in zip(sources, rows, strict=True):
            _report_held_out(source, [prompt for prompt, _ in found], report)
        shards = list(_shards(sources, rows))
        for number, (name, own, part) in enumerate(shards, start=1):
            if not (folder / name).exists():
                (folder / MANIFEST).unlink(missing_ok=True)  # own answers may come out differently on another machine
                _write(folder / name, maker.documents(part, own=own))
                report(f"prepared {number} of {len(shards)} shards")
        _finish(folder, plan, [name for name, _, _ in shards], report)
    return load_prepared(folder, checkpoint)


def _report_held_out(source: Source, prompts: Sequence[str], report: Callable[[str], None]) -> None:
    kept = sum(map(held_out, prompts))
    learnt = "" if kept < len(prompts) else ": none is trained on, give more rows"
    report(f"{source.path.name}: {kept} of {len(prompts)} rows are held out{learnt}")


class _Maker:
    """Rows to documents, for one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, max_tokens: int, answer: Answer | None) -> None:
        assert checkpoint.tokenizer is not None
        self.words, self.max_tokens, self.answer = checkpoint.tokenizer, max_tokens, answer
        self.ending = self._ending(checkpoint.eos_ids)

    def _ending(self, eos_ids: frozenset[int]) -> list[int]:
        """The id that ends an answer: the one that the chat template writes, or the lowest."""
        written: list[int] = []
        if self.words.chat_template:
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
            whole = self.words.chat(messages, add_generation_prompt=False)
            written = [id for id in whole[len(prompt_ids(self.words, "a")) :] if id in eos_ids]
        return (written or sorted(eos_ids))[:1]

    def documents(self, rows: Sequence[tuple[str, str]], *, own: bool) -> dict[str, Tensor]:
        """A shard, with how many rows were cut or left out."""
        prompts = [prompt_ids(self.words, prompt) for prompt, _ in rows]
        fit = [len(prompt) < self.max_tokens for prompt in prompts]
        if own:
            if self.answer is None:
                raise ValueError("the model's own answers were asked for, but nothing was given that makes them")
            made = iter(self.answer([prompt for prompt, fits in zip(prompts, fit, strict=True) if fits]))
            answers = [next(made) if fits else [] for fits in fit]
        else:
            answers = [self.words.encode(response, add_bos=False) + self.ending for _, response in rows]
        kept = [
            ((prompt + given)[: self.max_tokens], len(prompt), prompt_number(text))
            for (text, _), prompt, given, fits in zip(rows, prompts, answers, fit, strict=True)
            if fits and prompt and given
        ]
        cut = sum(len(p) + len(a) > self.max_tokens for p, a, fits in zip(prompts, answers, fit, strict=True) if fits)
        return {
            "ids": torch.tensor([id for ids, _, _ in kept for id in ids], dtype=torch.int32),
            "lengths": torch.tensor([len(ids) for ids, _, _ in kept], dtype=torch.int32),
            "prompts": torch.tensor([prompt for _, prompt, _ in kept], dtype=torch.int32),
            "numbers": torch.tensor([number for _, _, number in kept], dtype=torch.int64),
            "cut_and_left_out": torch.tensor([cut, len(rows) - len(kept)]),
        }


def _plan(sources: Sequence[Source], checkpoint: Checkpoint, max_tokens: int, answer_tokens: int) -> dict[str, Any]:
    words, own = checkpoint.tokenizer, any(source.own_answers for source in sources)
    assert words is not None
    described = [asdict(s) | {"path": s.path.name, "sha256": files_hash([s.path])} for s in sources]
    return {
        "version": VERSION,
        "sources": described,
        "tokenizer_hash": words.hash,
        "template_hash": words.template_hash,
        "max_tokens": max_tokens,
        "own_answers": {"model_hash": checkpoint.model_hash, "tokens": answer_tokens} if own else None,
    }


def keep_plan(path: Path, plan: Mapping[str, Any], *, what: str) -> None:
    """Write down what a folder will hold, `what`, before it does; ValueError where another plan is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_atomically(path, json.dumps(plan, indent=1).encode() + b"\n")
    elif (there := json.loads(path.read_bytes())) != plan:
        changed = ", ".join(key for key in plan if there.get(key) != plan[key])
        raise ValueError(f"{path.parent} holds {what} of another {changed}; give another folder, or remove it")


def prompt_ids(words: Tokenizer, prompt: str) -> list[int]:
    """Up to where the answer begins: through the chat template, if there is one."""
    return words.chat([{"role": "user", "content": prompt}]) if words.chat_template else words.encode(prompt)


def _shards(
    sources: Sequence[Source], rows: Sequence[list[tuple[str, str]]]
) -> Iterator[tuple[str, bool, list[tuple[str, str]]]]:
    """(name, own answers, rows) of every shard."""
    for number, (source, found) in enumerate(zip(sources, rows, strict=True)):
        size = OWN_SHARD_ROWS if source.own_answers else SHARD_ROWS
        for start in range(0, len(found), size):
            yield f"{number:02d}-{start // size:05d}.safetensors", source.own_answers, found[start : start + size]


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(path)


def _finish(folder: Path, plan: Mapping[str, Any], names: Sequence[str], report: Callable[[str], None]) -> None:
    if (folder / MANIFEST).exists():
        return
    parts = [load_file(folder / name) for name in names]
    cut, left_out = torch.stack([part["cut_and_left_out"] for part in parts]).sum(0).tolist()
    documents, tokens = (sum(len(part[key]) for part in parts) for key in ("lengths", "ids"))
    if cut or left_out:
        report(f"{cut} rows were longer than {plan['max_tokens']} tokens and cut; {left_out} had no room for an answer")
    if not documents:
        raise ValueError(f"no row fits into {plan['max_tokens']} tokens with an answer; allow longer rows")
    prompt_tokens = sum(int(part["prompts"].sum()) for part in parts)
    facts = {"documents": documents, "tokens": tokens, "answer_tokens": tokens - prompt_tokens, "cut": cut}
    shards = {name: files_hash([folder / name]) for name in names}
    content = {**plan, **facts, "left_out": left_out, "shards": shards}
    write_atomically(folder / MANIFEST, json.dumps(content, indent=1).encode() + b"\n")
    report(f"{documents} documents, {tokens} tokens of which {tokens - prompt_tokens} are answers, in {folder}")
