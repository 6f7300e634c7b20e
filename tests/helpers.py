"""Small random models in both houses, the engine's and the reference's, and ways to run requests and look inside."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from anydepth.engine.engine import Engine
from anydepth.models.llama import Llama
from anydepth.models.ouro import Ouro
from anydepth.reference.generate import Result, generate, score
from anydepth.reference.model import Model as Reference
from anydepth.reference.weights import random_weights, tiny_config
from anydepth.types import Chunk, Output, Request, Sampling, Score
from tests.equality import Verdict, compare

GENTLE = 0.3  # of the norm behind each branch
Ask = tuple[Sequence[int], Mapping[str, Any]]  # a prompt and its sampling settings, which both houses understand


def twins(
    kind: str = "looped",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    segments: Sequence[int] | None = None,
    gentle: bool = False,
    **changes: Any,
) -> tuple[Any, Reference]:
    """The same random model twice: anydepth's, and the independent reference's. The layers of a `gentle` looped model
    move the state less: float32's rounding errors then stay small from loop to loop, and under `shared` from position
    to position."""
    config = tiny_config(kind, **changes)
    weights = random_weights(config, seed=seed, dtype=dtype)
    for name in weights:
        if gentle and name.endswith("layernorm_2.weight"):
            weights[name] *= GENTLE
    build = Ouro if kind == "looped" else Llama
    model = build(config, dtype=dtype, device=torch.device("cpu"), segments=segments)
    slots = model.slots()
    assert slots.keys() == weights.keys()
    for name, slot in slots.items():
        slot.copy_(weights[name])
    return model, Reference(config, weights, segments=segments)


def poison(engine: Engine) -> Engine:
    """Fill every page with NaN when a slot gets it after it was handed out, so that nothing may be read that was not
    written. A page that is shared keeps what it holds."""
    pages, slots, fresh = engine.pages, engine.slots, set()
    take, give = pages.take, slots.map.give

    def taken(count):
        got = take(count)
        fresh.update(got)
        return got

    def given(slot, at, pages):
        new = [page for page in pages if page in fresh]
        if new:
            slots.pool.data[:, :, slots.map.storage(new)] = float("nan")
            fresh.difference_update(new)
        give(slot, at, pages)

    pages.take, slots.map.give = taken, given
    return engine


def planes_of(engine: Engine, pages: Sequence[int], positions: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of the first positions' K and V, [layers, positions, K, C] each, one pair a plane."""
    shape, pool = engine.model.shape, engine.slots.pool
    storage = engine.slots.map.storage(pages).view(pool.planes, -1)[:, :positions]
    planes = []
    for k in range(1, (pool.planes if shape.shared_weights else shape.segments) + 1):
        data = pool.data[list(shape.segment_layers[k - 1])]
        data = data.index_select(2, storage[k - 1 if shape.shared_weights else 0])
        data = data.view(*data.shape[:3], shape.kv_heads, shape.head_dim)
        planes.append((data[:, 0], data[:, 1]))
    return planes


class Watch:
    """Keeps what only an engine's inside shows: every output's logits, and the planes as an answer (or a scored
    continuation) ends."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.logits: dict[Request, list[torch.Tensor]] = defaultdict(list)
        self.planes: dict[Request, list[Any]] = defaultdict(list)
        self.shared: dict[Request, int] = {}  # prompt positions that another request had prefilled
        self._choose, self._update = engine.slots.sampler.choose, engine.scheduler.update
        engine.slots.sampler.choose, engine.scheduler.update = self._chosen, self._updated

    def _chosen(self, draws, logits):
        for draw, row in zip(draws, logits, strict=True):
            self.logits[draw.sequence.request].append(row.clone())
        return self._choose(draws, logits)

    def _updated(self, plan, result):
        known = dict(self.engine.scheduler.sequences)
        pages = {id: list(sequence.pages) for id, sequence in known.items()}
        chunks = self._update(plan, result)
        self.shared.update((sequence.request, sequence.shared) for sequence in known.values())
        for chunk in chunks:
            if (chunk.output or chunk.score) and pages[chunk.request_id]:
                sequence = known[chunk.request_id]
                request = sequence.request
                outputs = request.forced[sequence.scored - 1] if request.forced else sequence.token_ids
                positions = len(request.prompt_ids) + len(outputs) - 1
                self.planes[request].append(planes_of(self.engine, pages[request.id], positions))
        return chunks

    def of(self, id: str) -> list[torch.Tensor]:
        """Logits of the latest request of that id."""
        return [logits for request, logits in self.logits.items() if request.id == id][-1]

    def answer(self, request: Request, output: Output) -> SimpleNamespace:
        """An output with what was seen of it, for `compare`. An aborted one has no ending to compare."""
        names = ["token_ids", "depths", "logprobs", "logprobs_mode", "prompt_ids"]
        if output.finish_reason != "abort":
            names += ["finish_reason", "usage"]
        seen = {name: getattr(output, name) for name in names}
        if "usage" in seen:  # a lone run prefills its whole prompt itself
            prefilled = seen["usage"].segments_prefill + self.shared[request] * self.engine.scheduler.segments
            seen["usage"] = replace(seen["usage"], segments_prefill=prefilled)
        planes = self.planes[request]
        # The turn of `resident` is one function, into which nobody looks: its logprobs stand for its logits.
        logits = None if self.engine.mode.name == "resident" else self.logits[request]
        return SimpleNamespace(**seen, logits=logits, planes=planes[0] if planes else None)


def drain(engine: Engine, requests: Iterable[Request] = ()) -> dict[str, Output]:
    """Submit, step until idle, and check that nothing is held at the end."""
    for request in requests:
        engine.submit(request)
    outputs = {}
    while not engine.idle:
        for chunk in engine.step():
            if chunk.output is not None:
                outputs[chunk.request_id] = chunk.output
    assert_empty(engine)
    return outputs


def assert_empty(engine: Engine) -> None:
    """Nothing is held: no page, slot, chunk, snapshot in host memory, nor a buffer on its way."""
    scheduler, runner = engine.scheduler, engine.runner
    assert engine.pages.in_use == 0 and not any(engine.pages.holders), "pages held at the end"
    assert not scheduler.running and not scheduler.sequences and not scheduler.waiting, "a request held at the end"
    assert not engine.slots.chunks, "a chunk held at the end"
    assert len(scheduler._slots) == len(engine.slots), "a slot held at the end"
    if engine.mode.name != "sync":
        assert len(runner.completions) == 0 and runner.buffers.in_flight == 0, "a buffer held at the end"


def expected(
    reference: Reference,
    ask: Ask,
    *,
    fill: str,
    eos_ids: Iterable[int] = (),
    gate_dtype: str = "float32",
) -> Result:
    """What the reference answers when the request runs alone."""
    prompt, settings = ask
    return _expected(reference, tuple(prompt), fill, tuple(eos_ids), gate_dtype, tuple(sorted(settings.items())))


def shortened(result: Result, outputs: int) -> Result:
    """The first outputs of an answer."""
    names = ("token_ids", "depths", "logprobs", "logits", "decisions", "draws")
    return replace(result, **{name: getattr(result, name)[:outputs] for name in names})


@functools.lru_cache(maxsize=512)
def _expected(reference, prompt, fill, eos_ids, gate_dtype, settings) -> Result:
    settings = dict(settings)
    if settings.get("temperature", 0) == 0:
        settings.pop("logprobs", None)  # greedy reports raw ones in both modes
    return generate(reference, prompt, fill=fill, eos_ids=eos_ids, gate_dtype=gate_dtype, **settings)


def verdicts(
    pair: tuple[Any, Reference],
    asks: Sequence[Ask],
    *,
    fill: str,
    eos_ids: Iterable[int] = (),
    gate_dtype: str = "float32",
    **options: Any,
) -> list[Verdict]:
    """Run all asks together in one engine and compare each with its lone run in the reference: tokens, depths, logits,
    logprobs, planes, ending and usage."""
    model, reference = pair
    options = {"page_size": 4, "max_batch": 3, "max_batched_tokens": 8} | options
    engine = poison(Engine(model, fill=fill, eos_ids=frozenset(eos_ids), gate_dtype=gate_dtype, **options))
    watch = Watch(engine)
    requests = [engine.submit(list(prompt), Sampling(**settings)) for prompt, settings in asks]
    outputs = drain(engine)
    return [
        compare(
            expected(reference, ask, fill=fill, eos_ids=eos_ids, gate_dtype=gate_dtype),
            watch.answer(request, outputs[request.id]),
        )
        for request, ask in zip(requests, asks, strict=True)
    ]


def assert_lone_runs(pair: tuple[Any, Reference], asks: Sequence[Ask], **options: Any) -> None:
    """`verdicts`, all of them equal and none excused."""
    for ask, verdict in zip(asks, verdicts(pair, asks, **options), strict=True):
        assert verdict.equal and not verdict.near_ties, (ask, *verdict.problems, *verdict.near_ties)


def score_verdicts(
    pair: tuple[Any, Reference],
    asks: Sequence[tuple[Sequence[int], Sequence[Sequence[int]], Mapping[str, Any]]],
    *,
    fill: str,
    **options: Any,
) -> list[Verdict]:
    """As `verdicts`, for asks of (context, continuations, settings); one verdict a continuation."""
    model, reference = pair
    engine = poison(Engine(model, fill=fill, **{"page_size": 4, "max_batch": 3, "max_batched_tokens": 8} | options))
    watch = Watch(engine)
    requests = [engine.prepare(list(c), Sampling(**settings), forced=targets) for c, targets, settings in asks]
    scores = drain_scores(engine, requests)
    found = []
    for request, (context, targets, settings) in zip(requests, asks, strict=True):
        logits = iter(watch.logits[request])
        for n, (target, got) in enumerate(zip(targets, scores[request.id], strict=True)):
            fields = {name: getattr(got, name) for name in ("logprobs", "depths", "greedy", "usage")}
            seen = {"logits": [next(logits) for _ in target], "planes": watch.planes[request][n]}
            reference_score = score(reference, context, target, fill=fill, **settings)
            found.append(compare(reference_score, SimpleNamespace(**fields, **seen)))
    return found


def drain_scores(engine: Engine, requests: Iterable[Request]) -> dict[str, list[Score]]:
    for request in requests:
        engine.submit(request)
    scores: dict[str, list[Score]] = defaultdict(list)
    while not engine.idle:
        for chunk in engine.step():
            if chunk.score is not None:
                scores[chunk.request_id].append(chunk.score)
    assert_empty(engine)
    return scores


def by_request(chunks: Iterable[Chunk]) -> dict[str, list[Chunk]]:
    """Chunks of each answer, in order."""
    grouped: dict[str, list[Chunk]] = defaultdict(list)
    for chunk in chunks:
        grouped[chunk.request_id].append(chunk)
    return grouped
