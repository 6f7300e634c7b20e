"""The dense reference as a backend: one question at a time, without the engine's code.

Only tokenizing, reading the checkpoint's file and cutting text at stop strings are anydepth's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from anydepth.certificate import EXIT_SETTINGS
from anydepth.engine.text import TextStream
from anydepth.eval.backends.base import Ask, Reply
from anydepth.eval.backends.checkpoint import CheckpointBackend
from anydepth.models.weights import HEAD, Weights
from anydepth.reference import FILLS, Model, Result, generate, make_policy, score
from anydepth.types import Output, Sampling, Score, Usage

DTYPES = {"float32": torch.float32, "float64": torch.float64}
POLICY_FIELDS = tuple(name for name in EXIT_SETTINGS if name != "profile")


class ReferenceBackend(CheckpointBackend):
    """fill: "full" (None) or another that the reference has; segments: the exit layers of a layered model."""

    name = "reference"

    def __init__(
        self,
        model: str,
        *,
        fill: str | None = None,
        signals: str = "sync",
        dtype: str | None = None,
        gate_dtype: str = "float32",
        segments: Sequence[int] | None = None,
    ) -> None:
        self.fill, self.dtype, self.gate_dtype = fill or "full", dtype or "float32", gate_dtype
        self.know("fill", self.fill, FILLS)
        self.know("dtype", self.dtype, DTYPES)
        self.know("signals", signals, ("sync",))
        _, weights = self.open(model)
        self.model = Model(weights.config, tensors(weights, DTYPES[self.dtype]), segments=segments)
        self.max_positions, self.segments = self.model.max_positions, self.model.segments

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        policy = make_policy(self.segments, self.model.has_gate, gate_dtype=self.gate_dtype, **_policy(sampling))
        return self.told(sampling, policy=policy.name, low=policy.low, high=policy.high)

    @torch.inference_mode()
    def replies(self, asks: Sequence[Ask], sampling: Sampling, *, concurrency: int) -> Iterator[Reply]:
        for ask in asks:
            start = time.perf_counter()
            if ask.continuations:
                scores = tuple(self._score(ask, ids, sampling) for ids in ask.continuations)
                yield Reply(ask=ask, scores=scores, seconds=time.perf_counter() - start)
            else:
                yield Reply(ask=ask, output=self._answer(ask, sampling), seconds=time.perf_counter() - start)

    def _score(self, ask: Ask, ids: Sequence[int], sampling: Sampling) -> Score:
        result = score(self.model, ask.prompt_ids, ids, fill=self.fill, gate_dtype=self.gate_dtype, **_policy(sampling))
        return Score(tuple(result.logprobs), tuple(result.depths), tuple(result.argmax or ()), _usage(result))

    def _answer(self, ask: Ask, sampling: Sampling) -> Output:
        result = self._generate(ask, sampling, sampling.max_tokens)
        stop_ids = self.stop_ids(sampling)
        text = TextStream(self.tokenizer.decode, sampling.stop)
        for count, token in enumerate(result.token_ids, start=1):
            if token in stop_ids:
                break
            text.push(token)
            if text.stopped:  # what comes after a stop string is not part of the answer, nor of its cost
                if count < len(result.token_ids):
                    result = self._generate(ask, sampling, count)
                result.finish_reason = "stop"
                break
        text.end()
        return Output(
            request_id=f"{ask.key[0]}:{ask.key[1]}",
            prompt_ids=ask.prompt_ids,
            token_ids=tuple(result.token_ids),
            depths=tuple(result.depths),
            text=text.text,
            finish_reason=result.finish_reason,  # type: ignore[arg-type]
            usage=_usage(result),
            seed=ask.seed,
            answer_index=ask.key[1],
        )

    def _generate(self, ask: Ask, sampling: Sampling, max_tokens: int) -> Result:
        return generate(
            self.model,
            ask.prompt_ids,
            fill=self.fill,
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=ask.seed,
            eos_ids=self.eos_ids,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            first_token=sampling.first_token,
            gate_dtype=self.gate_dtype,
            **_policy(sampling),
        )


def _policy(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in POLICY_FIELDS}


def _usage(result: Result) -> Usage:
    return Usage(**asdict(result.usage))


def tensors(weights: Weights, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of a checkpoint under its released name; of a tied model without a second copy of the embedding."""
    tied = weights.config.get("tie_word_embeddings", False)
    names = [name for name in weights.shapes if not (tied and name == HEAD)]
    return {name: torch.cat([rows.to(dtype, copy=True) for _, rows in weights.rows(name)]) for name in names}
