"""A clock that is told the time, and engines that behave as a test wants it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from anydepth.bench.drive import Clock
from anydepth.engine.engine import Engine
from anydepth.types import Chunk


class Hand:
    """Time passes when somebody sleeps, or moves it on."""

    def __init__(self, at: float = 0.0) -> None:
        self.at, self.slept = at, []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.at, self.sleep)


class OneSlot:
    """Answers one request after the other, a token a turn of one second."""

    def __init__(self, hand: Hand, lengths: dict[str, int]) -> None:
        self.hand, self.left = hand, dict(lengths)
        self.scheduler = SimpleNamespace(waiting=[])
        self.running: list[str] = []
        self.submitted_s: dict[str, float] = {}

    @property
    def idle(self) -> bool:
        return not self.running and not self.scheduler.waiting

    def submit(self, request):
        self.scheduler.waiting.append(request.id)
        self.submitted_s[request.id] = self.hand.at
        return request

    def step(self) -> list[Chunk]:
        if not self.running:
            self.running.append(self.scheduler.waiting.pop(0))
        self.hand.at += 1.0
        id = self.running[0]
        self.left[id] -= 1
        if self.left[id]:
            return [Chunk(None, 1, 1, request_id=id)]
        self.running.clear()
        return [Chunk(None, 1, 1, request_id=id, output=SimpleNamespace(request_id=id))]


def asks(*ids: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(id=id) for id in ids]


class Wobbly(Engine):
    """An engine that changes the output at one position of some answers. `made` has every engine of a test."""

    made: list[Wobbly]

    @staticmethod
    def where(engine: Wobbly, request: int) -> int | None:
        """Position to change in the answer to a request (0: the first that was submitted)."""
        return None

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.max_batch, self.order = options["max_batch"], {}
        self.made.append(self)

    def submit(self, request):
        self.order[request.id] = len(self.order)
        self.cell = request.sampling
        return super().submit(request)

    def step(self) -> list[Chunk]:
        return [self._changed(chunk) if chunk.output else chunk for chunk in super().step()]

    def _changed(self, chunk: Chunk) -> Chunk:
        at = type(self).where(self, self.order[chunk.request_id])
        if at is None:
            return chunk
        ids = list(chunk.output.token_ids)
        ids[at] += 1
        return replace(chunk, output=replace(chunk.output, token_ids=tuple(ids)))


def wobbly(monkeypatch, where=lambda engine, request: None) -> list[Wobbly]:
    """Let the bench make such engines; the list of those it made."""
    made: list[Wobbly] = []
    kind = type("Wobbly", (Wobbly,), {"made": made, "where": staticmethod(where)})
    for room in ("throughput", "arrivals"):
        monkeypatch.setattr(f"anydepth.bench.{room}.Engine", kind)
    return made
