"""Who runs next: queues, slots, pages, chunks and fairness, with a runner made of dice. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anydepth.engine.pages import Pages
from anydepth.engine.plan import Plan, Read, Result, TurnWork
from anydepth.engine.scheduler import Scheduler
from anydepth.types import Chunk, Request, Sampling

EXAMPLES = settings(max_examples=200, deadline=None, derandomize=False, database=None, print_blob=True)
NO_WORK = TurnWork(1, 0, 0, 0, 0, 0, 0, ())


class Dice:
    """A policy that never knows beforehand."""

    def planned(self, sampling, index, segments):
        return None


@dataclass
class World:
    """A scheduler, and a runner that lets rows leave by chance. It checks every plan it is given."""

    rng: Random
    segments: int = 4
    slots: int = 3
    pages: Pages = field(default_factory=lambda: Pages(40, 4))
    layered: bool = False
    max_batched_tokens: int = 8
    prefill_rows: int | None = None
    finished: list[Chunk] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    waits: dict[str, int] = field(default_factory=dict)  # turns that a ready row has been left out
    longest_wait: int = 0

    def __post_init__(self):
        self.scheduler = Scheduler(
            segments=self.segments,
            slots=self.slots,
            pages=self.pages,
            layered=self.layered,
            max_batched_tokens=self.max_batched_tokens,
            prefill_rows=self.prefill_rows,
        )

    def submit(self, id, prompt=3, max_tokens=4, first_token="prefill", forced=()):
        sampling = Sampling(max_tokens=max_tokens, first_token=first_token)
        self.scheduler.submit(
            Request(
                id=id,
                prompt_ids=tuple(range(prompt)),
                sampling=sampling,
                policy=Dice(),
                bounds=(1, self.segments),
                stop_ids=frozenset({0}),
                seed=0,
                max_tokens=max_tokens,
                forced=forced,
            )
        )

    def turn(self) -> Plan:
        plan = self.scheduler.next()
        self.check(plan)
        self.admitted += [sequence.request.id for sequence in plan.admitted]
        reads = []
        for index, row in enumerate(plan.rows):
            leaves = row.last if row.prefill else row.depth == self.segments or self.rng.random() < 0.3
            if leaves:
                reads.append(Read(index, self.rng.randrange(12), row.depth, None, True))
        self.finished += [c for c in self.scheduler.update(plan, Result(tuple(reads), NO_WORK)) if c.output]
        return plan

    def check(self, plan: Plan):
        running = self.scheduler.running.values()
        assert len(running) <= self.slots and len({s.slot for s in running}) == len(running)
        held = [page for s in running for page in s.pages]
        assert len(set(held)) == len(held) == self.pages.in_use and all(1 <= p <= self.pages.count for p in held)
        assert sum(row.length for row in plan.rows if row.prefill) <= self.max_batched_tokens
        assert all(row.length <= (self.prefill_rows or row.length) for row in plan.rows)
        assert [row.prefill for row in plan.rows] == sorted(row.prefill for row in plan.rows)  # decode rows first
        assert plan.decode_rows == sum(not row.prefill for row in plan.rows)
        assert all(1 <= row.depth <= self.segments and row.length > 0 for row in plan.rows)
        assert all(row.start >= 0 and row.start + row.length <= len(row.sequence.pages) * 4 for row in plan.rows)
        if self.layered:
            assert {row.depth for row in plan.rows} <= {plan.segment}
        served = {row.sequence.request.id for row in plan.rows}
        ready = {s.request.id for s in running if s.chunk or not s.prefilling}
        assert served == ready or (self.layered and served and served < ready)
        self.waits = {id: self.waits.get(id, 0) + 1 for id in ready - served}
        self.longest_wait = max([self.longest_wait, *self.waits.values()])

    def drain(self, turns=2000):
        for _ in range(turns):
            if self.scheduler.idle:
                assert self.pages.in_use == 0
                return
            self.turn()
        raise AssertionError(f"still running: {list(self.scheduler.running)}")


@EXAMPLES
@given(rng=st.randoms(use_true_random=False), layered=st.booleans())
def test_random_traffic(rng, layered):
    """Requests arrive and are aborted at any time. Every plan is sound (`World.check`), every request ends once, all
    slots and pages come back, admission keeps the order of arrival, and no ready row waits more than 2 R turns."""
    segments = rng.randint(1, 5)
    world = World(
        rng,
        segments=segments,
        slots=rng.randint(1, 6),
        pages=Pages(rng.randint(6, 30), 4),
        layered=layered,
        max_batched_tokens=rng.choice([1, 2, 5, 64]),
        prefill_rows=rng.choice([None, 1]),
    )
    aborted = 0
    for n in range(rng.randint(1, 9)):
        forced = rng.choice([(), (), ((1, 2, 3), (4,))])
        world.submit(str(n), rng.randint(1, 12), rng.randint(1, 9), rng.choice(["prefill", "policy"]), forced)
        for _ in range(rng.choice([0, 0, 1, 3, 20])):
            if not world.scheduler.idle:
                world.turn()
        if rng.choice([False, False, False, True]):
            aborted += world.scheduler.abort(str(rng.randint(0, n))) is not None
    world.drain()
    assert len(world.finished) + aborted == n + 1
    assert world.admitted == sorted(world.admitted, key=int)
    assert world.longest_wait <= (2 * segments if layered else 0)


@pytest.mark.parametrize("segments", [1, 2, 4, 8])
def test_no_ready_row_of_a_layered_model_waits_more_than_two_rounds(segments):
    """A steady stream of short requests beside long ones: the deepest rows are not starved by those that enter."""
    for seed in range(5):
        world = World(Random(seed), segments=segments, slots=6, layered=True, max_batched_tokens=4)
        for n in range(60):
            world.submit(str(n), prompt=1 + n % 9, max_tokens=1 + n % 7)
            world.turn()
        world.drain()
        assert world.longest_wait <= 2 * segments


def test_the_first_to_come_is_the_first_admitted():
    """A large request at the head waits for its pages, and nobody overtakes it."""
    world = World(Random(0), slots=3, pages=Pages(10, 4))
    world.submit("small", prompt=8, max_tokens=9)  # 4 pages
    world.turn()
    world.submit("large", prompt=28, max_tokens=5)  # 8 pages
    world.submit("tiny", prompt=1, max_tokens=1)  # 1 page, for which there would be room
    world.turn()
    assert world.admitted == ["small"]
    world.drain()
    assert world.admitted == ["small", "large", "tiny"]


def test_prompts_are_cut_to_what_a_turn_may_carry():
    """Two prompts of 7 and 3 tokens, 4 tokens a turn: the first one's chunks leave no room until its last."""
    world = World(Random(0), segments=2, max_batched_tokens=4)
    world.submit("a", prompt=7)
    world.submit("b", prompt=3)
    plans = [world.turn() for _ in range(6)]
    chunks = [[(row.sequence.request.id, row.start, row.length, row.depth) for row in p.rows if row.prefill]
              for p in plans]  # fmt: skip
    assert chunks[:2] == [[("a", 0, 4, 1)], [("a", 0, 4, 2)]]
    assert chunks[2:4] == [[("a", 4, 3, 1), ("b", 0, 1, 1)], [("a", 4, 3, 2), ("b", 0, 1, 2)]]
    assert chunks[4:] == [[("b", 1, 2, 1)], [("b", 1, 2, 2)]]
    assert [row.last for p in plans for row in p.rows if row.prefill] == [False] * 4 + [True] + [False] * 2 + [True]


def test_a_prompt_goes_one_position_at_a_time_where_the_fill_says_so():
    world = World(Random(0), segments=2, max_batched_tokens=64, prefill_rows=1)
    world.submit("a", prompt=3)
    rows = [(row.start, row.length, row.depth) for _ in range(6) for row in world.turn().rows]
    assert rows == [(0, 1, 1), (0, 1, 2), (1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2)]


def test_first_token_by_policy_leaves_the_last_prompt_token_to_a_decode_row():
    world = World(Random(0), segments=2)
    world.submit("a", prompt=3, first_token="policy")
    world.submit("b", prompt=1, first_token="policy")
    plan = world.turn()
    assert [(row.sequence.request.id, row.prefill, row.start, row.length) for row in plan.rows] == [
        ("b", False, 0, 1),
        ("a", True, 0, 2),
    ]
    world.turn()
    plan = world.turn()
    assert ("a", False, 2, 1) in [(row.sequence.request.id, row.prefill, row.start, row.length) for row in plan.rows]


@pytest.mark.parametrize("turns", [0, 1, 3, 9])
def test_an_abort_frees_slot_and_pages_wherever_the_request_stands(turns):
    world = World(Random(3), segments=3, max_batched_tokens=2)
    world.submit("a", prompt=5, max_tokens=20)
    for _ in range(turns):
        world.turn()
    chunk = world.scheduler.abort("a")
    assert chunk.finish_reason == "abort" and chunk.token_id is None and chunk.output.request_id == "a"
    assert world.scheduler.idle and world.pages.in_use == 0
    assert world.scheduler.abort("a") is None and world.scheduler.abort("nobody") is None


def test_a_slot_and_pages_serve_again():
    world = World(Random(0), slots=1, pages=Pages(3, 4))
    for n in range(5):
        world.submit(str(n), prompt=4, max_tokens=6)
    world.drain()
    assert [chunk.request_id for chunk in world.finished] == list("01234")


def test_pages():
    """Handed out once, counted, given back; the null page 0 belongs to nobody."""
    pages = Pages(5, 16)
    assert [pages.needed(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]
    first, second = pages.take(2), pages.take(3)
    assert sorted(first + second) == [1, 2, 3, 4, 5] and pages.in_use == 5
    assert not pages.can_take(1) and pages.can_take(0)
    with pytest.raises(AssertionError):
        pages.take(1)
    pages.give_back(first)
    assert pages.in_use == 3 and pages.take(2) == first
    pages.give_back(second)
    with pytest.raises(AssertionError):
        pages.give_back((1, 2, 3, 4))
