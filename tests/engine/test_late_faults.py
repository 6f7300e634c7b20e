"""Guards of late signals, preemption and sharing, broken on purpose: for each, the smallest check that must notice.

A fault replaces one piece of a function's text. Where the text is no longer there, the guard has moved: move the fault.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from anydepth.engine import resident_turn
from anydepth.engine.completions import Buffers
from anydepth.engine.engine import Engine
from anydepth.engine.late import LateScheduler
from anydepth.engine.late_runner import LateRunner
from anydepth.engine.resident import ResidentScheduler
from anydepth.engine.resident_runner import ResidentRunner, ResidentSlots
from anydepth.engine.scheduler import Scheduler
from anydepth.engine.slots import Slots
from anydepth.ops.kv import KVMap
from tests.engine import test_scheduler
from tests.engine.planting import Fault, notice
from tests.engine.schedules import VOCABULARY, Asked, Schedule, play
from tests.helpers import expected, twins

GATED = {"max_tokens": 10, "exit_policy": "gate_cdf", "exit_threshold": 0.7}
PLAIN = {"max_tokens": 3}
SEED = 2  # a model whose answers have tokens and depths of all kinds


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed + 5 * n * n + 3 * n) % VOCABULARY for n in range(length))


def late(
    signals: str, *asked: Asked, late: int = 1, squeezes: tuple[tuple[int, int], ...] = (), **options: Any
) -> None:
    """Requests in one engine whose outcomes come late, and out of order, equal their lone runs."""
    fill, eos = options.pop("fill", "last_exited"), options.pop("eos_ids", ())
    engine = {"max_batch": 2, "page_size": 4, "kv_pages": 30, "max_batched_tokens": 8, "signals": signals} | options
    changes = {"vocab_size": VOCABULARY}
    play(Schedule("looped", SEED, changes, None, "float64", fill, eos, engine, asked, late, squeezes))


def gated(length: int = 5, arrival: int = 0, **more: Any) -> Asked:
    return Asked(arrival, prompt(length), GATED | more)


def the_answer_goes_on_as_a_prompt(signals: str = "sync") -> None:
    """A second request asks what the first asked and was answered, and more: full-depth K/V of that is not there."""
    settings = GATED | {"exit_threshold": 0.3}
    _, reference = twins(seed=SEED, vocab_size=VOCABULARY)
    answer = expected(reference, (prompt(8), settings), fill="last_exited").token_ids
    late(signals, Asked(0, prompt(8), settings), Asked(0, (*prompt(8), *answer, 7), settings), max_batch=1)


def ends_in_flight() -> None:
    for seed in range(4):
        exact(eos_ids=(9,), late=seed)


squeezed = tuple((turn, 0) for turn in range(9, 40) for _ in range(2))  # both at once, so that they change slots
exact = partial(late, "exact", gated())
resident = partial(late, "resident", gated())
alone = partial(late, "exact", gated(), gated(7), max_batch=1)
abort_and_again = partial(
    late, "exact", Asked(0, prompt(5), GATED, abort=14), Asked(40, prompt(6, 2), GATED, takes_over=True), late=2
)
given_way = partial(late, "exact", gated(), gated(7), squeezes=squeezed)
given_way_in_full = partial(late, "exact", gated(), gated(7), squeezes=squeezed, fill="full")
sampled = {"temperature": 1.0, "seed": 4}

FAULTS = {
    # -- late rounds --------------------------------------------------------------------------------------------------
    "planes are finalised before the late round writes": Fault(
        LateRunner, "_advance", "h_Nd = self.model.segment(",
        "at = self.slots.map.at(slots_B * self.slots.map.table.shape[1] + start_B, (depth_B - 1).clamp(min=1));"
        "self.fill.leave(self.model, self.slots.pool, Early(at, (depth_B - 1).clamp(min=1), None, at, at, at))"
        " if decode else None;"
        "h_Nd = self.model.segment(",
        exact, also=(LateRunner, "_leave",
              "self.fill.leave(self.model, slots.pool, Early(storage, depth, depths, early, position_L, h_Ld))",
              "pass"),
    ),
    "a stale result is trusted by its id": Fault(
        LateScheduler, "update", "for sequence, read, row, leaves in result.outcomes:",
        "for sequence, read, row, leaves in "
        "((self.sequences.get(s.request.id, s), *rest) for s, *rest in result.outcomes):", abort_and_again,
    ),
    "the snapshot is the previous tenant's": Fault(
        LateRunner, "_advance", "index_copy_(0, slots_B, self._tokens(decode, len(places_M), carried))",
        "index_copy_(0, slots_B[:0], carried[:0])", alone,
    ),
    "the late round counts as depth": Fault(
        LateScheduler, "_leave", "depth, kept = s.leaves_at, True", "depth, kept = s.leaves_at + 1, True", exact
    ),
    "the late round is read": Fault(
        LateScheduler, "_leave", "depth, kept = s.leaves_at, True", "depth, kept = s.leaves_at, False", exact
    ),
    "round k + 2 runs before the answer of round k": Fault(
        LateScheduler, "_goes", "ran <= s.answered + 1", "ran <= s.answered + 2", partial(exact, late=2)
    ),
    "no late round where the answer came early": Fault(
        LateScheduler, "_target", "min(s.leaves_at + 1, high)",
        "s.leaves_at if s.depth - 1 == s.leaves_at else s.leaves_at + 1", partial(exact, late=5),
    ),
    "the answer of a token that has left counts for the next": Fault(
        LateScheduler, "_ran", "token_at == s.position and row.depth == s.answered + 1", "True",
        partial(late, "exact", gated(exit_threshold=0.3), late=4),
    ),
    "a token that may still be a stop id counts as executed": Fault(
        LateScheduler, "next", "sequence.in_flight += row.length", "pass", partial(exact, eos_ids=(9,))
    ),
    "`delayed` reads what the policy saw": Fault(
        LateScheduler, "_leave", "s.leaves_at is not None and not self.reads_late", "s.leaves_at is not None",
        partial(late, "delayed", gated()),
    ),
    "`delayed` under `full` reads what the policy saw": Fault(
        LateRunner, "_snapshot", "if not self.reads_late:", "if True:", partial(late, "delayed", gated(), fill="full")
    ),
    # -- buffers ------------------------------------------------------------------------------------------------------
    "a buffer in flight is filled again": Fault(
        Buffers, "take", "return self._idle.pop() if self._idle else Buffer(self._size, self._device)",
        'return self.__dict__.setdefault("one", Buffer(self._size, self._device))', partial(exact, late=2),
    ),
    "a buffer is given out before all of it was read": Fault(
        Buffers, "take", "return self._idle.pop() if self._idle else", "self._idle.append(self.__dict__.setdefault("
        '"one", Buffer(self._size, self._device)));return self._idle[-1] if self._idle else', partial(resident, late=2),
    ),
    # -- giving way ---------------------------------------------------------------------------------------------------
    "the product is dropped on preemption": Fault(
        Slots, "_bring_back", "if saved.state is not None:", "if False:", given_way
    ),
    "the state is dropped on preemption": Fault(
        Slots, "_bring_back", "pool[slot] = row.to(self.device)", "pass", given_way
    ),
    "the snapshot is dropped on preemption": Fault(
        Slots, "rows", "self.kept_h_Sd, self.kept_depth_S]", "]", given_way_in_full
    ),
    "the planes are dropped on preemption": Fault(
        Slots, "_bring_back", "saved.kv.to(self.device)", "0 * saved.kv.to(self.device)", given_way
    ),
    "the chunk on its way is dropped on preemption": Fault(
        Slots, "_bring_back", "if saved.chunk is not None:", "if False:",
        partial(late, "sync", gated(9), squeezes=((2, 0),)),
    ),
    "more is kept in host memory than it may hold": Fault(
        Scheduler, "_may_come_in", "if not sequence.stored and not self._can_end(sequence):", "if False:",
        test_scheduler.test_where_host_memory_is_full_admission_waits,
    ),
    "the oldest gives way": Fault(
        Scheduler, "_grow", "max(self.running.values(), key=rank)", "min(self.running.values(), key=rank)",
        test_scheduler.test_where_pages_run_out_the_youngest_gives_way,
    ),
    "an equal takes another's place": Fault(
        Scheduler, "_may_come_in", "s.request.priority < sequence.request.priority",
        "s.request.priority <= sequence.request.priority",
        test_scheduler.test_where_all_fit_the_first_to_come_is_the_first_admitted,
    ),
    # -- sharing ------------------------------------------------------------------------------------------------------
    "a decode page is shared as a prefix": Fault(
        Scheduler, "_let_go", "self.pages.give_back(sequence.pages)",
        "self.pages.publish((*sequence.request.prompt_ids, *sequence.token_ids), sequence.pages);"
        "self.pages.give_back(sequence.pages)", the_answer_goes_on_as_a_prompt,
    ),
    "a partly filled page is written to where it stands": Fault(
        Scheduler, "_seat", "sequence.pages = held + self.pages.take(needed)",
        "sequence.pages = others + self.pages.take(needed - len(others) + len(held));source = None",
        partial(late, "sync", Asked(0, prompt(7), GATED), Asked(9, (*prompt(6), 3), GATED)),
    ),
    "a page is not copied": Fault(
        Slots, "move", "self._copy(source, target)", "pass",
        partial(late, "sync", Asked(0, prompt(7), GATED), Asked(9, (*prompt(6), 3), GATED)),
    ),
    "what is shared is given away": Fault(
        Scheduler, "_seat", "self.pages.hold(others)", "pass",
        partial(late, "sync", Asked(0, prompt(9), PLAIN), Asked(40, (*prompt(8), 3, 4, 5), PLAIN), kv_pages=4),
    ),
    "a prompt that is known runs nothing": Fault(
        Scheduler, "_admit", "sequence.prefill_end - (sequence.prefill_end == len(ids))", "sequence.prefill_end",
        test_scheduler.test_a_prompt_that_is_known_whole_still_runs_its_last_position,
    ),
    # -- rows that decide on the device -------------------------------------------------------------------------------
    "pages are reserved for what was heard only": Fault(
        ResidentScheduler, "_position_bound", "s.position + s.ahead", "s.position",
        partial(late, "resident", Asked(0, prompt(3), {"max_tokens": 9, "depth": 1}), late=2, page_size=1),
    ),
    "a row that ended goes on": Fault(
        resident_turn, "run_turn", "runs * (on == gave)", "runs", partial(resident, late=2)
    ),
    "a row that ended moves on": Fault(
        resident_turn, "run_turn", "on = gave * goes_on", "on = gave",
        partial(late, "resident", gated(), gated(7, max_tokens=2), late=2, fill="full"),
    ),
    "a row that ended writes where it stood": Fault(
        KVMap, "together", "write_Bn.masked_fill(ended_B1, self.pool.scratch)", "write_Bn",
        partial(late, "resident", gated(), gated(7, max_tokens=2), late=2),
    ),
    "nobody is taken to have ended": Fault(
        ResidentRunner, "_run", "or any(may_end)", "or False", partial(resident, late=2)
    ),
    "the device knows no stop id": Fault(
        resident_turn, "run_turn", "if kind.stops:", "if False:", partial(resident, eos_ids=(9,), late=2)
    ),
    "an id more than there was room for is no stop id": Fault(
        ResidentSlots, "_seat_stop_ids", "if len(ids) > self.asks.stop_SK.shape[1]:",
        "ids = ids[:8]\n    if len(ids) > self.asks.stop_SK.shape[1]:",
        partial(resident, eos_ids=tuple(range(1, 17)), late=2),
    ),
    "every row is sampled as the first is": Fault(
        resident_turn, "_choose", "asks.sampled_S.index_select(0, slots)", "asks.sampled_S[slots[:1]]",
        partial(late, "resident", gated(), gated(7, **sampled)),
    ),
    "uniforms do not follow the output": Fault(
        resident_turn, "_choose", "asks.uniform_SI[slots, output]", "asks.uniform_SI[slots, 0 * output]",
        partial(late, "resident", gated(**sampled)),
    ),
    "what is in flight stays when all have ended": Fault(
        Engine, "step", "self.runner.drain()\n    return aborted + chunks", "pass\n    return aborted + chunks",
        ends_in_flight,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_guard_is_noticed(name, monkeypatch, tmp_path):
    notice(FAULTS[name], monkeypatch, tmp_path)
