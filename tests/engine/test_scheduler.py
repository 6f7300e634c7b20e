"""Who runs next: queues, slots, pages, chunks and fairness, with a runner made of dice. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anydepth.engine.pages import Pages
from anydepth.engine.plan import Plan, Read, Result, Save, Seat, TurnWork
from anydepth.engine.prefix import common_beginning
from anydepth.engine.scheduler import Scheduler
from anydepth.engine.waiting import BYPASSES, fits_host
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
    host_pages: int = 1000
    stops: bool = True  # one token in twelve is a stop id
    finished: list[Chunk] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
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
            host_pages=self.host_pages,
        )

    def submit(self, id, prompt=3, max_tokens=4, first_token="prefill", forced=(), priority=0, ids=None):
        sampling = Sampling(max_tokens=max_tokens, first_token=first_token)
        self.scheduler.submit(
            Request(
                id=id,
                prompt_ids=tuple(range(prompt)) if ids is None else ids,
                sampling=sampling,
                policy=Dice(),
                bounds=(1, self.segments),
                stop_ids=frozenset({0}),
                seed=0,
                max_tokens=max_tokens,
                forced=forced,
                priority=priority,
            )
        )

    def turn(self) -> Plan:
        plan = self.scheduler.next()
        self.check(plan)
        for move in plan.moves:
            if isinstance(move, Seat) and move.sequence.request.id not in self.admitted:
                self.admitted.append(move.sequence.request.id)
            if isinstance(move, Save):
                self.preempted.append(move.sequence.request.id)
                move.sequence.saved = "its state"
        reads = {}
        for index, row in enumerate(plan.rows):
            leaves = row.last if row.prefill else row.depth == self.segments or self.rng.random() < 0.3
            if leaves:
                reads[index] = Read(self.rng.randrange(not self.stops, 12), row.depth, None, True)
        self.finished += [c for c in self.scheduler.update(plan, Result(reads, NO_WORK)) if c.output]
        return plan

    def check(self, plan: Plan):
        running = self.scheduler.running.values()
        stored = sum(s.stored for s in self.scheduler.waiting)
        assert stored <= self.host_pages, "more in host memory than it may hold"
        assert len(running) <= self.slots and len({s.slot for s in running}) == len(running)
        held = [page for s in running for page in s.pages]
        assert len(set(held)) == self.pages.in_use and all(1 <= page <= self.pages.count for page in held)
        assert all(self.pages.holders[page] == held.count(page) for page in held)
        for row in plan.rows:  # nobody writes where another one reads
            written = row.sequence.pages[row.start // 4 : (row.start + row.length - 1) // 4 + 1]
            assert written and all(self.pages.holders[page] == 1 for page in written)
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
    slots and pages come back, admission bends the order of arrival only so far, and no ready row waits more than 2 R
    turns."""
    segments = rng.randint(1, 5)
    world = World(
        rng,
        segments=segments,
        slots=rng.randint(1, 6),
        pages=Pages(rng.randint(6, 30), 4, sharing=rng.choice([True, False])),
        host_pages=rng.choice([6, 12, 1000]),
        layered=layered,
        max_batched_tokens=rng.choice([1, 2, 5, 64]),
        prefill_rows=rng.choice([None, 1]),
    )
    aborted, ranks = 0, {}
    for n in range(rng.randint(1, 9)):
        forced = rng.choice([(), (), ((1, 2, 3), (4,))])
        first, priority = rng.choice(["prefill", "policy"]), rng.choice([0, 0, 1])
        world.submit(str(n), rng.randint(1, 12), rng.randint(1, 9), first, forced, priority)
        ranks[str(n)] = (-priority, n)
        for _ in range(rng.choice([0, 0, 1, 3, 20])):
            if not world.scheduler.idle:
                world.turn()
        if rng.choice([False, False, False, True]):
            aborted += world.scheduler.abort(str(rng.randint(0, n))) is not None
    world.drain()
    assert len(world.finished) + aborted == n + 1
    for place, id in enumerate(world.admitted):
        overtaken = sum(int(other) > int(id) and ranks[other][0] == ranks[id][0] for other in world.admitted[:place])
        assert overtaken <= BYPASSES
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


def test_rows_of_a_layered_model_enter_together_however_early_some_left():
    """Rows that have left wait at segment 1 for those that go deeper: six turns for everybody's next token, not six for
    each group that would go its own way."""
    world = World(Random(0), segments=6, slots=8, pages=Pages(200, 4), layered=True, max_batched_tokens=64, stops=False)
    for n in range(8):
        world.submit(str(n), prompt=3, max_tokens=40)
    entered = [sum(row.depth == 1 for row in plan.rows) for plan in (world.turn() for _ in range(150))]
    assert set(entered) == {0, 8}
    assert world.longest_wait <= 5


def test_rows_scattered_over_a_layered_model_do_not_wait_for_all_that_are_deeper():
    """As preempted ones that come back may be: were the deepest always first, segment 1 of 8 could wait 28 turns."""
    world = World(Random(0), segments=8, slots=8, pages=Pages(200, 4), layered=True, max_batched_tokens=64, stops=False)
    for n in range(8):
        world.submit(str(n), prompt=3, max_tokens=40)
    while any(s.prefilling for s in world.scheduler.running.values()) or not world.scheduler.running:
        world.turn()
    for depth, sequence in enumerate(world.scheduler.running.values(), 1):
        sequence.depth, sequence.planned = depth, 8
    for _ in range(100):
        world.turn()
    assert 8 < world.longest_wait <= 16


def test_a_large_request_is_overtaken_so_often_and_no_more():
    """It waits at the head for its pages; smaller ones that fit come in past it, until it has waited long enough."""
    world = World(Random(0), slots=3, pages=Pages(10, 4))
    world.submit("small", prompt=8, max_tokens=9)
    world.turn()
    world.submit("large", prompt=32, max_tokens=5)  # needs 8 pages at once
    for n in range(3 * BYPASSES):
        world.submit(f"tiny {n}", prompt=1, max_tokens=1)
    world.drain()
    assert world.admitted.index("large") == 1 + BYPASSES
    assert world.admitted[2:] != world.admitted[1:-1] and len(world.admitted) == 2 + 3 * BYPASSES


def test_where_all_fit_the_first_to_come_is_the_first_admitted():
    world = World(Random(0), slots=2, pages=Pages(40, 4))
    for n in range(6):
        world.submit(str(n), prompt=1 + 5 * (n % 2))
    world.drain()
    assert world.admitted == list("012345") and not world.preempted


def test_the_higher_priority_comes_in_first():
    world = World(Random(0), slots=1)
    for n, priority in enumerate((0, 1, -3, 1)):
        world.submit(str(n), priority=priority)
    world.drain()
    assert world.admitted == list("1302")


def grown(world, *ids, turns=60):
    """Turns until everybody named has given way once."""
    for _ in range(turns):
        if set(ids) <= set(world.preempted):
            return
        world.turn()
    raise AssertionError(f"{world.preempted} gave way, not {ids}")


def test_where_pages_run_out_the_youngest_gives_way():
    world = World(Random(5), slots=3, pages=Pages(7, 4), stops=False)
    for id in "abc":
        world.submit(id, prompt=3, max_tokens=16)  # 5 pages in the end, 1 at first
    grown(world, "c")
    assert world.preempted[0] == "c" and "a" in world.scheduler.running
    world.drain()
    assert "a" not in world.preempted


def test_where_pages_run_out_the_lowest_priority_gives_way_first():
    world = World(Random(5), slots=3, pages=Pages(7, 4), stops=False)
    for id, priority in zip("abc", (0, 1, 1), strict=True):
        world.submit(id, prompt=3, max_tokens=16, priority=priority)
    grown(world, "a")
    assert world.preempted[0] == "a"
    world.drain()


def test_a_higher_priority_takes_the_place_of_a_lower_one():
    """There is one slot; who had it comes back and ends."""
    world = World(Random(1), slots=1)
    world.submit("low", prompt=2, max_tokens=9)
    world.turn()
    world.submit("as low", prompt=2)
    world.submit("high", prompt=2, priority=1)
    world.turn()
    assert world.preempted == ["low"] and list(world.scheduler.running) == ["high"]
    world.drain()
    assert [chunk.request_id for chunk in world.finished] == ["high", "low", "as low"]


def test_where_host_memory_is_full_admission_waits():
    """Two requests of 4 pages each in a pool of 6 may have to give way whole; host memory for 3 pages cannot hold one
    of them, so the second waits for the first to end."""
    for host_pages, together in ((3, False), (4, True)):
        world = World(Random(2), pages=Pages(6, 4), host_pages=host_pages)
        for id in "ab":
            world.submit(id, prompt=3, max_tokens=14)
        world.turn()
        assert (len(world.scheduler.running) == 2) == together
        world.drain()
        assert len(world.finished) == 2


def test_all_can_end_where_host_memory_holds_those_that_do_not_fit_together():
    """Pool of 10. By rank 4 + 5 fit; 3 more do not, and must fit host memory whole."""
    world = World(Random(0), slots=4)
    for id in "abc":
        world.submit(id)
    a, b, c = world.scheduler.waiting
    assert fits_host([(c, 3), (a, 4), (b, 5)], 10, 4, 3) and not fits_host([(c, 3), (a, 4), (b, 5)], 10, 4, 2)
    assert fits_host([(a, 4), (b, 5)], 10, 1, 5) and not fits_host([(a, 4), (b, 5)], 10, 1, 4)
    b.stored = 2
    assert fits_host([(a, 4), (b, 5)], 10, 4, 5) and not fits_host([(a, 4), (b, 5)], 10, 4, 4)


def test_the_beginning_of_a_prompt_is_prefilled_once():
    """Ten tokens alike: two whole pages are shared, of the third the first two positions are copied."""
    world = World(Random(0), segments=1, pages=Pages(20, 4, sharing=True), max_batched_tokens=64, stops=False)
    world.submit("a", ids=(*range(10), 3, 3))
    world.turn()
    world.submit("b", ids=(*range(10), 4), max_tokens=9)
    plan = world.turn()
    a, b = (world.scheduler.running[id] for id in "ab")
    assert b.pages[:2] == a.pages[:2] and b.pages[2] != a.pages[2] and b.shared == 10
    assert [(row.start, row.length) for row in plan.rows if row.prefill] == [(10, 1)]
    assert world.pages.shared_tokens == 10 and world.pages.copied == 1 and world.pages.known >= 3
    world.drain()


def test_of_equal_prompts_that_come_together_one_is_prefilled():
    """The others wait until its pages are there; a prompt that begins otherwise does not."""
    world = World(Random(0), segments=2, slots=4, pages=Pages(40, 4, sharing=True), max_batched_tokens=64, stops=False)
    for id in "abc":
        world.submit(id, ids=(1, 2, 3, 4, 5, 6), max_tokens=3)
    world.submit("other", ids=(9, 2, 3, 4, 5, 6), max_tokens=3)
    world.turn()
    assert world.admitted == ["a", "other"]
    world.turn()
    plan = world.turn()
    assert world.admitted == ["a", "other", "b", "c"] and world.pages.shared_tokens == 2 * 5
    assert [(row.start, row.length) for row in plan.rows if row.prefill] == [(5, 1), (5, 1)]
    world.drain()


def test_a_prompt_that_is_known_whole_still_runs_its_last_position():
    world = World(Random(0), segments=1, pages=Pages(20, 4, sharing=True), max_batched_tokens=64, stops=False)
    world.submit("a", ids=(5,) * 8, max_tokens=1)
    world.turn()
    world.submit("b", ids=(5,) * 8, max_tokens=1)
    world.submit("by policy", ids=(5,) * 9, first_token="policy", max_tokens=2)
    plan = world.turn()
    assert [(r.sequence.request.id, r.start, r.length, r.prefill) for r in plan.rows] == [
        ("by policy", 8, 1, False),
        ("b", 7, 1, True),
    ]
    world.drain()


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
    pages.give_back(first)
    with pytest.raises(AssertionError):
        pages.give_back((1, 2, 3, 4))


def test_pages_that_hold_a_beginning_stay_until_they_are_needed():
    """The longest unused goes first, and the end of a prompt before its beginning."""
    pages = Pages(5, 2, sharing=True)
    first = pages.take(2)
    pages.publish((1, 2, 3, 4), first)
    second = pages.take(1)
    pages.publish((7, 7), second)
    pages.give_back(first)
    pages.give_back(second)
    assert pages.in_use == 0 and pages.available == 5 and pages.known == 3
    assert pages.find((1, 2, 3, 4, 5), 5) == (first, 4) and pages.find((1, 2, 3, 9), 4) == (first, 3)
    pages.take(3)
    assert pages.evicted == 1 and pages.find((1, 2, 3, 4), 4) == (first[:1], 2)
    pages.hold(first[:1])
    pages.take(1)
    assert pages.find((7, 7), 2) == ([], 0) and pages.known == 1 and not pages.can_take(1)


def test_what_follows_a_forgotten_page_is_forgotten_too():
    """Its own holder keeps it, but nobody finds it any more."""
    pages = Pages(3, 2, sharing=True)
    (one,), (two,) = pages.take(1), pages.take(1)
    pages.publish((1, 2), [one])
    pages.publish((1, 2, 3, 4), [one, two])
    pages.give_back([one])
    pages.take(2)
    assert pages.find((1, 2, 3, 4), 4) == ([], 0) and pages.known == 0
    pages.give_back([two])
    assert pages.available == 1


def test_one_slot_and_rising_priorities():
    """Each takes the slot of the one before: where host memory holds one of them, the third waits."""
    world = World(Random(0), slots=1, pages=Pages(12, 4), host_pages=4, stops=False)
    for n in range(3):
        world.submit(str(n), prompt=13, max_tokens=4, priority=n)
        world.turn()
        world.turn()
    world.drain()


@given(st.data())
@EXAMPLES
def test_the_longest_known_beginning_is_found(data):
    """As a search over all prompts finds it."""
    words = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
    prompts, wanted = data.draw(st.lists(words, min_size=1, max_size=9)), data.draw(words)
    pages = Pages(200, 3, sharing=True)
    for prompt in prompts:
        pages.publish(prompt, pages.take(pages.needed(len(prompt))))
    found, positions = pages.find(wanted, len(wanted))
    assert positions == max(common_beginning(prompt, wanted) for prompt in prompts)
    assert len(found) == pages.needed(positions)
