"""Packed training rows: one context, then several questions about it, each seeing the context and itself only.

Shape suffixes: B rows, T positions of a row, A answer positions of a batch, d hidden size; N = B T rows of the model.
Everything is a pure function of (seed, step, micro-batch), so a resumed run needs no generator state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from random import Random

import torch
from torch import Tensor

from anydepth.models.nano import questions as q
from anydepth.models.nano.tokenizer import EOS, IDS, encode

_CONTEXT, _PADDING = 0, -1


@dataclass(frozen=True, kw_only=True)
class Row:
    """A packed row as lists: ids, position and block of every input token, and the answer tokens to predict.

    `answers` holds (index of the input token, id to predict, hop depth or 0, is it computed).
    """

    ids: list[int]
    positions: list[int]
    blocks: list[int]
    answers: list[tuple[int, int, int, bool]]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows padded to one length T."""

    ids_BT: Tensor
    positions_BT: Tensor
    blocks_BT: Tensor
    # Indices into the flattened [B * T] of the tokens that predict an answer token, and what they predict.
    answer_A: Tensor
    targets_A: Tensor
    hops_A: Tensor
    computed_A: Tensor

    @property
    def tokens(self) -> int:
        """Input tokens without padding."""
        return int((self.blocks_BT != _PADDING).sum())

    @property
    def mask(self) -> Tensor:
        """[B, T, T]: a query (second axis) sees itself and earlier keys, of its own block or of the context."""
        own = self.blocks_BT[:, :, None] == self.blocks_BT[:, None, :]
        context = (self.blocks_BT == _CONTEXT)[:, None, :]
        length = self.blocks_BT.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=own.device).tril()
        return (own | context) & causal

    def to(self, device: torch.device) -> Batch:
        """The same rows on another device."""
        return Batch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def pack(asked: Sequence[q.Question]) -> Row:
    """One row from questions about the same context. Positions of each block go on from the end of the context."""
    tail = q.question_text(asked[0])
    context = encode(asked[0].prompt[: -len(tail)])
    ids, positions = list(context), list(range(len(context)))
    blocks = [_CONTEXT] * len(context)
    answers: list[tuple[int, int, int, bool]] = []
    for block, question in enumerate(asked, start=1):
        prompt, answer = encode(q.question_text(question)), [*encode(question.answer), IDS[EOS]]
        first = len(ids) + len(prompt) - 1
        hops, computed = (*question.hops, 0), (*question.computed, False)
        answers += [(first + i, answer[i], hops[i], computed[i]) for i in range(len(answer))]
        fed = prompt + answer[:-1]
        ids += fed
        positions += range(len(context), len(context) + len(fed))
        blocks += [block] * len(fed)
    return Row(ids=ids, positions=positions, blocks=blocks, answers=answers)


def collate(rows: Sequence[Row]) -> Batch:
    """Pad rows to the longest; padding sees itself only and is never seen by the others."""
    length = max(len(row.ids) for row in rows)

    def padded(lists: list[list[int]], value: int) -> Tensor:
        return torch.tensor([entries + [value] * (length - len(entries)) for entries in lists])

    answers = [(b * length + at, *rest) for b, row in enumerate(rows) for at, *rest in row.answers]
    where, targets, hops, computed = (torch.tensor(column) for column in zip(*answers, strict=True))
    return Batch(
        ids_BT=padded([row.ids for row in rows], 0),
        positions_BT=padded([row.positions for row in rows], 0),
        blocks_BT=padded([row.blocks for row in rows], _PADDING),
        answer_A=where,
        targets_A=targets,
        hops_A=hops,
        computed_A=computed.bool(),
    )


def collate_sorted(rows: Sequence[Row], *, rows_per_chunk: int) -> list[Batch]:
    """Batches of at most `rows_per_chunk` rows of similar length: less padding, and attention that stays in cache."""
    ordered = sorted(rows, key=lambda row: len(row.ids))
    return [collate(ordered[i : i + rows_per_chunk]) for i in range(0, len(ordered), rows_per_chunk)]


def curriculum_rows(rng: Random, *, rows: int, level: int) -> list[Row]:
    """Rows of single questions at a level of the curriculum."""
    return [
        _single_row(rng, q.draw_level_context(rng, level=level), count=max(2, min(6, level + 1))) for _ in range(rows)
    ]


def mixed_rows(rng: Random, *, rows: int, why_rows: int, asked: int) -> list[Row]:
    """Rows of the full task: `why_rows` of them explain, the others ask `asked` questions, half of them pairs."""
    plain = [_plain_row(rng, q.draw_full_context(rng), count=asked) for _ in range(rows - why_rows)]
    return plain + [_why_row(rng) for _ in range(why_rows)]


def _asked(rng: Random, context: q.Context, count: int) -> list[str]:
    """Distinct persons, deeper ones more often (weight 1 + 0.5 (depth - 1))."""
    left = list(context)
    chosen = []
    for _ in range(min(count, len(left))):
        statement = rng.choices(left, weights=[1 + 0.5 * (other.depth - 1) for other in left])[0]
        left.remove(statement)
        chosen.append(statement.person)
    return chosen


def _single_row(rng: Random, context: q.Context, count: int) -> Row:
    return pack([q.ask_single(context, person) for person in _asked(rng, context, count)])


def _plain_row(rng: Random, context: q.Context, count: int) -> Row:
    singles = iter(_asked(rng, context, count))
    asked: list[q.Question] = []
    for _ in range(count):
        if rng.random() < 0.5:
            asked.append(q.ask_single(context, next(singles)))
        else:
            first, second = _asked(rng, context, 2)
            asked.append(q.ask_pair(context, first, second))
    return pack(asked)


# An explanation is several times as long as a plain answer: a row takes as many as keep it near the others' length.
_WHY_ROW_TOKENS = 130


def _why_row(rng: Random) -> Row:
    context = q.draw_short_context(rng, difficulty=rng.randint(1, q.MAX_HOPS))
    asked: list[q.Question] = []
    size = len(q.context_text(context).split())
    for person in _asked(rng, context, len(context)):
        question = q.ask_why(context, person)
        size += len(q.question_text(question).split()) + len(question.hops)
        if asked and size > _WHY_ROW_TOKENS:
            break
        asked.append(question)
    return pack(asked)


def question_rows(asked: Sequence[q.Question]) -> Iterator[Row]:
    """One row a question, for validation."""
    return (pack([question]) for question in asked)
