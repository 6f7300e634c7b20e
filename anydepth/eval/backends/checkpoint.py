"""What backends have in common that read a checkpoint's files themselves, and compute on the CPU."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from anydepth.eval.backends.base import SMALL_HIDDEN, Backend
from anydepth.models.load import open_weights, weights_hash
from anydepth.models.locate import Place, locate
from anydepth.models.weights import Weights, all_eos
from anydepth.types import Sampling, unknown


class CheckpointBackend(Backend):
    """Base of such a backend: its `fill`, `dtype` and `gate_dtype`, and the EOS ids of the checkpoint."""

    fill: str
    dtype: str
    gate_dtype: str
    eos_ids: frozenset[int]

    def know(self, what: str, value: str, known: Collection[str]) -> None:
        """ValueError for a setting that this backend has not."""
        if value not in known:
            raise ValueError(f"the {self.name} backend: {unknown(what, value, known)}")

    def open(self, model: str) -> tuple[Place, Weights]:
        """Find the checkpoint and take from it what every backend tells of its model."""
        place = locate(model)
        weights = open_weights(place.path)
        words = weights.tokenizer()
        if words is None:
            raise ValueError(f"model {model} has no tokenizer, which questions need")
        self.tokenizer, self.model_name, self.model_hash = words, model, weights_hash(weights.files)
        self.small = weights.config["hidden_size"] < SMALL_HIDDEN
        self.eos_ids = all_eos(weights, words, vocab=weights.config["vocab_size"], path=place.path)
        return place, weights

    def stop_ids(self, sampling: Sampling) -> set[int]:
        """Ids that end an answer."""
        return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_ids)}

    def told(self, sampling: Sampling, *, policy: str, low: int, high: int) -> dict[str, Any]:
        """`settings` of a Sampling with this policy, within these depths."""
        return {
            "fill": self.fill,
            "signals": "sync",
            "lateness": 0,
            "dtype": self.dtype,
            "gate_dtype": self.gate_dtype,
            "device": "cpu",
            "segments": self.segments,
            "policy": policy,
            "min_depth": low,
            "max_depth": high,
            "stop_token_ids": sorted(self.stop_ids(sampling)),
        }
