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

from anydepth.engine.text import TextStream
from anydepth.eval.backends.base import SMALL_HIDDEN, Ask, Backend, Reply
from anydepth.models.load import open_weights, weights_hash
from anydepth.models.locate import locate
from anydepth.models.weights import HEAD, Weights, all_eos
from anydepth.reference import FILLS, Model, Result, generate, make_policy, score
from anydepth.types import Output, Sampling, Score, Usage, unknown

DTYPES = {"float32": torch.float32, "float64": torch.float64}
POLICY_FIELDS = ("exit_policy", "exit_threshold", "min_depth", "max_depth", "depth", "trace")


class ReferenceBackend(Backend):
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
        for what, value, known in (
            ("fill", self.fill, FILLS),
            ("dtype", self.dtype, DTYPES),
            ("signals", signals, ("sync",)),
        ):
            if value not in known:
                raise ValueError(f"the reference backend: {unknown(what, value, known)}")
        place = locate(model)
        weights = open_weights(place.path)
        words = weights.tokenizer()
        if words is None:
            raise ValueError(f"model {model} has no tokenizer, which questions need")
        self.tokenizer, self.model_name, self.model_hash = words, model, weights_hash(weights.files)
        self.model = Model(weights.config, tensors(weights, DTYPES[self.dtype]), segments=segments)
        self.max_positions, self.segments = self.model.max_positions, self.model.segments
        self.small = weights.config["hidden_size"] < SMALL_HIDDEN
        self.eos_ids = all_eos(weights, words, vocab=weights.config["vocab_size"], path=place.path)

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        policy = make_policy(self.segments, self.model.has_gate, gate_dtype=self.gate_dtype, **_policy(sampling))
        stop = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_ids)}
        return {
            "fill": self.fill,
            "dtype": self.dtype,
            "gate_dtype": self.gate_dtype,
            "device": "cpu",
            "segments": self.segments,
            "policy": policy.name,
            "min_depth": policy.low,
            "max_depth": policy.high,
            "stop_token_ids": sorted(stop),
        }

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
        return Score(tuple(result.logprobs), tuple(result.depths), bool(result.greedy), _usage(result))

    def _answer(self, ask: Ask, sampling: Sampling) -> Output:
        result = self._generate(ask, sampling, sampling.max_tokens)
        stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_ids)}
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
