"""Requests in, tokens out, over replicas of a pipeline: the engine's face, with workers behind it.

The router holds no weights and sees no hidden state. What it does is choose a replica for each request, hand rows to
first workers, and turn the tokens that come back into answers, as the engine does.
"""

from __future__ import annotations

import itertools
import math
import queue
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from anydepth.engine.answers import cut_short
from anydepth.engine.plan import Sequence as UnderWay
from anydepth.engine.requests import Requests
from anydepth.exits.base import known_profiles
from anydepth.exits.load import load_policy
from anydepth.pipeline.admission import check_request
from anydepth.pipeline.export import outline, read_artifacts
from anydepth.pipeline.links import Link
from anydepth.pipeline.manifest import Manifest
from anydepth.pipeline.messages import Ask, Held
from anydepth.pipeline.replica import Replica
from anydepth.pipeline.start import Starter
from anydepth.profile import Profile, policy_of
from anydepth.types import Chunk, Request, Sampling

if TYPE_CHECKING:
    from anydepth.models.tokenizer import Tokenizer

START_S = 600.0  # for a worker to load its part


class QueueFullError(RuntimeError):
    """As many requests wait as may: step, and submit again."""


class Router:
    """Serves the artifacts of a manifest; a context manager, which ends the workers.

    profiles: thresholds of `confidence` and `probe`, or the paths of their files; a single one is used by requests that
    name no exit setting. As with an Engine: `submit`, then `step` until `idle`, or `run`. A request in a replica where
    a worker dies ends with finish reason "error", and `reason` says why; it is not tried again, since what it has said
    may have been passed on. One thread at a time. Raises ValueError for artifacts that are not the manifest's,
    RuntimeError where a worker cannot be started.
    """

    def __init__(
        self,
        manifest: Manifest,
        artifacts: str | Path,
        *,
        tokenizer: Tokenizer | None = None,
        profiles: Sequence[Profile | str | Path] = (),
    ) -> None:
        known = [each if isinstance(each, Profile) else Profile.read(each) for each in profiles]
        found = read_artifacts(artifacts, manifest)
        self.manifest = manifest
        probed = frozenset(artifact.segment for artifact in found if artifact.probe)
        self.shape = replace(outline(found[0].config, manifest.segments).shape, probed=probed)
        self.readouts = {manifest.segments.index(layer) + 1 for layer in manifest.readouts}
        eos_ids = frozenset(found[0].eos_ids)
        for profile in known:
            if profile.model_hash is not None or profile.head_hash is not None:
                profile.check_hashes(model_hash=found[0].model_hash, head_hash=found[0].head_hash)
        load = partial(load_policy, profiles=known_profiles(known, self.shape))
        self.requests = Requests(
            self.shape,
            load=load,
            tokenizer=tokenizer,
            eos_ids=eos_ids,
            certificate=None,
            default_policy=policy_of(known),
        )
        self.waiting: deque[tuple[int, Request]] = deque()
        self._where: dict[str, tuple[int, Replica | None]] = {}  # id -> key and replica, of all that have not ended
        self._reasons: dict[str, str] = {}
        self._said: list[Chunk] = []
        self._keys, self._turn = itertools.count(), 0
        self._events: queue.SimpleQueue[tuple[int, int, int, Any]] = queue.SimpleQueue()
        self._held: dict[tuple[int, int], Held] = {}
        self._starter = Starter(manifest, artifacts)
        self.replicas: list[Replica] = []
        try:
            for number in range(manifest.replicas):
                start = partial(self._start, number)
                self.replicas.append(Replica(manifest, self.shape.segments, start=start))
            self.settle()
            if lost := [replica.lost for replica in self.replicas if replica.lost]:
                raise RuntimeError(f"the pipeline does not start: {lost[0]}")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Router:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def idle(self) -> bool:
        return not (self._where or self._said) and all(r.idle or r.lost for r in self.replicas)

    def prepare(self, prompt: str | Sequence[int], sampling: Sampling | None = None, **options: Any) -> Request:
        """A checked Request, see `Engine.prepare`. ValueError for anything that cannot be honoured."""
        request = self.requests.make(prompt, sampling, **options)
        check_request(request, self.manifest, segments=self.shape.segments, readouts=self.readouts)
        return request

    def submit(
        self, prompt: str | Sequence[int] | Request, sampling: Sampling | None = None, *, id: str | None = None
    ) -> Request:
        """Queue one answer. QueueFullError where `queue` wait already; ValueError for bad input or an id in use."""
        request = prompt if isinstance(prompt, Request) else self.prepare(prompt, sampling, id=id)
        if request.id in self._where or request.submitted:
            raise ValueError(f"request {request.id!r} was submitted before; prepare a new one for another answer")
        if len(self.waiting) >= self.manifest.queue:
            raise QueueFullError(f"{len(self.waiting)} requests wait, as many as may; step and submit again")
        request.submitted = True
        key = next(self._keys)
        self.waiting.append((key, request))
        self._where[request.id] = key, None
        return request

    def step(self, timeout_s: float = 1.0) -> list[Chunk]:
        """Hand out what can be, wait for something to come back (at most so long), and return the tokens."""
        self._feed()
        said, self._said = self._said, []
        if said:
            return said
        if not self.idle:
            self._hear(timeout_s)
        said, self._said = self._said, []
        return said

    def run(self, requests: Iterable[Request]) -> Iterator[Chunk]:
        """Answer the requests, which are taken from the iterable as there is room for them; every token as it comes.
        An iterator that is closed early aborts what is left."""
        source, left = iter(requests), set[str]()
        more = True
        try:
            while more or left:
                while more and len(self.waiting) < self.manifest.queue:
                    request = next(source, None)
                    more = request is not None
                    if request is not None:
                        left.add(self.submit(request).id)
                for chunk in self.step():
                    if chunk.finish_reason:
                        left.discard(chunk.request_id)
                    yield chunk
        finally:
            for request_id in left:
                self.abort(request_id)

    def abort(self, request_id: str) -> bool:
        """Stop a request wherever it stands; whether it was here. The next step returns its last Chunk."""
        if request_id not in self._where:
            return False
        key, replica = self._where[request_id]
        if replica is not None:
            self._say(replica.abort(key))
            return True
        request = next(request for waiting, request in self.waiting if waiting == key)
        self.waiting.remove((key, request))
        self._say(cut_short(UnderWay(request, 0), "abort"))
        return True

    def reason(self, request_id: str) -> str | None:
        """Why a request ended with "error"; it is forgotten by that."""
        return self._reasons.pop(request_id, None)

    def stats(self) -> list[dict[str, Any]]:
        """For every worker that is there: its replica, stage, pages and slots in use, bytes by tensor, batches and rows
        run, and how often its replica has started a worker again."""
        self._held.clear()
        deadline = time.monotonic() + START_S
        for replica in self.replicas:
            for link in replica.links if replica.up else ():
                link.send(Ask())
        while any(
            (number, stage) not in self._held
            for number, replica in enumerate(self.replicas)
            for stage in range(len(replica.links) if replica.up else 0)
        ):
            self._hear(1.0, deadline)
        return [
            {"replica": number, "stage": stage, "restarts": self.replicas[number].restarts, **held._asdict()}
            for (number, stage), held in sorted(self._held.items())
        ]

    def settle(self) -> None:
        """Wait until every worker that died has been replaced, or its replica given up."""
        deadline = time.monotonic() + START_S
        while not all(replica.up or replica.lost for replica in self.replicas):
            self._hear(1.0, deadline)

    def close(self) -> None:
        """End the workers. What has not been answered stays so."""
        self._starter.close()
        self.replicas = []

    def _start(self, number: int, stage: int, life: int) -> Link:
        """Start the worker of a stage of replica `number`, in its `life`-th life."""
        return self._starter.start(number, stage, lambda said: self._events.put((number, stage, life, said)))

    def _feed(self) -> None:
        """Seat those who wait, in order, and send micro-batches."""
        if all(replica.lost for replica in self.replicas):
            for key, request in self.waiting:
                self._reasons[request.id] = f"no pipeline is left; {self.replicas[0].lost}"
                self._say(cut_short(UnderWay(request, 0, order=key), "error"))
            self.waiting.clear()
        while self.waiting and (replica := self._choose(self.waiting[0][1])) is not None:
            key, request = self.waiting.popleft()
            replica.seat(key, request)
            self._where[request.id] = key, replica
        for replica in self.replicas:
            replica.feed()

    def _choose(self, request: Request) -> Replica | None:
        """Who takes the next request: of those with room the next in turn, or the one with the fewest inside."""
        count = len(self.replicas)
        turn = [self.replicas[(self._turn + n) % count] for n in range(count)]
        having = [replica for replica in turn if not replica.lost and replica.has_room(request)]
        if not having:
            return None
        if self.manifest.routing == "least_loaded":
            return max(having, key=lambda replica: replica.free_slots)
        self._turn = self.replicas.index(having[0]) + 1
        return having[0]

    def _hear(self, timeout_s: float, deadline: float = math.inf) -> None:
        """Take in what has come, waiting for the first of it."""
        if time.monotonic() > deadline:
            raise RuntimeError(f"a worker has neither answered nor died for {START_S:.0f} s")
        try:
            event = self._events.get(timeout=timeout_s)
            while True:
                number, stage, life, message = event
                if isinstance(message, Held):
                    self._held[number, stage] = message
                elif number < len(self.replicas):
                    chunks, why = self.replicas[number].hear(stage, life, message)
                    for chunk in chunks:
                        if why:
                            self._reasons[chunk.request_id] = why
                        self._say(chunk)
                event = self._events.get_nowait()
        except queue.Empty:
            pass

    def _say(self, chunk: Chunk) -> None:
        self._said.append(chunk)
        if chunk.finish_reason:
            del self._where[chunk.request_id]
