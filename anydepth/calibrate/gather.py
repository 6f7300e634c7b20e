"""Every exit at every decode token of answers: one teacher-forced pass, read as the engine reads.

The first token of an answer comes from the prefill, which every policy runs at full depth: it is no row. Shape
suffixes: R rows, E exits, n rows at a time, C columns of a readout, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anydepth.calibrate.answers import Answer
from anydepth.calibrate.table import Table
from anydepth.exits import confidence
from anydepth.exits.base import wide
from anydepth.models.llama import Llama
from anydepth.progress import Countdown
from anydepth.train.packed import Pack, exit_states, in_packs

_PACK_TOKENS = 2048
_CHUNK_BYTES = 24 << 20  # of logits at a time
_TEMPERATURE_ROWS = 2048  # each exit's; more move the third digit
TEMPERATURES = np.geomspace(0.25, 8.0, 81)


@torch.inference_mode()
def gather(
    model: Llama, answers: Sequence[Answer], *, temperature: float = 1.0, report: Callable[[str], None] = print
) -> Table:
    """The table of these answers, whose number is its rows' question. `temperature` is of the entropy."""
    exits = _exits(model)
    parts = {name: list[Tensor]() for name in ("logit", "margin", "entropy", "probe", "agrees", "answers")}
    questions = []
    for numbers, targets_A, states in _states(model, answers, report):
        questions.append(numbers)
        columns = [_exit(model, k, h_Ad, targets_A, temperature) for k, h_Ad in enumerate(states, start=1)]
        for name, whole in zip(parts, zip(*columns, strict=True), strict=True):
            parts[name].append(torch.stack(whole, 1))
    if not questions:
        raise ValueError("no answer has a second token, so nothing can leave early; give other prompts")
    order = torch.argsort(torch.cat(questions), stable=True)
    values = {name: torch.cat(columns)[order].numpy() for name, columns in parts.items()}
    arrays: dict[str, Any] = {f"{name}_RE": array for name, array in values.items()}
    return Table(
        layers=tuple(exits),
        temperature=temperature,
        questions=len(answers),
        question_R=torch.cat(questions)[order].numpy(),
        **arrays,
    )


@torch.inference_mode()
def gate_temperature(model: Llama, answers: Sequence[Answer]) -> float:
    """The temperature at which the exits' softmax(z / T) predicts full depth's token best (least cross-entropy, all
    exits together; Guo et al. 2017, arXiv 1706.04599), from 0.25 to 8. Of rows whose token the head has, at least 2048
    where there are so many."""
    losses, rows = np.zeros(len(TEMPERATURES)), 0
    for _, targets_A, states in _states(model, answers, lambda line: None):
        for k, h_Ad in enumerate(states, start=1):
            for at in _chunks(len(h_Ad), model):
                z_nC = model.listed(k, h_Ad[at])
                own_n = model.over_vocabulary(k, z_nC).gather(1, targets_A[at, None])[:, 0]
                losses += cross_entropies(z_nC, own_n, TEMPERATURES)
        rows += len(targets_A)
        if rows >= _TEMPERATURE_ROWS:
            break
    return least(TEMPERATURES, losses)


def cross_entropies(logits_nC: Tensor, own_n: Tensor, temperatures: np.ndarray) -> np.ndarray:
    """Summed over the rows that have their target, whose logit is `own`, one a temperature."""
    has_n = own_n.isfinite()
    z_nC, own_n = wide(logits_nC)[has_n], wide(own_n)[has_n]
    found = [float((torch.logsumexp(z_nC / t, 1) - own_n / t).double().sum()) for t in temperatures.tolist()]
    return np.array(found)


def least(temperatures: np.ndarray, losses: np.ndarray) -> float:
    """Where a parabola through the smallest loss and its neighbours is smallest, in log T; three digits."""
    at = int(np.argmin(losses))
    if 0 < at < len(losses) - 1:
        x, (a, b, c) = np.log(temperatures), losses[at - 1 : at + 2]
        step = x[1] - x[0]
        return float(f"{np.exp(x[at] + step * (a - c) / (2 * (a - 2 * b + c))):.3g}")
    return float(f"{temperatures[at]:.3g}")


def _exit(
    model: Llama, k: int, h_Ad: Tensor, targets_A: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A column of each part of the table."""
    parts = []
    for at in _chunks(len(h_Ad), model):
        h_nd = h_Ad[at]
        z_nC = model.listed(k, h_nd)
        may_n = model.answers(k, h_nd, z_nC)
        first, lead, spread = confidence.scores(z_nC, temperature)
        probe = wide(model.signal(k, h_nd)).sigmoid() if k in model.probes else torch.full_like(first, torch.nan)
        top = model.over_vocabulary(k, z_nC).argmax(-1)
        parts.append((first, lead, spread.double(), probe.double(), top == targets_A[at], may_n))
    columns = [torch.cat(column).cpu() for column in zip(*parts, strict=True)]
    return tuple(columns)  # type: ignore[return-value]


def _states(
    model: Llama, answers: Sequence[Answer], report: Callable[[str], None]
) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
    """(question of each row, full depth's token, states after each exit), some answers at a time."""
    exits = _exits(model)
    long = [number for number, answer in enumerate(answers) if len(answer.answer_ids) > 1]
    lengths = [len(answer.prompt_ids) + len(answer.answer_ids) - 1 for answer in answers]
    countdown = Countdown("read", len(long), "answers at every exit", report)
    for numbers in in_packs(long, lengths, tokens=_PACK_TOKENS):
        ids, rows, targets, questions, start = list[int](), list[int](), list[int](), list[int](), 0
        for number in numbers:
            prompt, answer = answers[number].prompt_ids, answers[number].answer_ids
            ids += [*prompt, *answer[:-1]]
            rows += range(start + len(prompt), start + len(prompt) + len(answer) - 1)  # fed answer tokens
            targets += answer[1:]
            questions += [number] * (len(answer) - 1)
            start += lengths[number]
        wanted = torch.tensor(targets, device=model.device)
        pack = Pack(
            ids_N=torch.tensor(ids, device=model.device),
            lengths=tuple(lengths[number] for number in numbers),
            trained_A=torch.tensor(rows, device=model.device),
            targets_A=wanted,
        )
        yield torch.tensor(questions), wanted, exit_states(model, pack, exits)[:-1]
        countdown.advance(len(numbers))


def _exits(model: Llama) -> list[int]:
    return [layers.stop for layers in model.shape.segment_layers[:-1]]


def _chunks(rows: int, model: Llama) -> Iterator[slice]:
    size = max(1, _CHUNK_BYTES // (4 * model.shape.vocab))
    return (slice(start, start + size) for start in range(0, rows, size))
