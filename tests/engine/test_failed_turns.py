"""A turn that raises, where outcomes come late, prompts are shared, and others have given way."""

from __future__ import annotations

import pytest

from anydepth.engine.engine import Engine
from anydepth.types import Sampling
from tests.engine.schedules import VOCABULARY, Letters
from tests.helpers import assert_empty, expected, poison, twins

MODES = ["sync", "delayed", "exact", "resident"]
PROMPT = [5, 13, 12, 7, 8, 9, 1, 2, 3]
GATED = {"exit_policy": "gate_cdf", "exit_threshold": 0.5}


def run_out(engine, most=300):
    """Step to the end, whatever is raised; how each request ended."""
    ends = {}
    for _ in range(most):
        if engine.idle:
            assert_empty(engine)
            return ends
        try:
            ends |= {chunk.request_id: chunk.output for chunk in engine.step() if chunk.output}
        except RuntimeError as error:
            assert str(error) == "out of luck"
    raise AssertionError(f"still running: {list(engine.scheduler.sequences)}")


def fails_once(owner, name, at=1, after=False):
    """From now on the `at`-th call raises, once."""
    real, calls = getattr(owner, name), []

    def called(*args):
        calls.append(1)
        if len(calls) != at:
            return real(*args)
        setattr(owner, name, real)
        if after:
            real(*args)
        raise RuntimeError("out of luck")

    setattr(owner, name, called)


@pytest.mark.parametrize("turn", range(0, 24, 2))
@pytest.mark.parametrize("signals", MODES[1:])
def test_an_error_in_a_late_mode_ends_what_was_running(signals, turn):
    """Each ends as a prefix of its lone run, and the engine serves the next request as if new."""
    model, reference = twins(seed=3, vocab_size=VOCABULARY)
    engine = poison(Engine(model, page_size=4, max_batch=2, max_batched_tokens=3, signals=signals))
    asks = {
        "a": (PROMPT[:4], {"max_tokens": 8, **GATED}),
        "b": ([9] * 7, {"max_tokens": 4, "depth": 1}),
        "c": ([3], {}),
    }
    for id, (prompt, settings) in asks.items():
        engine.submit(prompt, Sampling(**settings), id=id)
    for _ in range(turn):
        engine.step()
    fails_once(model, "segment", after=True)
    ends = run_out(engine)
    asks["again"] = asks["a"]
    engine.submit(asks["again"][0], Sampling(**asks["again"][1]), id="again")
    ends |= run_out(engine)
    for id, output in ends.items():
        prompt, settings = asks[id]
        late = {"delayed": True} if signals == "delayed" else {}
        lone = expected(reference, (prompt, settings | late), fill="last_exited").token_ids
        assert list(output.token_ids) == lone[: len(output.token_ids)]
        assert output.finish_reason == "error" or len(output.token_ids) == len(lone)


@pytest.mark.parametrize("turn", range(8))
@pytest.mark.parametrize("signals", MODES)
def test_a_prompt_whose_turn_failed_is_not_known(signals, turn):
    """What the failed turn was to write is in no page."""
    model, reference = twins(seed=3, vocab_size=VOCABULARY)
    engine = poison(Engine(model, page_size=4, signals=signals))
    engine.submit(PROMPT, Sampling(max_tokens=6), id="first")
    for _ in range(turn):
        engine.step()
    fails_once(model, "segment")
    run_out(engine)
    engine.submit(PROMPT, Sampling(max_tokens=6), id="again")
    lone = expected(reference, (PROMPT, {"max_tokens": 6}), fill="last_exited")
    assert list(run_out(engine)["again"].token_ids) == lone.token_ids


@pytest.mark.parametrize("turn", range(6, 14))
@pytest.mark.parametrize("signals", MODES)
def test_who_waits_for_an_outcome_that_was_lost_ends_too(signals, turn):
    """It gave way to another as the turn failed that brought the outcome."""
    model, _ = twins(seed=3, vocab_size=VOCABULARY)
    engine = Engine(model, page_size=4, max_batch=1, signals=signals)
    engine.submit([5, 3, 2], Sampling(max_tokens=8, **GATED), id="low")
    for _ in range(turn):
        engine.step()
    engine.submit([7, 7], Sampling(max_tokens=6), id="high", priority=1)
    fails_once(engine.scheduler, "update")
    assert run_out(engine).keys() == {"low", "high"}


@pytest.mark.parametrize("signals", MODES)
def test_who_ended_before_it_failed_is_heard(signals):
    """In one turn the first answer ends, and the second one's text raises."""
    model, _ = twins(seed=3, vocab_size=VOCABULARY)
    engine = Engine(model, tokenizer=Letters(), page_size=4, signals=signals)
    engine.submit([5, 3, 2], Sampling(max_tokens=3), id="a")
    fails_once(engine.submit([7, 7], Sampling(max_tokens=6), id="b").text, "push", at=3)
    ends = run_out(engine)
    assert ends.keys() == {"a", "b"} and ends["b"].finish_reason == "error"


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("signals", MODES)
def test_a_tokenizer_that_goes_on_failing_holds_nothing(signals, streaming):
    """The text that was held back cannot be had as the requests end, and they end all the same."""
    model, _ = twins(seed=3, vocab_size=VOCABULARY)
    tokenizer = Letters()
    engine = Engine(model, tokenizer=tokenizer, page_size=4, max_batch=2, signals=signals)
    for n in range(4):
        engine.submit(engine.prepare([5, 3, 2 + n], Sampling(max_tokens=6), id=str(n), streaming=streaming))
    for _ in range(9):
        engine.step()

    def decode(ids):
        raise RuntimeError("out of luck")

    for sequence in engine.scheduler.sequences.values():
        sequence.request.text._decode = decode
    engine.abort("1")
    ends = run_out(engine)
    assert {id: output.finish_reason for id, output in ends.items()} == {**dict.fromkeys("023", "error"), "1": "abort"}
    assert engine.stats()["finished"] == {"error": 3, "abort": 1}


def test_an_end_that_a_failed_turn_was_to_tell_is_told_by_the_next():
    """Turn after turn fails: whoever waits for an answer must hear of its end all the same."""
    engine = Engine(twins(seed=3, vocab_size=VOCABULARY)[0], page_size=4)
    engine.submit([5, 3, 2], Sampling(), id="aborted")
    engine.submit([5, 3, 2], Sampling(), id="fails")
    engine.step()
    engine.abort("aborted")
    fails_once(engine.model, "segment")
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    engine.submit([5, 3], Sampling(), id="next")
    fails_once(engine.model, "segment")
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    ends = {chunk.request_id: chunk.finish_reason for chunk in engine.step()}
    assert ends == {"aborted": "abort", "fails": "error", "next": "error"}
    assert engine.stats()["finished"] == {"abort": 1, "error": 2} and engine.idle
