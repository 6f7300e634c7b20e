"""The nouns of a turn, host-only: a request under way, what one turn runs of it, and what came of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from anydepth.types import Request, Usage


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and how far it has come. The scheduler writes it, the runner reads it. Results that come late name the
    Sequence they belong to: each submitted request has one of its own, whatever its id.

    Without a slot (-1) it waits: `stored` pages of its K/V are then in host memory, with everything else the runner
    knew of it (`saved`; None for one that never ran). `pages` are in the order of positions, and of their positions the
    first `shared` were prefilled by another request. `first_position` is that of the row that gives the first output.

    `depth` is the segment it runs next; `chunk` the prompt positions in flight (0: none). `prefill_end` is where
    prefill stops: the whole prompt, or all but its last token when that one is a decode row. `issued` counts outputs
    that have left the model. `planned` is the readout depth of the next one, None when the policy decides on the way.
    `in_flight` counts positions in turns whose outcome the host has not seen, `ahead` the tokens they may give.
    `caught_up`, `catching_up` and `deepest` are `Deferral`'s.
    """

    request: Request
    prefill_end: int
    first_position: int = 0
    order: int = 0  # of arrival
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    shared: int = 0
    stored: int = 0
    saved: Any = None
    overtaken: int = 0  # admissions of later requests while it waited for pages
    prefilled: int = 0
    chunk: int = 0
    depth: int = 1
    planned: int | None = None
    answered: int = 0  # late signals: depth up to which the policy's answers are known
    leaves_at: int | None = None  # late signals: depth at which the policy said to leave
    ready_since: int = 0
    in_flight: int = 0
    ahead: int = 0  # resident signals only
    caught_up: list[int] = field(default_factory=list)  # positions that have been through segment 1, 2, ..
    catching_up: int = 0  # the segment that waiting positions run before the next token begins; 0: none
    deepest: int = 0  # that any token of it may need
    issued: int = 0
    scored: int = 0  # continuations finished
    token_ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    argmax: list[bool] = field(default_factory=list)  # of scored tokens
    usage: Usage = field(default_factory=Usage)

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the higher priority, then the earlier arrival."""
        return -self.request.priority, self.order

    @property
    def prefilling(self) -> bool:
        return self.prefilled < self.prefill_end

    @property
    def position(self) -> int:
        """Position of the token a decode row carries: the prompt's last one at first, then each output's."""
        return self.first_position + self.issued

    @property
    def segment(self) -> int:
        """The segment its next row runs."""
        return self.catching_up or self.depth

    @property
    def awaited(self) -> bool:
        """Whether an outcome of it is on its way to the host."""
        return self.in_flight > 0 or self.issued > len(self.token_ids)

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

    A decode row is one position, that of the token to be read, at its end; before it may stand others that have yet to
    run that segment (`Deferral`). `read` is the token's planned readout depth (None: the policy decides; 0: the row
    does not come as far as the token). A prefill row has `prefill` set, and `last` where its readout gives the first
    token.
    """

    sequence: Sequence
    slot: int
    depth: int
    start: int
    length: int
    read: int | None
    prefill: bool
    last: bool


class Seat(NamedTuple):
    """A sequence takes a slot and pages, with what was saved of it, if anything was."""

    sequence: Sequence
    slot: int
    pages: tuple[int, ...]


class Save(NamedTuple):
    """A sequence gives up slot and pages; what they hold of it goes to host memory."""

    sequence: Sequence
    slot: int
    pages: tuple[int, ...]


class Grow(NamedTuple):
    """A slot gets `pages` as its pages from the `at`-th on."""

    slot: int
    at: int
    pages: tuple[int, ...]


class Copy(NamedTuple):
    """Page `target` gets what stands in page `source`, which others go on reading."""

    source: int
    target: int


Move = Seat | Save | Grow | Copy


class Leave(NamedTuple):
    """A row that leaves as a turn begins, for its `output`-th token, at `position`. `depth` is where it is read (None:
    only the runner knows); `kept` says that it is read from the state kept for it, not from its latest one."""

    sequence: Sequence
    slot: int
    output: int
    position: int
    depth: int | None
    kept: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What one turn runs: moves of slots and pages in order, rows that leave before it (late signals only), then
    decode rows (those of equal length together, then those alone of their length), then prefill rows."""

    segment: int  # of a layered model; with shared weights every row has its own depth
    rows: tuple[Row, ...]
    decode_rows: int
    moves: tuple[Move, ...] = ()
    leaving: tuple[Leave, ...] = ()

    @property
    def decode_positions(self) -> int:
        return sum(row.length for row in self.rows[: self.decode_rows])


class TurnWork(NamedTuple):
    """Positions that went through each part of the model in one turn, so that a bound is a sum over turns.

    `attended` is the sum of contexts over positions (each multiplies), `kv_read` the positions whose K/V had to be read
    (those of one row share theirs). `copies` lists the depths that were copied from, one a row. `made` has (part,
    depth, rows) of all signals and logits that were computed, for policies and for tokens, and of the rows whose head
    was asked whether it answers; None: `signal_rows` and `readout_rows` of them, at `segment`.
    """

    segment: int
    decode_rows: int
    prefill_rows: int
    attended: int
    kv_read: int
    signal_rows: int
    readout_rows: int
    copies: tuple[int, ...]
    made: tuple[tuple[str, int, int], ...] | None = None


class Read(NamedTuple):
    """What came of a row that left: its token, readout depth, the token's logprob if wanted, whether it was the
    argmax."""

    token_id: int
    depth: int
    logprob: float | None
    greedy: bool


@dataclass(frozen=True, slots=True)
class Result:
    """What the synchronous runner reports of a plan: rows that left, by their index (all others go one segment
    deeper), and the work done."""

    reads: Mapping[int, Read]
    work: TurnWork


# What the host learns late of one sequence's part of a turn: (sequence, the token with which it left as the turn began,
# its row of the plan, whether its policy says that it leaves at that row's depth); None for what there is not. A plain
# tuple: there is one a row a turn, and making a NamedTuple takes five times as long.
Outcome = tuple[Sequence, Read | None, Row | None, bool | None]


@dataclass(frozen=True, slots=True)
class LateResult:
    """What a late runner reports: the work of this plan, and outcomes of this or earlier ones that have arrived."""

    outcomes: Iterable[Outcome]
    work: TurnWork
