"""An opened checkpoint whose tensor data has not been read, and what is checked of it before that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from anydepth.models.tokenizer import Tokenizer

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Weights(Protocol):
    """An opened checkpoint whose tensor data has not been read: `SafetensorsFolder`, `GGUFFile`."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    files: tuple[Path, ...]
    shapes: dict[str, tuple[int, ...]]
    stored_dtype: str

    def rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of a tensor, in order; a piece is valid until the next one is asked for."""

    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's own, None where it has none."""


def check_sizes(weights: Weights, *, path: Path) -> None:
    """ValueError for sizes so absurd that building the model would exhaust the machine before its shapes are known."""
    for key, most in (
        ("num_hidden_layers", len(weights.shapes)),
        ("max_position_embeddings", 1 << 21),
        ("total_ut_steps", 1 << 10),
    ):
        value = weights.config.get(key, 0)
        if isinstance(value, int) and value > most:
            raise ValueError(
                f"{path}: config says {key} = {value}; allowed: up to {most} here. The config belongs to "
                f"other weights or is corrupt"
            )


def check_vocabulary(words: Tokenizer | None, *, vocab: int, path: Path) -> None:
    """ValueError where the tokenizer knows ids that the model does not embed. Fewer are fine: embeddings are padded."""
    if words and words.vocab_size > vocab:
        raise ValueError(
            f"{path}: the tokenizer has {words.vocab_size} ids, but the model embeds {vocab}; it belongs "
            f"to another model, give the right one as tokenizer="
        )


def all_eos(weights: Weights, words: Tokenizer | None, *, vocab: int, path: Path) -> frozenset[int]:
    """EOS ids of config, generation config and tokenizer together, each checked against the model's vocabulary."""
    ids: set[int] = set()
    for source, value in (
        ("config", weights.config.get("eos_token_id")),
        ("generation config", weights.generation_config.get("eos_token_id")),
        ("tokenizer", sorted(words.eos_ids) if words else None),
    ):
        for item in value if isinstance(value, Iterable) and not isinstance(value, str) else [value]:
            if item is None:
                continue
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab:
                raise ValueError(
                    f"{path}: eos id of the {source} is {item!r}; allowed: whole numbers from 0 to "
                    f"{vocab - 1}, the model's vocabulary"
                )
            ids.add(item)
    return frozenset(ids)


@dataclass(frozen=True)
class Wanted:
    """How a refusal speaks of the tensors that are wanted: who asks for them, and what to do about each fault."""

    asks: str
    lacks: str
    extra: str
    shape: str


BY_CONFIG = Wanted(
    "its config",
    "its config belongs to other weights, or a part of them is missing",
    "check model_type and the layer count in its config",
    "config and weights belong to different models",
)
BY_MODEL = Wanted(
    "the model",
    "give all of its weights",
    "give the released names, as model.slots() has them",
    "give weights of this model",
)


def shapes_of(slots: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(slot.shape) for name, slot in slots.items()}


def check_names(
    given: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    *,
    source: str | Path,
    by: Wanted = BY_CONFIG,
) -> None:
    """ValueError unless `source` gives exactly the expected tensors, each of the right shape. An LM head may be there
    where it is tied to the embedding, that is, where it is not expected."""
    allowed = {HEAD: expected[EMBEDDING]} if HEAD not in expected and EMBEDDING in expected else {}
    if missing := [name for name in expected if name not in given]:
        advice = "does config.json lack tie_word_embeddings: true?" if missing == [HEAD] else by.lacks
        raise ValueError(f"{source} lacks {listed(missing)} that {by.asks} asks for; {advice}")
    if extra := [name for name in given if name not in {*expected, *allowed} and not harmless(name)]:
        raise ValueError(f"{source} has {listed(extra)} that {by.asks} does not ask for; {by.extra}")
    for name, shape in {**expected, **allowed}.items():
        if name in given and given[name] != shape:
            raise ValueError(
                f"{source}: tensor {name} has the shape {list(given[name])}, {by.asks} asks for {list(shape)}; "
                f"{by.shape}"
            )


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{len(names)} tensor{'s' * (len(names) > 1)} ({', '.join(names[:4])}{more})"


def harmless(name: str) -> bool:
    """Whether a tensor that the model does not have may be passed over: rotary buffers, which the config implies."""
    return name.endswith(("rotary_emb.inv_freq", "rotary_emb.original_inv_freq"))
