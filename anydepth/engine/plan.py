"""The nouns of a turn, host-only: a request under way, what one turn runs of it, and what came of that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from anydepth.types import Request, Usage


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in a slot, and how far it has come. The scheduler writes it, the runner reads it.

    `depth` is the segment it runs next; `chunk` the prompt positions in flight (0: none). `prefill_end` is where
    prefill stops: the whole prompt, or all but its last token when that one is a decode row. `planned` is the readout
    depth of the next output, None when the policy decides on the way.
    """

    request: Request
    slot: int
    pages: tuple[int, ...]
    prefill_end: int
    prefilled: int = 0
    chunk: int = 0
    depth: int = 1
    planned: int | None = None
    ready_since: int = 0
    scored: int = 0  # continuations finished
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    greedy: bool = True
    usage: Usage = field(default_factory=Usage)

    @property
    def prefilling(self) -> bool:
        return self.prefilled < self.prefill_end

    @property
    def position(self) -> int:
        """Position of the token a decode row carries: the prompt's last one at first, then each output's."""
        return self.prefill_end + len(self.token_ids) - (self.prefill_end == len(self.request.prompt_ids))

    @property
    def logprobs_mode(self) -> Literal["raw", "processed"] | None:
        """What its logprobs are: greedy reports raw ones either way."""
        sampling = self.request.sampling
        return "raw" if sampling.logprobs and sampling.temperature == 0 else sampling.logprobs

    @property
    def reports_logprob(self) -> bool:
        return bool(self.request.forced) or self.request.sampling.logprobs is not None

    @property
    def target(self) -> tuple[int, ...] | None:
        """The continuation being scored, None when tokens are sampled."""
        return self.request.forced[self.scored] if self.request.forced else None


class Row(NamedTuple):
    """One sequence's part of a turn: `length` positions from `start`, through segment `depth`.

    `read` is the planned readout depth of a decode row (None: the policy decides); a prefill row has `prefill` set, and
    `last` where its readout gives the first token.
    """

    sequence: Sequence
    slot: int
    depth: int
    start: int
    length: int
    read: int | None
    prefill: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What one turn runs: decode rows first, then prefill rows, and the sequences that take a slot with it."""

    segment: int  # of a layered model; with shared weights every row has its own depth
    rows: tuple[Row, ...]
    decode_rows: int
    admitted: tuple[Sequence, ...]


class TurnWork(NamedTuple):
    """Rows that went through each part of the model in one turn, so that a bound is a sum over turns.

    `attended` is the sum of contexts over rows (each multiplies), `kv_read` the positions whose K/V had to be read (a
    prefill chunk's rows share theirs). `copies` lists the depths that were copied from, one a row.
    """

    segment: int
    decode_rows: int
    prefill_rows: int
    attended: int
    kv_read: int
    signal_rows: int
    readout_rows: int
    copies: tuple[int, ...]


class Read(NamedTuple):
    """A row that left: its token, readout depth, the token's logprob if wanted, whether it was the argmax."""

    row: int
    token_id: int
    depth: int
    logprob: float | None
    greedy: bool


@dataclass(frozen=True, slots=True)
class Result:
    """What the runner reports of a plan: the rows that left (all others go one segment deeper), and the work done."""

    reads: tuple[Read, ...]
    work: TurnWork
