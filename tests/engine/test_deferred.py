"""Fill `deferred`: the same as `full` at the same depths, run later; and what breaks when a guard of it does.

Random schedules of it in all modes are in `test_properties`; here is what they do not show.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from anydepth import LLM, Sampling
from anydepth.engine.deferral import Deferral
from anydepth.engine.engine import Engine
from anydepth.engine.late import LateScheduler
from anydepth.engine.runner import Runner
from anydepth.engine.slots import Slots
from anydepth.models.nano.questions import questions
from anydepth.ops.kv import KVMap
from tests.engine.planting import Fault, notice
from tests.engine.schedules import VOCABULARY, Asked, Schedule, play
from tests.helpers import drain, twins

GATED = {"max_tokens": 12, "exit_policy": "gate_cdf", "exit_threshold": 0.5}
MODES = [("sync", {}), ("delayed", {"lateness": 2}), ("exact", {})]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed + 5 * n * n + 3 * n) % VOCABULARY for n in range(length))


def played(*asked: Asked, signals: str = "sync", late: int | None = None, squeezes: Any = (), **options: Any) -> None:
    """Requests in one engine equal their lone runs in the reference, and run no segment more than they must."""
    engine = {"max_batch": 3, "page_size": 4, "kv_pages": 40, "max_batched_tokens": 16, "signals": signals}
    engine |= {"pending_positions": None} | options
    changes = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "num_key_value_heads": 2}
    play(Schedule("looped", 2, changes, None, "float64", "deferred", (), engine, asked, late, squeezes))


def every(interval: int, length: int = 5, arrival: int = 0, **more: Any) -> Asked:
    return Asked(arrival, prompt(length), {"max_tokens": 14, "interval": interval, "shallow_depth": 2} | more)


@pytest.mark.parametrize("signals, options", MODES)
def test_blocks_of_several_requests_run_together(signals, options):
    """Staggered arrivals, another number of waiting positions each, and a batch that shrinks."""
    model, _ = twins(seed=2)
    engines = [Engine(model, fill=fill, signals=signals, **options) for fill in ("full", "deferred")]
    engines[1].work = []
    outputs = []
    for engine in engines:
        for n, interval in enumerate((2, 3, 4, 8)):
            engine.submit(prompt(4 + n), Sampling(max_tokens=12 - n, interval=interval, shallow_depth=1 + n % 3))
            engine.step()
        outputs.append(drain(engine))
    for id, full in outputs[0].items():
        deferred = outputs[1][id]
        assert (full.token_ids, full.depths) == (deferred.token_ids, deferred.depths)
        assert deferred.usage.segments_executed <= full.usage.segments_executed == 4 * full.usage.decode_tokens
    executed = [engine.stats()["usage"]["segments_executed"] for engine in engines]
    assert executed[1] < executed[0]
    assert any(turn.decode_rows > 4 for turn in engines[1].work)


def test_interval_1_is_never():
    llm = LLM("nano", fill="deferred", prefix_sharing=False)
    asked = [question.prompt for question in questions("validation", n=6)]
    every_token, never = (llm.generate(asked, Sampling(max_tokens=40, **s)) for s in ({"interval": 1}, {}))
    assert [(o.token_ids, o.depths, o.usage) for o in every_token] == [(o.token_ids, o.depths, o.usage) for o in never]
    assert llm.stats()["pending_peak"] == 0


@pytest.mark.parametrize(
    "settings", [{"exit_threshold": 0.5}, {"exit_threshold": 0.9}, {"interval": 4, "shallow_depth": 1}]
)
def test_nano_answers_as_under_full(settings):
    asked = [question.prompt for question in questions("validation", n=24)]
    ask = Sampling(max_tokens=60, logprobs="raw", **settings)
    full, deferred = (LLM("nano", fill=fill, max_batch=7).generate(asked, ask) for fill in ("full", "deferred"))
    for one, other in zip(full, deferred, strict=True):
        assert (one.token_ids, one.depths) == (other.token_ids, other.depths)
        assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_what_waits_is_dropped_with_the_request():
    """By length, by a stop id, and by an abort: nothing is run for positions that nobody will read."""
    model, _ = twins(seed=2)
    for signals, options in MODES:
        engine = Engine(model, fill="deferred", signals=signals, **options)
        engine.submit(prompt(5), Sampling(max_tokens=9, depth=1))
        (output,) = drain(engine).values()
        assert (output.usage.segments_executed, output.usage.segments_wasted) == (8, 0)
        stops = Sampling(max_tokens=9, interval=8, shallow_depth=1, stop_token_ids=(output.token_ids[4],))
        engine.submit(prompt(5), stops)
        (output,) = drain(engine).values()
        assert output.finish_reason == "stop" and output.usage.segments_executed == output.usage.decode_tokens
        request = engine.submit(prompt(5), Sampling(max_tokens=40, interval=30, shallow_depth=1))
        for _ in range(20):
            engine.step()
        assert engine.stats()["pending"] > 0
        engine.abort(request.id)
        (output,) = drain(engine).values()
        assert output.usage.segments_executed - output.usage.decode_tokens in (0, 1)  # a round whose token had not left
        assert engine.stats()["pending"] == 0


def test_states_that_wait_are_one_pool_of_the_stated_size():
    model, _ = twins(seed=2)
    engine = Engine(model, fill="deferred", max_batch=3, pending_positions=5)
    hidden, itemsize = model.shape.hidden, model.dtype.itemsize
    storage = engine.slots.h_Wd.untyped_storage()
    for length in (4, 9, 6):
        engine.submit(prompt(length), Sampling(max_tokens=20, interval=15, shallow_depth=1))
    while not engine.idle:
        engine.step()
        assert engine.stats()["pending"] <= 3 * 5
    stats = engine.stats()
    assert storage.nbytes() == stats["pending_pool_bytes"] == 3 * (5 + 1) * hidden * itemsize
    assert engine.slots.h_Wd.untyped_storage().data_ptr() == storage.data_ptr()  # no turn's tensor is kept instead
    assert 0 < stats["pending_peak"] <= 15 and stats["pending_peak_bytes"] == stats["pending_peak"] * hidden * itemsize
    assert stats["pending"] == 0


@pytest.mark.parametrize(("kind", "segments"), [("looped", None), ("layered", (1, 2, 4))])
@pytest.mark.parametrize(("signals", "options"), MODES)
def test_the_peak_is_of_all_requests_not_only_of_those_with_a_row_in_the_turn(kind, segments, signals, options):
    engine = Engine(twins(kind, seed=2, segments=segments)[0], fill="deferred", signals=signals, **options)
    for n in range(4):
        engine.submit(prompt(3 + n), Sampling(max_tokens=20, interval=6 + n, shallow_depth=1 + n % 2))
        engine.step()
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, engine.stats()["pending"])
    assert most <= engine.stats()["pending_peak"]


def test_a_long_block_does_not_hold_up_the_others():
    """Beside the tokens a turn runs no more waiting positions than it may run prompt positions."""
    model, _ = twins(seed=2, max_position_embeddings=128)
    engine = Engine(model, fill="deferred", max_batched_tokens=4)
    engine.work = []
    long = engine.submit(prompt(5), Sampling(max_tokens=32, interval=30, shallow_depth=1))
    for _ in range(27):
        engine.step()
    engine.submit(prompt(3), Sampling(max_tokens=40, depth=1))
    tokens = []
    while not engine.idle:
        tokens.append([chunk.request_id for chunk in engine.step()])
    assert max(turn.decode_rows for turn in engine.work) == 2 + 4
    caught_up = [n for n, turn in enumerate(engine.work[27:]) if turn.decode_rows > 2]
    assert len(caught_up) > 10 and all(any(id != long.id for id in tokens[n]) for n in caught_up[4:-1])


def test_a_request_brings_no_position_deeper_than_any_of_its_tokens_can_go():
    engine = Engine(twins(seed=2)[0], fill="deferred", pending_positions=2)
    for settings, deepest in ({"depth": 2}, 2), ({"exit_policy": "gate_cdf", "exit_threshold": 0.9, "max_depth": 3}, 3):
        engine.submit(prompt(4), Sampling(max_tokens=12, **settings))
        (output,) = drain(engine).values()
        assert output.usage.segments_executed <= deepest * output.usage.decode_tokens


@pytest.mark.parametrize(
    "options, message",
    [
        ({"fill": "deferred", "signals": "resident"}, "only the host knows which positions wait"),
        ({"fill": "deferred", "pending_positions": 0}, "pending_positions is 0; allowed: whole numbers from 1"),
        ({"fill": "full", "pending_positions": 8}, "under fill 'full' no position waits: leave it out"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(options, message):
    with pytest.raises(ValueError, match=message):
        Engine(twins()[0], **options)


def test_bits_do_not_depend_on_the_batch():
    model, _ = twins(seed=2, dtype=torch.float32, gentle=True)
    ask = Sampling(max_tokens=12, interval=4, shallow_depth=1, logprobs="raw")

    def answers(*lengths):
        engine = Engine(model, fill="deferred", batch_invariant=True, max_batched_tokens=7)
        return list(drain(engine, [engine.prepare(prompt(length, length), ask) for length in lengths]).values())

    alone, beside = answers(5)[0], {len(o.prompt_ids): o for o in answers(4, 5, 9, 6)}[5]
    assert (alone.token_ids, alone.logprobs) == (beside.token_ids, beside.logprobs)


def no_tail() -> None:
    """A request that ends by its length runs nothing for what waited."""
    engine = Engine(twins(seed=2)[0], fill="deferred", signals="exact", pending_positions=3)
    engine.submit(prompt(5), Sampling(max_tokens=8, interval=4, shallow_depth=1))
    (output,) = drain(engine).values()
    assert output.usage.segments_wasted == 0


intervals = partial(played, every(4))
capped = partial(played, every(9), pending_positions=2)

FAULTS = {
    "waiting positions run at the token's position": Fault(
        Runner, "run", "h_Nd = self.model.segment(",
        "kv.positions = kv.positions if prefill else kv.positions.clamp(min=int(kv.positions.max()));"
        "h_Nd = self.model.segment(",
        intervals,
    ),
    "a block is not causal": Fault(KVMap, "chunk", "if rows > 1 else", "if rows > 1 and start == 0 else", intervals),
    "blocks of equal length are not causal": Fault(
        KVMap, "together", "torch.where(seen_BnT,", "torch.where(seen_BnT[:, -1:].expand_as(seen_BnT),",
        partial(played, every(4), every(4, 7), prefix_sharing=False),
    ),
    "a tail is run after the end": Fault(
        LateScheduler, "_leave", "if s.issued < s.request.max_tokens:", "if True:", no_tail,
        also=(LateScheduler, "_goes", "return False", "return bool(s.catching_up)"),
    ),
    "the state of a row that left is not kept": Fault(Runner, "run", "or self.fill.defers", "or False", intervals),
    "a position's state is another's": Fault(
        Slots, "place", "position % self.states_per_slot", "position % max(1, self.states_per_slot - 1)", capped
    ),
    "more wait than there is room for": Fault(Deferral, "left", ">= self.most", ">= self.most + 2", capped),
    "waiting positions are caught up at once": Fault(
        Deferral, "left", ">= self.most", ">= 1", partial(played, Asked(0, prompt(6), GATED))
    ),
    "one state of a preempted request is saved": Fault(
        Slots, "rows", "self.h_Wd.view(len(self), -1)", "self.h_Wd",
        partial(played, every(4), every(6, 7), squeezes=((9, 0), (9, 0))),
    ),
    "a block that is cut short gives a token": Fault(
        Deferral, "_row", "read = 0", "pass", partial(played, every(6), max_batched_tokens=2)
    ),
    "the next continuation builds on the one before": Fault(
        Deferral, "left", "if s.issued == 0:", "if False:",
        partial(played, Asked(0, prompt(5), {"interval": 3, "shallow_depth": 1}, forced=(prompt(7), prompt(6, 1)))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_guard_is_noticed(name, monkeypatch, tmp_path):
    notice(FAULTS[name], monkeypatch, tmp_path)
