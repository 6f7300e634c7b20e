"""One request from prompt to answer, and one continuation to its log-likelihood, on the reference models.

Every setting has the name it has in a request's sampling settings, so one dict can drive both. The position of a token
fed to the model is below max_position_embeddings: a request makes at most max_position_embeddings - prompt length + 1
tokens (the last one is not fed back) and ends with "length" there, as it does at max_tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from anydepth.reference.fills import FILLS
from anydepth.reference.model import KV, Model
from anydepth.reference.policies import Policy, Row, make_policy
from anydepth.reference.sampling import Draw, argmax, log_softmax, sample


@dataclass
class Usage:
    prompt_tokens: int = 0
    output_tokens: int = 0
    decode_tokens: int = 0
    segments_read: int = 0
    segments_executed: int = 0
    segments_prefill: int = 0
    segments_wasted: int = 0


@dataclass
class Result:
    """What a request gave; the lists have one entry an output token.

    logits: [V] the row's raw logits at its readout. decisions: the policy's row, None for a first token that came from
    the prompt's prefill. draws: how the token was chosen (empty for a scored continuation). planes: K and V per plane,
    [layers, positions, K, C] each, over the positions of prompt + outputs[:-1].
    """

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprobs_mode: str = "raw"
    finish_reason: str | None = None
    argmax: list[bool] | None = None  # scored continuations: which tokens were the argmax
    logits: list[Tensor] = field(default_factory=list)
    decisions: list[Row | None] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    planes: list[KV] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)

    @property
    def greedy(self) -> bool | None:
        """Whether every token of a scored continuation was the argmax."""
        return None if self.argmax is None else all(self.argmax)


def generate(
    model: Model,
    prompt_ids: Sequence[int],
    *,
    fill: str = "full",
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    eos_ids: Collection[int] = (),
    stop_token_ids: Collection[int] = (),
    ignore_eos: bool = False,
    logprobs: str | None = None,
    first_token: str = "prefill",
    **policy_settings: Any,
) -> Result:
    """Answer one prompt of token ids. policy_settings: see `make_policy`. logprobs None counts as "raw".

    first_token "policy" makes the prompt's last token a decode row: depths[0] is then its readout depth.
    """
    if not 1 <= len(prompt_ids) <= model.max_positions:
        raise ValueError(f"{len(prompt_ids)} prompt tokens; allowed: 1..{model.max_positions}")
    if first_token not in ("prefill", "policy"):
        raise ValueError(f"first_token {first_token!r}; allowed: prefill, policy")
    policy = make_policy(model.segments, model.has_gate, **policy_settings)
    limit = min(max_tokens, model.max_positions - len(prompt_ids) + 1)
    prefilled_first = first_token == "prefill"
    _check_trace(policy, limit, prefilled_first)
    stop_ids = {*stop_token_ids, *(() if ignore_eos else eos_ids)}
    result = Result(list(prompt_ids), logprobs_mode="processed" if logprobs == "processed" else "raw")
    oracle: Any = FILLS[fill](model)
    token, row = prompt_ids[-1], None
    if prefilled_first:
        h = oracle.prefill(list(prompt_ids))
    else:
        oracle.prefill(list(prompt_ids[:-1]))
    while result.finish_reason is None:
        index = len(result.token_ids)
        if index > 0 or not prefilled_first:
            row = Row(policy, index, index + (not prefilled_first))
            h = oracle.decode(token, row)
        logits_V = model.readout(h)
        draw, logprob = sample(
            logits_V,
            index=index,
            seed=seed,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            logprobs=result.logprobs_mode,
        )
        token = draw.token
        _append(result, token, row.depth if row else model.segments, logprob, logits_V, row)
        result.draws.append(draw)
        if token in stop_ids:
            result.finish_reason = "stop"
        elif len(result.token_ids) == limit:
            result.finish_reason = "length"
    return _finish(result, oracle)


def score(
    model: Model,
    context_ids: Sequence[int],
    continuation_ids: Sequence[int],
    *,
    fill: str = "full",
    **policy_settings: Any,
) -> Result:
    """Log-likelihood of a continuation, teacher-forced: the context is prefilled without its last token; that token and
    each continuation token but the last are decode rows. A trace has one entry a continuation token, none of them free.
    """
    if not context_ids or not continuation_ids:
        raise ValueError("context and continuation need a token each")
    if len(context_ids) + len(continuation_ids) - 1 > model.max_positions:
        raise ValueError(f"longer than the model's {model.max_positions} positions")
    policy = make_policy(model.segments, model.has_gate, **policy_settings)
    _check_trace(policy, len(continuation_ids), prefilled_first=False)
    says: list[bool] = []
    result = Result(list(context_ids), argmax=says)
    oracle: Any = FILLS[fill](model)
    oracle.prefill(list(context_ids[:-1]))
    fed = [context_ids[-1], *continuation_ids[:-1]]
    for index, (token, target) in enumerate(zip(fed, continuation_ids, strict=True)):
        row = Row(policy, index, index + 1)
        logits_V = model.readout(oracle.decode(token, row))
        logits = logits_V.tolist()
        _append(result, target, row.depth, log_softmax(logits)[target], logits_V, row)
        says.append(argmax(logits) == target)
    return _finish(result, oracle)


def _check_trace(policy: Policy, outputs: int, prefilled_first: bool) -> None:
    if policy.name != "trace":
        return
    if len(policy.trace) < outputs:
        raise ValueError(f"a trace of {len(policy.trace)} depths for up to {outputs} outputs")
    if prefilled_first and policy.trace[0] != policy.segments:
        raise ValueError(f"a trace starts with depth {policy.segments}: the first output comes from the prefill")


def _append(result: Result, token: int, depth: int, logprob: float, logits_V: Tensor, row: Row | None) -> None:
    result.token_ids.append(token)
    result.depths.append(depth)
    result.logprobs.append(logprob)
    result.logits.append(logits_V)
    result.decisions.append(row)


def _finish(result: Result, oracle: Any) -> Result:
    decoded = [row.depth for row in result.decisions if row is not None]
    result.planes = oracle.planes()
    result.usage = Usage(
        prompt_tokens=len(result.prompt_ids),
        output_tokens=len(result.token_ids),
        decode_tokens=len(decoded),
        segments_read=sum(decoded),
        segments_executed=oracle.executed,
        segments_prefill=oracle.prefilled,
    )
    return result
