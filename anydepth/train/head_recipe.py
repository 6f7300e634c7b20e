"""What a training of exit heads is made of, in one frozen object."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from anydepth.models.heads import KINDS
from anydepth.types import unknown

SAVED = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """Hyperparameters. exits: layers after which heads read. kinds, weights: one for all exits, or one each; as the
    exits' heads share nothing, weights matter through the common clipping only. `lr`, `probe_lr`: the largest of heads
    and probes, after the warm-up and before the cosine. `fit`: micro-batches from which heads and probes' scales are
    begun (0: one, and heads begin as the model's own readout). A step is `accumulate` micro-batches of at most `tokens`
    tokens, over all processes together. `save_dtype`: of the numbers in heads.safetensors, float16 for half the
    bytes."""

    exits: tuple[int, ...]
    kinds: tuple[str, ...] = ("low_rank",)
    rank: int = 64
    shortlist: int = 4096
    temperature: float = 1.0
    ce_weight: float = 0.0
    weights: tuple[float, ...] = (1.0,)
    mask_prompts: bool = True
    fit: int = 16
    tokens: int = 1024
    accumulate: int = 1
    steps: int = 1000
    lr: float = 1e-4
    probe_lr: float = 1e-3
    warmup: int = 50
    clip: float = 1.0
    evaluate_every: int = 100
    evaluate_documents: int = 64
    save_every: int = 50
    save_dtype: str = "float32"
    seed: int = 0

    def as_json(self) -> dict[str, Any]:
        """Plain values, as a training state and heads.json store them."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def checked(self, layers: int, vocab: int) -> HeadRecipe:
        """With a kind and a weight for every exit. ValueError for what a model of so many layers cannot have."""
        if not self.exits or any(not 1 <= e < layers for e in self.exits) or len(set(self.exits)) < len(self.exits):
            raise ValueError(
                f"exits after layers {list(self.exits)}; allowed: different ones from 1 to {layers - 1}, the model's "
                f"inner layers"
            )
        each = {"kinds": self.kinds, "weights": self.weights}
        for name, given in each.items():
            if len(given) not in (1, len(self.exits)):
                raise ValueError(f"{len(given)} {name} for {len(self.exits)} exits; give one, or one an exit")
        if strange := [kind for kind in self.kinds if kind not in KINDS]:
            raise ValueError(f"heads of kind {strange[0]!r}; allowed: {', '.join(KINDS)}")
        for name, least in _LEAST.items():
            if not (value := getattr(self, name)) >= least or not math.isfinite(value):
                raise ValueError(f"{name} is {value}; allowed: numbers from {least}")
        if self.temperature == 0 or any(not (w >= 0 and math.isfinite(w)) for w in self.weights):
            raise ValueError(f"temperature {self.temperature}, weights {self.weights}; allowed: above 0, and from 0")
        if self.save_dtype not in SAVED:
            raise unknown("save_dtype", self.save_dtype, SAVED)
        if "shortlist" in self.kinds and self.shortlist >= vocab:  # "any other" would be none
            raise ValueError(
                f"a shortlist of {self.shortlist} tokens; the vocabulary has {vocab}: give fewer, or heads of another "
                f"kind"
            )
        whole = {name: given * (len(self.exits) // len(given)) for name, given in each.items()}
        order = sorted(range(len(self.exits)), key=lambda e: self.exits[e])
        chosen: dict[str, Any] = {name: tuple(given[e] for e in order) for name, given in whole.items()}
        return replace(self, exits=tuple(sorted(self.exits)), **chosen)


_LEAST: Mapping[str, float] = {
    **dict.fromkeys(("rank", "shortlist", "tokens", "accumulate", "steps", "evaluate_every", "save_every"), 1),
    **dict.fromkeys(("evaluate_documents",), 1),
    **dict.fromkeys(("temperature", "ce_weight", "lr", "probe_lr", "warmup", "clip", "fit"), 0),
}


def exits_of(text: str, layers: int) -> tuple[int, ...]:
    """Exit layers of a model: exits_of("5", 30) == (5, 10, 15, 20, 25); "5,12" and "5," name them. ValueError for text
    that is neither."""
    try:
        named = tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        named = ()
    if "," not in text and named and 1 <= named[0] < layers:
        return tuple(range(named[0], layers, named[0]))
    if not named:
        raise ValueError(f"exits {text!r}; allowed: a number (every so many layers) or a list such as 5,10,15")
    return named


def weights_of(text: str) -> tuple[float, ...]:
    """ "1,0.5" as numbers."""
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise ValueError(f"weights {text!r}; allowed: a number, or one an exit, such as 1,1,0.5") from error
