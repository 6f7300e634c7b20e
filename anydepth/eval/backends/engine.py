"""The engine as a backend: questions wait in it and are answered together, as many at a time as it has slots."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from anydepth.engine.in_force import settings_in_force
from anydepth.engine.llm import LLM
from anydepth.eval.backends.base import SMALL_HIDDEN, Ask, Backend, Reply
from anydepth.types import Request, Sampling, Score


class EngineBackend(Backend):
    """Answers with an LLM. The Asks are prepared before the first is submitted, so that errors come before work.

    profiles: names under which an arm may ask for a loaded profile, and the profile's own name.
    """

    name = "engine"

    def __init__(self, llm: LLM, *, profiles: Mapping[str, str] | None = None) -> None:
        if llm.tokenizer is None:
            raise ValueError(f"model {llm.checkpoint.name} has no tokenizer, which questions need; give one to LLM")
        if llm.engine.weight_version:
            raise ValueError(
                f"the weights of {llm.checkpoint.name} were exchanged after it was loaded, so its name and hash do not "
                f"say what is evaluated; save them as a checkpoint and load that"
            )
        self.llm, self.tokenizer, self._profiles = llm, llm.tokenizer, profiles or {}
        self.model_name, self.model_hash = llm.checkpoint.name, llm.checkpoint.model_hash
        if llm.heads is not None:
            self.head_hash = llm.heads[1]
        shape = llm.engine.model.shape
        self.max_positions, self.segments = shape.max_positions, shape.segments
        self.small = shape.hidden < SMALL_HIDDEN

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        heads = {} if self.llm.heads is None else dict(zip(("heads", "head_hash"), self.llm.heads, strict=True))
        return {**settings_in_force(self.llm.engine, self._own(sampling)), **heads}

    def _own(self, sampling: Sampling) -> Sampling:
        """With the profile by its own name."""
        own = self._profiles.get(sampling.profile or "")
        return sampling if own is None else replace(sampling, profile=own)

    def replies(self, asks: Sequence[Ask], sampling: Sampling, *, concurrency: int) -> Iterator[Reply]:
        """Leaves the engine empty, however it ends."""
        sampling = self._own(sampling)
        if self.llm.engine.mode.name != "sync":  # which a continuation must not wait for
            yield from self._scored([ask for ask in asks if ask.continuations], sampling, concurrency)
            asks = [ask for ask in asks if not ask.continuations]
        engine = self.llm.engine
        waiting = [(ask, self._request(ask, sampling)) for ask in reversed(asks)]
        flying: dict[str, tuple[Ask, float]] = {}
        scores: dict[str, list[Score]] = {}
        engine.tallied = tallied = dict[str, dict[str, int]]()
        try:
            while waiting or flying:
                while waiting and len(flying) < concurrency:
                    ask, request = waiting.pop()
                    engine.submit(request)
                    flying[request.id] = ask, time.perf_counter()
                for chunk in engine.step():
                    if chunk.request_id not in flying:
                        continue
                    if chunk.score is not None:
                        scores.setdefault(chunk.request_id, []).append(chunk.score)
                    if chunk.finish_reason is not None:
                        ask, start = flying.pop(chunk.request_id)
                        done = tuple(scores.pop(chunk.request_id, ()))
                        output = None if done else chunk.output
                        seconds, tallies = time.perf_counter() - start, tallied.pop(chunk.request_id, {})
                        yield Reply(ask=ask, output=output, scores=done, seconds=seconds, tallies=tallies)
        finally:
            engine.tallied = None
            for id in flying:
                engine.abort(id)
            if flying:
                engine.step()  # takes the last chunks of what was aborted away

    def _scored(self, asks: Sequence[Ask], sampling: Sampling, concurrency: int) -> Iterator[Reply]:
        """Choices through `LLM.score`, which runs without lateness whatever the mode of signals."""
        for first in range(0, len(asks), concurrency):
            batch = asks[first : first + concurrency]
            start = time.perf_counter()
            contexts = [ask.prompt_ids for ask in batch for _ in ask.continuations]
            continuations = [ids for ask in batch for ids in ask.continuations]
            scores = iter(self.llm.score(contexts, continuations, replace(sampling, n=1)))
            for ask in batch:
                done = tuple(islice(scores, len(ask.continuations)))
                yield Reply(ask=ask, scores=done, seconds=time.perf_counter() - start)

    def _request(self, ask: Ask, sampling: Sampling) -> Request:
        id, index = ask.key
        return self.llm.engine.prepare(
            ask.prompt_ids,
            replace(sampling, n=1),
            id=f"{id}:{index}",
            seed=ask.seed,
            streaming=False,
            answer_index=index,
            forced=ask.continuations,
        )
