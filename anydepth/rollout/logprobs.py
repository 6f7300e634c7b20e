"""What a model says of answers that were already given: their tokens' log-probabilities, once more, with gradients.

One teacher-forced pass over the padded batch runs every position through every segment; each token is then read at the
depth it was read at when it was sampled. Of the fills only the keys and values differ: `full` and `deferred` compute
every plane; under `last_exited` the planes deeper than a position's depth hold its own last K/V. Position p of prompt +
answer leaves at the depth of the token that it produced: the prompt's last position at that of the first token (R where
it came from the prefill), the earlier ones at R.

Shape suffixes: N answers, T tokens of the longest, L input positions of a row, A tokens of all answers, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anydepth.engine.sampling import Settings, processed, raw_logprobs
from anydepth.models.base import Model
from anydepth.rollout.answers import Answer
from anydepth.train.data import Row, collate
from anydepth.train.kv import all_depths
from anydepth.types import EXACT_FILLS, Sampling, Shape, unknown

COPIED = "last_exited"


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Row n is answer n: `mask_NT` says where it has tokens. `logprobs_NT` (float64, with the graph to the weights) and
    `returned_NT` (what the rollout said) are 0 elsewhere; the differences are over tokens, 0 if there are none."""

    logprobs_NT: Tensor
    returned_NT: Tensor
    mask_NT: Tensor

    @property
    def differences(self) -> Tensor:
        """|replayed - returned| of every token, [A], without a graph."""
        return (self.logprobs_NT.detach() - self.returned_NT)[self.mask_NT].abs()

    @property
    def mean_difference(self) -> float:
        return self.summed_difference / max(1, int(self.mask_NT.sum()))

    @property
    def max_difference(self) -> float:
        return max(self.differences.tolist(), default=0.0)

    @property
    def summed_difference(self) -> float:
        return float(self.differences.sum())


def replay(model: Model, answers: Sequence[Answer], *, fill: str | None = None) -> Replay:
    """Log-probabilities of the answers' tokens under `model`, at their returned depths, K/V semantics and mode.

    Answers of different prompts, lengths, depths, fills and sampling settings may stand in one call; one without tokens
    is a row of padding. `fill` replaces the answers' own, to see what that would change. Rows are padded to the longest
    and every position's activations are kept for the gradient, so the caller cuts a large batch into pieces, of
    similar lengths if possible; logits exist for answer tokens only, and only at their depths.

    Gradients flow to the tensors that training steps, after `requires_grad_()` on them: for a looped model
    `train.recipe.parameters(model)`. A packed model (all that `LLM` loads) replays under `torch.no_grad()` as it is;
    for gradients call `model.slots()` first, which unpacks, and take the tensors after that.

    "processed" is after temperature, top-k and top-p, renormalised. Which tokens are kept counts as a constant, as in
    the sampler. New weights may drop a token that was sampled under the old ones: its log-probability is then -inf,
    the differences are infinite, and its gradient is 0, so that an importance ratio is 0 and not NaN.

    ValueError: fill `shared`, `last_exited` on a layered model, depths or lengths that no rollout of this model gives.
    """
    if not hasattr(model, "segment"):
        raise ValueError(f"model is {type(model).__name__}; allowed: a model, such as load_checkpoint(...).model")
    for index, answer in enumerate(answers):
        if not isinstance(answer, Answer):
            raise ValueError(
                f"answer {index} is of type {type(answer).__name__}; allowed: Answers, as Rollout gives them (a Group "
                f"has them in .answers; of an Output answer_of makes one)"
            )
        if problem := _problem(answer, fill or answer.fill, model.shape):
            raise ValueError(f"answer {index}: {problem}")
    told = [answer for answer in answers if answer.token_ids]
    lengths_N = torch.tensor([len(answer.token_ids) for answer in answers], device=model.device).view(-1, 1)
    longest = max((len(answer.token_ids) for answer in told), default=0)
    mask_NT = torch.arange(longest, device=model.device) < lengths_N
    zeros_NT = torch.zeros(mask_NT.shape, dtype=torch.float64, device=model.device)
    returned_A = torch.tensor([x for answer in told for x in answer.logprobs], dtype=torch.float64, device=model.device)
    logprobs_A = _logprobs(model, told, fill) if told else returned_A
    # Rows and tokens stand in the same order in both shapes.
    return Replay(
        logprobs_NT=zeros_NT.masked_scatter(mask_NT, logprobs_A),
        returned_NT=zeros_NT.masked_scatter(mask_NT, returned_A),
        mask_NT=mask_NT,
    )


def _problem(answer: Answer, fill: str, shape: Shape) -> str | None:
    """Why the answer cannot be replayed."""
    if fill == "shared":
        return (
            "fill 'shared' has no replay: its one plane is overwritten loop by loop and position by position, which is "
            f"no single pass; allowed: {', '.join((*EXACT_FILLS, COPIED))}"
        )
    if fill not in (*EXACT_FILLS, COPIED):
        return str(unknown("fill", fill, (*EXACT_FILLS, COPIED)))
    if fill == COPIED and not shape.shared_weights:
        return f"fill {fill!r} is for looped models; this one is layered, allowed: {', '.join(EXACT_FILLS)}"
    tokens, positions = len(answer.token_ids), len(answer.prompt_ids) + len(answer.token_ids) - 1
    if not len(answer.depths) == len(answer.logprobs) == tokens:
        return f"{tokens} tokens, {len(answer.depths)} depths, {len(answer.logprobs)} logprobs; give one each a token"
    if not answer.prompt_ids or (tokens and positions > shape.max_positions):
        return (
            f"{len(answer.prompt_ids)} prompt tokens and {tokens} of the answer; allowed: a prompt, and up to "
            f"{shape.max_positions} positions (the last token takes none)"
        )
    if wrong := [id for id in (*answer.prompt_ids, *answer.token_ids) if not 0 <= id < shape.vocab]:
        return f"token id {wrong[0]}; allowed: 0 .. {shape.vocab - 1}, the model's vocabulary"
    if wrong := [depth for depth in answer.depths if not 1 <= depth <= shape.segments]:
        return f"depth {wrong[0]}; allowed: 1 .. {shape.segments}, the model's segments"
    if answer.logprobs_mode != "raw" and (answer.logprobs_mode != "processed" or not answer.sampling.temperature):
        return (
            f"logprobs_mode {answer.logprobs_mode!r} at temperature {answer.sampling.temperature:g}; allowed: 'raw', "
            "and above 0 'processed'"
        )
    if answer.sampling.first_token == "prefill" and answer.depths[:1] not in ((), (shape.segments,)):
        return (
            f"its first depth is {answer.depths[0]}, but the first token comes from the full-depth prefill, so it must "
            f"be {shape.segments} (or first_token='policy')"
        )
    return None


def _logprobs(model: Model, answers: Sequence[Answer], fill: str | None) -> Tensor:
    """Log-probabilities of all tokens, answer by answer, [A] float64."""
    segments, device = model.shape.segments, model.device
    batch = collate([_row(answer) for answer in answers]).to(device)
    depths_A = torch.tensor([depth for answer in answers for depth in answer.depths], device=device)
    repeat = functools.partial(_each_token, answers, device=device)
    copies = repeat([(fill or answer.fill) == COPIED for answer in answers], torch.bool)
    exits_BL = None
    if copies.any():
        exits_BL = torch.full_like(batch.ids_BT, segments)
        # A position that is said to leave at R has planes of its own, which is what the other fills mean.
        exits_BL.view(-1)[batch.answer_A] = torch.where(copies, depths_A, segments)
    states = all_depths(model, batch, exit_depths_BT=exits_BL)
    drawn_A = repeat([answer.logprobs_mode == "processed" for answer in answers], torch.bool)
    asks = [answer.sampling for answer in answers if answer.logprobs_mode == "processed"]
    settings = _settings(answers, model)
    logprobs_A = torch.zeros(depths_A.shape, dtype=torch.float64, device=device)
    for k, h_Ad in enumerate(states, start=1):
        for mode in (False, True):
            at = ((depths_A == k) & (drawn_A == mode)).nonzero().squeeze(1)
            if len(at):
                logits = model.readout(k, h_Ad.index_select(0, at))
                tokens, rows = batch.targets_A[at], Settings(*(setting[at] for setting in settings))
                found = _processed(logits, tokens, rows, asks) if mode else raw_logprobs(logits, tokens)
                logprobs_A = logprobs_A.index_copy(0, at, found)
    return logprobs_A


def _row(answer: Answer) -> Row:
    """What was fed: the prompt and all tokens but the last, each output predicted by the position before it."""
    ids, first = [*answer.prompt_ids, *answer.token_ids[:-1]], len(answer.prompt_ids) - 1
    return Row(
        ids=ids,
        positions=list(range(len(ids))),
        blocks=[0] * len(ids),
        answers=[(first + i, token, 0, False) for i, token in enumerate(answer.token_ids)],
    )


def _settings(answers: Sequence[Answer], model: Model) -> Settings:
    vocab, asks = model.shape.vocab, [answer.sampling for answer in answers]
    repeat = functools.partial(_each_token, answers, device=model.device)
    return Settings(
        repeat([ask.temperature for ask in asks], torch.float64),
        repeat([vocab + 1 if ask.top_k is None else min(ask.top_k, vocab) for ask in asks], torch.int64),
        repeat([ask.top_p for ask in asks], torch.float64),
    )


def _each_token(
    answers: Sequence[Answer], values: Sequence[float], dtype: torch.dtype, *, device: torch.device
) -> Tensor:
    """An answer's value at each of its tokens, [A]."""
    counts = torch.tensor([len(answer.token_ids) for answer in answers])
    return torch.tensor(values, dtype=dtype).repeat_interleave(counts).to(device)


def _processed(logits_AV: Tensor, token_A: Tensor, settings: Settings, asks: Sequence[Sampling]) -> Tensor:
    """log of the processed probability at the token, [A]; a token of probability 0 gets -inf and no gradient."""
    max_k = max((min(ask.top_k, logits_AV.shape[1]) for ask in asks if ask.top_k is not None), default=None)
    chances_AV = processed(logits_AV, settings, max_k=max_k, any_top_p=any(ask.top_p < 1 for ask in asks))
    chance_A = chances_AV.gather(1, token_A.unsqueeze(1)).squeeze(1)
    possible = chance_A > 0
    return torch.where(possible, chance_A.masked_fill(~possible, 1.0).log(), float("-inf"))
