"""What a rollout returns: one answer with all that its probability can be replayed from. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from anydepth.types import FinishReason, Output, Sampling, Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer `answer_index` to prompt `prompt_index`; token ids are the truth, text is made from them.

    `token_ids`, `depths` and `logprobs` have equal length and include the ending stop id. `logprobs` are the chosen
    tokens', raw or processed as `logprobs_mode` says (greedy: raw). `depths[i]` is the depth from which token i was
    read; under `fill` the K/V of deeper segments held what that fill says. `seed`, submitted alone with `sampling`,
    gives the same answer as long as the weights are those of `weight_version`.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    depths: tuple[int, ...]
    logprobs: tuple[float, ...]
    logprobs_mode: str
    text: str | None
    finish_reason: FinishReason
    seed: int
    weight_version: int
    usage: Usage
    fill: str
    sampling: Sampling
    prompt_index: int
    answer_index: int


def answer_of(output: Output, *, sampling: Sampling, fill: str) -> Answer:
    """The Answer that an Output with logprobs is."""
    assert output.logprobs is not None and output.logprobs_mode is not None
    return Answer(
        prompt_ids=output.prompt_ids,
        token_ids=output.token_ids,
        depths=output.depths,
        logprobs=output.logprobs,
        logprobs_mode=output.logprobs_mode,
        text=output.text,
        finish_reason=output.finish_reason,
        seed=output.seed,
        weight_version=output.weight_version,
        usage=output.usage,
        fill=fill,
        sampling=sampling,
        prompt_index=output.prompt_index,
        answer_index=output.answer_index,
    )
