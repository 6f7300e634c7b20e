"""The contract of a backend: what answers the questions of an arm. Imports no torch.

The same token ids go into every backend and token ids come out, so that arms differ in nothing but what they name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from anydepth.types import Output, Sampling, Score

if TYPE_CHECKING:
    from anydepth.models.tokenizer import Tokenizer


SMALL_HIDDEN = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """An answer that is still to be made: to be generated, or, with `continuations`, to be scored.

    key: (question id, answer index). seed: of this answer alone.
    """

    key: tuple[str, int]
    prompt_ids: tuple[int, ...]
    seed: int
    continuations: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What became of an Ask: a generated Output or one Score a continuation. seconds: from its beginning on. tallies:
    what its exit policy counts of itself, such as the rows that one test alone kept (`anydepth.exits.confidence`)."""

    ask: Ask
    seconds: float
    output: Output | None = None
    scores: tuple[Score, ...] = ()
    tallies: Mapping[str, int] = field(default_factory=dict)


class Backend(ABC):
    """Base of all backends. `max_positions` caps prompt and answer; `segments` is R; `small`: matrices so small that a
    second thread only costs."""

    name: ClassVar[str]
    model_name: str
    model_hash: str
    tokenizer: Tokenizer
    max_positions: int
    segments: int
    small: bool
    head_hash: str | None = None  # of exit heads through which the model is read

    @abstractmethod
    def settings(self, sampling: Sampling) -> dict[str, Any]:
        """Every setting in force beside the Sampling's own, by the names of arms.toml: policy, min_depth, max_depth,
        stop_token_ids, fill, dtype and so on. Raises ValueError for a Sampling that the backend cannot honour."""

    @abstractmethod
    def replies(self, asks: Sequence[Ask], sampling: Sampling, *, concurrency: int) -> Iterator[Reply]:
        """Every reply as it is finished, in any order, up to `concurrency` of them under way at a time. An Ask's own
        seed stands for the Sampling's."""
