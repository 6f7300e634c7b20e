"""The nouns of anydepth, host-only: what a caller asks for and what comes back.

Nothing here imports torch or another module of the package.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

FinishReason = Literal["stop", "length", "abort", "error"]
EXACT_FILLS = ("full", "deferred")  # under which every depth holds what was, or will be, computed for it
C = TypeVar("C")


def unknown(what: str, given: str, known: Iterable[str]) -> ValueError:
    """The error for a name nobody knows, with the nearest known ones (or all of them when none is near)."""
    known = sorted(known)
    near = difflib.get_close_matches(given, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known: {', '.join(known)}"
    return ValueError(f"unknown {what} {given!r}; {hint}")


def strict_options(cls: type[C]) -> type[C]:
    """Class decorator: an unknown keyword of `__init__` is a ValueError that names the nearest known one."""
    init = cls.__init__
    names = [p for p in inspect.signature(init).parameters if p != "self"]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                raise unknown(f"option of {cls.__name__}", name, names)
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


@strict_options
@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one prompt is answered: length, randomness, stopping, and how deep each token thinks.

    Depths count segments, 1..R. `depth=d` means policy `fixed`, `trace=` means `trace`, `interval=n` means `interval`
    (every n-th decode token at full depth, those between at `shallow_depth`), `exit_threshold` below 1 means
    `gate_cdf`; with none of them every token runs all R segments (`never`). `exit_policy="confidence"` and `"probe"`
    take their numbers from the loaded profile named `profile` (None: the only one). `trace` is one depth for every
    output the request may produce, the first of them R. `seed=None` draws a seed, which the Output records.

    Raises ValueError for a value that is wrong whatever the model is; what depends on the model (R, a gate) is
    checked when the request is submitted.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: Literal["raw", "processed"] | None = None
    exit_policy: str | None = None
    exit_threshold: float = 1.0
    min_depth: int = 1
    max_depth: int | None = None
    depth: int | None = None
    interval: int | None = None
    shallow_depth: int | None = None
    trace: Sequence[int] | None = None
    profile: str | None = None
    first_token: Literal["prefill", "policy"] = "prefill"

    def __post_init__(self) -> None:
        set_ = functools.partial(object.__setattr__, self)
        set_("stop", (self.stop,) if isinstance(self.stop, str) else _sequence("stop", self.stop, "strings"))
        set_("stop_token_ids", _sequence("stop_token_ids", self.stop_token_ids, "token ids"))
        if self.trace is not None:
            set_("trace", _sequence("trace", self.trace, "depths"))
        for name in ("max_tokens", "n", "min_depth"):
            _whole(name, getattr(self, name), least=1)
        for name, least in (
            ("top_k", 1),
            ("max_depth", 1),
            ("depth", 1),
            ("interval", 1),
            ("shallow_depth", 1),
            ("seed", 0),
        ):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), least=least)
        if self.seed is not None and self.seed >= 2**64:
            raise ValueError(f"seed is {self.seed}; allowed: 0 .. 2**64 - 1")
        _number("temperature", self.temperature, 0.0, 1e6)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("exit_threshold", self.exit_threshold, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ValueError("top_p is 0; allowed: above 0, up to 1 (1 keeps every token)")
        if self.logprobs not in (None, "raw", "processed"):
            raise ValueError(f"logprobs is {self.logprobs!r}; allowed: None, 'raw', 'processed'")
        if self.exit_policy is not None and not isinstance(self.exit_policy, str):
            raise ValueError(f"exit_policy is {self.exit_policy!r}; allowed: a policy's name, or None")
        if self.profile is not None and self.exit_policy in (None, "never", "fixed", "interval", "gate_cdf", "trace"):
            raise ValueError(
                f"profile is {self.profile!r}, which exit_policy {self.exit_policy!r} does not read; give "
                f"exit_policy='confidence' or 'probe'"
            )
        if self.shallow_depth is not None and self.interval is None:
            raise ValueError(f"shallow_depth is {self.shallow_depth}, but no interval is given; give interval=n too")
        if self.first_token not in ("prefill", "policy"):
            raise ValueError(f"first_token is {self.first_token!r}; allowed: 'prefill', 'policy'")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {text!r}; allowed: non-empty strings")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, least=0)
        for depth in self.trace or ():
            _whole("trace", depth, least=1)


def _sequence(name: str, value: Any, of: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ValueError(f"{name} is {value!r}; allowed: a list of {of}")
    return tuple(value)


def _whole(name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}; allowed: whole numbers from {least}")


def _number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; allowed: numbers from {low:g} to {high:g}")


@dataclass(slots=True)
class Usage:
    """What one answer cost. Segments count one position through one segment."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    decode_tokens: int = 0
    segments_read: int = 0  # sum of readout depths over decode tokens
    segments_executed: int = 0  # decode positions x segments really run
    segments_prefill: int = 0
    segments_wasted: int = 0  # run after a stop or abort was decided

    def __add__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, f) + getattr(other, f) for f in self.__slots__))


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """One finished answer. `token_ids`, `depths` and `logprobs` (when asked for) have equal length and include the
    ending stop id; `text` leaves it and the stop string out and is None for a checkpoint without a tokenizer."""

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    depths: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    usage: Usage
    seed: int
    logprobs: tuple[float, ...] | None = None
    logprobs_mode: Literal["raw", "processed"] | None = None
    prompt_index: int = 0
    answer_index: int = 0
    weight_version: int = 0  # how often the weights had been exchanged when it was made


@dataclass(frozen=True, slots=True)
class Score:
    """Log-likelihood of one continuation under a policy: one raw logprob and one readout depth a continuation token;
    `argmax` says of each token whether it was the most likely one, `greedy` whether all were."""

    logprobs: tuple[float, ...]
    depths: tuple[int, ...]
    argmax: tuple[bool, ...]
    usage: Usage

    @property
    def greedy(self) -> bool:
        return all(self.argmax)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One generated token as it arrives. `text` is what became certain with it: empty while a character or a stop
    string is incomplete, None without a tokenizer. An answer's last chunk carries `finish_reason` and the `output`;
    an abort makes a chunk without a token. `score` is set where a scored continuation ends."""

    text: str | None
    token_id: int | None
    depth: int | None
    logprob: float | None = None
    finish_reason: FinishReason | None = None
    request_id: str = ""
    output: Output | None = None
    score: Score | None = None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the engine must know of a model. Planes and segments have the same number: one plane of K/V a segment.

    `segment_layers[k - 1]` are the layer indices of segment k. With `shared_weights` (a looped model) they are the
    same for every k, and one call of `segment` may carry rows of different k.
    """

    segments: int
    segment_layers: tuple[range, ...]
    shared_weights: bool
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    has_gate: bool
    headed: frozenset[int] = frozenset()  # segments after which there is an exit head,
    probed: frozenset[int] = frozenset()  # and those after which there is a probe

    @property
    def layers(self) -> int:
        """Number of distinct layers, each with K/V of its own."""
        return max(layers.stop for layers in self.segment_layers)


class Policy(Protocol):
    """What the host asks of an exit policy; `exits.base.Policy` has the tensor side."""

    name: ClassVar[str]
    everywhere: ClassVar[bool]

    def asks(self, sampling: Sampling, bounds: tuple[int, int], depth: int) -> bool:
        """Whether a row at this depth is to be asked, where it is not asked `everywhere`."""

    def planned(self, sampling: Sampling, index: int, segments: int) -> int | None:
        """Readout depth of output `index`, None when it is decided on the way."""


class TextStream(Protocol):
    """Ids to text, as they come; `engine.text` has it."""

    stopped: bool  # a stop string has appeared
    text: str  # everything delivered so far

    def push(self, token: int) -> str:
        """The text that became certain with this token."""

    def end(self) -> str:
        """The text that was held back."""


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """One answer to be made: token ids in, and everything the engine needs to know of it, resolved and checked.

    `bounds` is (min_depth, max_depth). `max_tokens` is capped by the model's length. `forced` holds continuations to be
    scored instead of sampled, teacher-forced one after the other from the same prefilled prompt.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    policy: Policy
    bounds: tuple[int, int]
    stop_ids: frozenset[int]
    seed: int
    max_tokens: int
    text: TextStream | None = None
    forced: tuple[tuple[int, ...], ...] = ()
    priority: int = 0  # higher ones go first, and lower ones give way to them
    prompt_index: int = 0
    answer_index: int = 0
    weight_version: int = 0  # of the weights that were there when it was submitted, and stay until it has ended
    submitted: bool = False  # a Request is used once: its text has been spoken then
