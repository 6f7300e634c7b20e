"""Open-loop load: a recorded trace of arrivals, fitted to a model and replayed in its own rhythm.

A trace is JSONL, one request a line: `id`, `arrival_s`, `prompt_tokens`, `output_tokens`, as of the Azure LLM inference
traces (2023, CC BY 4.0). It has no texts: prompts of the recorded lengths are made up, or cut from given ones.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anydepth.bench.drive import Clock, Quantiles, open_loop, quantiles, settle_on
from anydepth.bench.memory import Peak, watch_peak
from anydepth.bench.throughput import PAGE_SIZE, Cell, matched_requests
from anydepth.engine.engine import Engine
from anydepth.engine.sizes import default_pages
from anydepth.models.base import Model
from anydepth.ops.fill import load_fill
from anydepth.types import Output


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request of a trace."""

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Requests in order of arrival, and the file they are from."""

    name: str
    sha256: str
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, kw_only=True)
class Load:
    """A trace as it is replayed: the first arrival at 0, times in wall seconds, lengths that fit the model.

    `rate_scale` is trace seconds a wall second, `clipped` the number of requests that were shortened; `facts` has sums
    before and after.
    """

    trace: Trace
    arrivals: tuple[Arrival, ...]
    rate_scale: float
    clipped: int

    @property
    def span_s(self) -> float:
        """Wall seconds from the first arrival to the last."""
        return self.arrivals[-1].arrival_s

    @property
    def offered_requests_per_s(self) -> float | None:
        """None where all arrive at once."""
        return (len(self.arrivals) - 1) / self.span_s if self.span_s else None

    def facts(self) -> dict[str, Any]:
        """What a Record says of it: where it is from, and what scaling and clipping changed."""
        before, after = self.trace.arrivals, self.arrivals
        return {
            "trace": self.trace.name,
            "trace_sha256": self.trace.sha256,
            "first_id": before[0].id,
            "requests": len(after),
            "rate_scale": self.rate_scale,
            "span_s_recorded": before[-1].arrival_s - before[0].arrival_s,
            "span_s": self.span_s,
            "offered_requests_per_s": self.offered_requests_per_s,
            "prompt_tokens_recorded": sum(a.prompt_tokens for a in before),
            "prompt_tokens": sum(a.prompt_tokens for a in after),
            "output_tokens_recorded": sum(a.output_tokens for a in before),
            "output_tokens": sum(a.output_tokens for a in after),
            "requests_clipped": self.clipped,
        }


@dataclass(frozen=True, kw_only=True)
class OpenTiming:
    """One replay. Latencies count from a request's arrival, its time in the queue included.

    drain_s: from the last arrival to the last token. kept_up: that took no longer than the slowest request of the first
    half did from its arrival, so the queue did not grow from half to half; None where all arrive at once. most_waiting:
    the longest queue of requests without a slot.
    """

    duration_s: float
    tokens: int
    outputs: tuple[Output, ...]
    first_token_s: Quantiles
    inter_token_s: Quantiles | None
    end_to_end_s: Quantiles
    most_waiting: int
    drain_s: float
    kept_up: bool | None
    memory: Peak
    pages_peak: int


def read_trace(path: str | Path, *, limit: int | None = None, window_s: tuple[float, float] | None = None) -> Trace:
    """The requests of a JSONL file in order of arrival: those that arrive in [from, to) of `window_s`, the first
    `limit` of them.

    Raises ValueError naming file and line for what is no such request, and for a choice that leaves none.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give a JSONL file of arrivals") from error
    low, high = window_s or (0.0, float("inf"))
    arrivals = sorted(_parse(content, path), key=lambda arrival: arrival.arrival_s)
    chosen = [arrival for arrival in arrivals if low <= arrival.arrival_s < high][:limit]
    if not chosen or (limit is not None and limit < 1):
        raise ValueError(
            f"{path}: limit {limit} and window_s {window_s} choose none of its {len(arrivals)} requests; "
            f"give a limit from 1 and a window within its times"
        )
    return Trace(name=path.name, sha256=hashlib.sha256(content).hexdigest(), arrivals=tuple(chosen))


def _parse(content: bytes, path: Path) -> Iterator[Arrival]:
    for number, line in enumerate(content.splitlines(), 1):
        try:
            row = json.loads(line)
            given = [row[name] for name in ("id", "arrival_s", "prompt_tokens", "output_tokens")]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is no request ({error!r}); a line is an object with id, "
                f"arrival_s, prompt_tokens and output_tokens"
            ) from error
        id, arrival_s, *lengths = given
        if not isinstance(id, str):
            raise ValueError(f"{path}, line {number}: id is {id!r}; allowed: a string")
        if isinstance(arrival_s, bool) or not isinstance(arrival_s, int | float) or not 0 <= arrival_s < float("inf"):
            raise ValueError(f"{path}, line {number}: arrival_s is {arrival_s!r}; allowed: seconds from 0")
        for name, length in zip(("prompt_tokens", "output_tokens"), lengths, strict=True):
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise ValueError(f"{path}, line {number}: {name} is {length!r}; allowed: whole numbers from 1")
        yield Arrival(id=id, arrival_s=float(arrival_s), prompt_tokens=lengths[0], output_tokens=lengths[1])


def fit(
    trace: Trace,
    *,
    max_positions: int,
    rate_scale: float | None = None,
    requests_per_s: float | None = None,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
) -> Load:
    """The trace as a model of `max_positions` can be asked it.

    An output is cut to half the model's length, a prompt to what is left beside its output; `max_prompt_tokens` and
    `max_output_tokens` cut further. Time runs `rate_scale` times as fast (2: twice the rate; default 1), or so fast
    that `requests_per_s` arrive on average. With max_positions 256, 374 and 44 tokens become 213 and 44: the last
    output token takes no position.

    Raises ValueError for numbers not above 0, and for both rates at once.
    """
    for name, value in (
        ("rate_scale", rate_scale),
        ("requests_per_s", requests_per_s),
        ("max_prompt_tokens", max_prompt_tokens),
        ("max_output_tokens", max_output_tokens),
    ):
        whole = name.endswith("tokens")
        if value is not None and (not 0 < value < float("inf") or (whole and value != int(value))):
            raise ValueError(f"{name} is {value!r}; allowed: {'whole numbers from 1' if whole else 'numbers above 0'}")
    if rate_scale is not None and requests_per_s is not None:
        raise ValueError("rate_scale and requests_per_s are both given; give one of them")
    first = trace.arrivals[0].arrival_s
    span_s = trace.arrivals[-1].arrival_s - first
    if requests_per_s is not None:
        if not span_s:
            raise ValueError(f"requests_per_s is given, but the {len(trace.arrivals)} requests arrive at once")
        rate_scale = requests_per_s * span_s / (len(trace.arrivals) - 1)
    scale = 1.0 if rate_scale is None else float(rate_scale)
    fitted = []
    for arrival in trace.arrivals:
        output = min(arrival.output_tokens, max_positions // 2, max_output_tokens or max_positions)
        prompt = min(arrival.prompt_tokens, max_positions - output + 1, max_prompt_tokens or max_positions)
        at = (arrival.arrival_s - first) / scale
        fitted.append(replace(arrival, arrival_s=at, prompt_tokens=prompt, output_tokens=output))
    clipped = sum(_lengths(a) != _lengths(b) for a, b in zip(trace.arrivals, fitted, strict=True))
    return Load(trace=trace, arrivals=tuple(fitted), rate_scale=scale, clipped=clipped)


def _lengths(arrival: Arrival) -> tuple[int, int]:
    return arrival.prompt_tokens, arrival.output_tokens


def load_prompts(
    load: Load, *, vocab: int, seed: int = 0, prompts: Sequence[Sequence[int]] = ()
) -> list[tuple[int, ...]]:
    """Token ids of each request's prompt, as long as the load says: request i is given prompts i, i + 1, ... one after
    the other (and from the first again), cut to its length; without prompts, ids drawn evenly from the vocabulary."""
    assert all(prompts)
    draw = random.Random(seed)
    made = []
    for index, arrival in enumerate(load.arrivals):
        if prompts:
            turned = itertools.chain(prompts[index % len(prompts) :], itertools.cycle(prompts))
            ids: Iterator[int] = itertools.chain.from_iterable(turned)
        else:
            ids = (draw.randrange(vocab) for _ in itertools.count())
        made.append(tuple(itertools.islice(ids, arrival.prompt_tokens)))
    return made


def replay(
    model: Model,
    cell: Cell,
    load: Load,
    prompts: Sequence[Sequence[int]],
    *,
    max_batch: int = 32,
    seed: int = 0,
    clock: Clock = Clock(),  # noqa: B008 - immutable
) -> OpenTiming:
    """One run of one cell over the load in a fresh engine of `max_batch` slots; takes the load's time at least."""
    peak = watch_peak(model.device)
    engine = Engine(
        model, **cell.options, max_batch=max_batch, page_size=PAGE_SIZE, kv_pages=_pages(model, cell, load, max_batch)
    )
    requests = matched_requests(engine, cell, prompts, [a.output_tokens for a in load.arrivals], seed=seed)
    due_s = [arrival.arrival_s for arrival in load.arrivals]
    seen = open_loop(engine, requests, due_s, settle=settle_on(model.device), clock=clock)
    drain_s, end_to_end_s = seen.duration_s - load.span_s, seen.end_to_end_s()
    slowest_s = max(end_to_end_s[: (len(end_to_end_s) + 1) // 2])
    first, end = quantiles(seen.first_token_s()), quantiles(end_to_end_s)
    assert first is not None and end is not None
    return OpenTiming(
        duration_s=seen.duration_s,
        tokens=sum(seen.turn_tokens),
        outputs=tuple(seen.outputs[request.id] for request in requests),
        first_token_s=first,
        inter_token_s=quantiles(seen.inter_token_s()),
        end_to_end_s=end,
        most_waiting=seen.most_waiting,
        drain_s=drain_s,
        kept_up=drain_s <= slowest_s if load.span_s else None,
        memory=peak(),
        pages_peak=engine.stats()["pages_peak"],
    )


def _pages(model: Model, cell: Cell, load: Load, max_batch: int) -> int:
    """The engine's own pool, and room for the longest request at least."""
    planes = load_fill(cell.fill, model.shape).planes(model.shape)
    longest = max(a.prompt_tokens + a.output_tokens for a in load.arrivals) // PAGE_SIZE + 1
    return max(longest, default_pages(model, planes, max_batch, PAGE_SIZE))
