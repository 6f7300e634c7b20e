"""Bad input is a ValueError that says what was given, what is allowed and what to do, before any work is done; the
engine and everybody else's requests go on as if nothing had been asked."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch

from anydepth.engine.engine import Engine
from anydepth.ops.fill import FILLS
from anydepth.reference.model import Model as Reference
from anydepth.types import Sampling
from tests.helpers import Watch, assert_empty, drain, expected, poison, twins

PROMPT = [5, 33, 12, 7]

SAMPLING = [
    ({"max_token": 3}, "unknown option of Sampling 'max_token'; did you mean 'max_tokens'"),
    ({"temprature": 1.0}, "did you mean 'temperature'"),
    ({"interval": 0, "shallow_depth": 1}, "interval is 0; allowed: whole numbers from 1"),
    ({"shallow_depth": 2}, "shallow_depth is 2, but no interval is given; give interval=n too"),
    ({"profile": "p"}, "profile is 'p', which exit_policy None does not read"),
    ({"max_tokens": 0}, "max_tokens is 0; allowed: whole numbers from 1"),
    ({"max_tokens": 2.0}, "max_tokens is 2.0; allowed: whole numbers from 1"),
    ({"max_tokens": True}, "max_tokens is True"),
    ({"temperature": -0.1}, "temperature is -0.1; allowed: numbers from 0"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": "hot"}, "temperature is 'hot'"),
    ({"top_k": 0}, "top_k is 0; allowed: whole numbers from 1"),
    ({"top_p": 0.0}, "top_p is 0; allowed: above 0"),
    ({"top_p": 1.5}, "top_p is 1.5; allowed: numbers from 0 to 1"),
    ({"seed": -1}, "seed is -1"),
    ({"seed": 2**64}, "seed is 18446744073709551616; allowed: 0 .. 2**64 - 1"),
    ({"n": 0}, "n is 0"),
    ({"stop": ""}, "stop holds ''; allowed: non-empty strings"),
    ({"stop": ["a", 3]}, "stop holds 3"),
    ({"stop": 3}, "stop is 3; allowed: a list of strings"),
    ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
    ({"stop_token_ids": 3}, "stop_token_ids is 3; allowed: a list of token ids"),
    ({"logprobs": "all"}, "logprobs is 'all'; allowed: None, 'raw', 'processed'"),
    ({"logprobs": 5}, "logprobs is 5"),
    ({"exit_threshold": 1.01}, "exit_threshold is 1.01; allowed: numbers from 0 to 1"),
    ({"exit_threshold": -0.5}, "exit_threshold is -0.5"),
    ({"exit_threshold": None}, "exit_threshold is None"),
    ({"exit_policy": 3}, "exit_policy is 3; allowed: a policy's name"),
    ({"min_depth": 0}, "min_depth is 0; allowed: whole numbers from 1"),
    ({"max_depth": 0}, "max_depth is 0"),
    ({"depth": 1.5}, "depth is 1.5"),
    ({"trace": [4, 0]}, "trace is 0; allowed: whole numbers from 1"),
    ({"trace": 4}, "trace is 4; allowed: a list of depths"),
    ({"first_token": "free"}, "first_token is 'free'; allowed: 'prefill', 'policy'"),
]


@pytest.mark.parametrize("options, message", SAMPLING, ids=range(len(SAMPLING)))
def test_settings_that_no_model_can_honour(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Sampling(**options)


REQUESTS = [  # (kind of model, prompt, settings, message)
    ("looped", [], {}, "the prompt is empty; give at least one token"),
    ("looped", [1, 61], {}, "the prompt has 61 at index 1; allowed: token ids 0 .. 60"),
    ("looped", [-1], {}, "the prompt has -1 at index 0"),
    ("looped", [1, 2.0], {}, "the prompt has 2.0 at index 1"),
    ("looped", ["a"], {}, "the prompt has 'a' at index 0"),
    ("looped", [True], {}, "the prompt has True at index 0"),
    ("looped", 7, {}, "the prompt is 7; allowed: a string or a list of token ids"),
    ("looped", None, {}, "the prompt is None"),
    ("looped", "hello", {}, "the prompt is a string, but this checkpoint has no tokenizer; give token ids"),
    ("looped", [1] * 129, {}, "the prompt has 129 tokens; this model's length is 128: shorten the prompt"),
    ("looped", [1] * 30, {"max_tokens": 3}, "may need 32 K/V positions, 8 pages of 4; the pool has 7: raise kv_pages"),
    ("looped", PROMPT, {"max_tokens": 26}, "may need 29 K/V positions"),
    (
        "looped",
        PROMPT,
        {"stop": "x"},
        "stop strings need a tokenizer, which this checkpoint has not; use stop_token_ids",
    ),
    ("looped", PROMPT, {"exit_policy": "gate"}, "unknown exit_policy 'gate'; did you mean 'gate_cdf'"),
    ("looped", PROMPT, {"exit_policy": "base"}, "unknown exit_policy 'base'"),
    ("looped", PROMPT, {"exit_policy": "no.such:Policy"}, "exit_policy 'no.such:Policy' cannot be loaded"),
    ("looped", PROMPT, {"exit_policy": "json:JSONDecoder"}, "cannot be loaded (it is no anydepth.exits.base.Policy)"),
    ("looped", PROMPT, {"min_depth": 5}, "min_depth is 5; this model has 4 segments, allowed: 1 .. 4"),
    ("looped", PROMPT, {"max_depth": 5}, "max_depth is 5; this model has 4 segments"),
    ("looped", PROMPT, {"depth": 5}, "depth is 5; this model has 4 segments"),
    ("layered", PROMPT, {"depth": 4}, "depth is 4; this model has 3 segments"),
    ("looped", PROMPT, {"min_depth": 3, "max_depth": 2}, "min_depth 3 is above max_depth 2"),
    ("looped", PROMPT, {"max_depth": 3}, "policy 'never' reads at depth 4, which min_depth=1, max_depth=3 exclude"),
    ("looped", PROMPT, {"depth": 1, "min_depth": 2}, "policy 'fixed' reads at depth 1"),
    ("looped", PROMPT, {"exit_policy": "fixed"}, "policy 'fixed' needs depth=1 .. 4"),
    ("looped", PROMPT, {"exit_policy": "trace"}, "policy 'trace' needs trace=[...]"),
    ("looped", PROMPT, {"exit_policy": "interval"}, "policy 'interval' needs interval=n"),
    (
        "looped",
        PROMPT,
        {"interval": 2},
        "shallow_depth is None; policy 'interval' reads the tokens between at a depth of",
    ),
    ("looped", PROMPT, {"interval": 2, "shallow_depth": 4}, "shallow_depth is 4"),
    ("looped", PROMPT, {"interval": 2, "shallow_depth": 1, "min_depth": 2}, "policy 'interval' reads at depth 1"),
    ("looped", PROMPT, {"interval": 2, "shallow_depth": 1, "depth": 2}, "contradict each other"),
    ("looped", PROMPT, {"trace": (4, 1), "max_tokens": 3}, "trace has 2 depths, but the request may produce 3 tokens"),
    ("looped", PROMPT, {"trace": (), "max_tokens": 3}, "trace has 0 depths"),
    ("looped", PROMPT, {"trace": (3, 1), "max_tokens": 2}, "trace[0] is 3; the first token comes from the full-depth"),
    ("looped", PROMPT, {"trace": (4, 5), "max_tokens": 2}, "trace[1] is 5; allowed: 1 .. 4"),
    ("looped", PROMPT, {"trace": (4, 1), "min_depth": 2, "max_tokens": 2}, "trace[1] is 1; allowed: 2 .. 4"),
    ("layered", PROMPT, {"exit_threshold": 0.5}, "needs an exit gate, which this model has not; allowed here: 'never'"),
    ("layered", PROMPT, {"exit_policy": "gate_cdf"}, "needs an exit gate"),
    ("looped", PROMPT, {"depth": 2, "exit_threshold": 0.5}, "depth= and exit_threshold= contradict each other"),
    ("looped", PROMPT, {"depth": 2, "trace": (4, 1)}, "depth= and trace= contradict each other"),
    ("looped", PROMPT, {"exit_policy": "never", "depth": 2}, "exit_policy='never' and depth= contradict each other"),
    ("looped", PROMPT, {"exit_policy": "never", "exit_threshold": 0.5}, "exit_policy='never' and exit_threshold="),
    ("looped", PROMPT, {"exit_policy": "gate_cdf", "trace": (4,)}, "exit_policy='gate_cdf' and trace="),
    ("looped", PROMPT, {"n": 2, "max_tokens": 3}, "n is 2; submit makes one answer, LLM.generate makes n"),
]


@pytest.mark.parametrize("kind, prompt, settings, message", REQUESTS, ids=range(len(REQUESTS)))
def test_a_request_that_cannot_be_honoured_leaves_the_others_unharmed(kind, prompt, settings, message):
    """Submitted in the middle of another request's run, which then ends as it would have alone."""
    reference, engine, watch = busy_engine(kind)
    before = snapshot(engine)
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.submit(prompt, Sampling(**settings))
    assert snapshot(engine) == before
    assert_goes_on(reference, engine, watch)


def busy_engine(kind="looped") -> tuple[Reference, Engine, Watch]:
    model, reference = twins(kind, seed=3, segments=None if kind == "looped" else (1, 2, 4))
    engine = poison(Engine(model, page_size=4, kv_pages=7, max_batch=2))
    watch = Watch(engine)
    engine.submit(PROMPT, Sampling(max_tokens=6), id="other")
    for _ in range(6):
        engine.step()
    return reference, engine, watch


def snapshot(engine: Engine) -> tuple:
    return engine.pages.in_use, list(engine.scheduler.running), list(engine.scheduler.sequences), engine.scheduler.turn


def assert_goes_on(reference, engine, watch):
    """The request under way ends as alone, and so does a new one."""
    output = drain(engine)["other"]
    lone = expected(reference, (PROMPT, {"max_tokens": 6}), fill=engine.fill.name)
    assert (list(output.token_ids), list(output.depths)) == (lone.token_ids, lone.depths)
    for got, wanted in zip(watch.of("other"), lone.logits, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    (output,) = drain(engine, [engine.prepare([1, 2], Sampling(max_tokens=3))]).values()
    assert list(output.token_ids) == expected(reference, ([1, 2], {"max_tokens": 3}), fill=engine.fill.name).token_ids


@pytest.mark.parametrize(
    "context, forced, settings, message",
    [
        (PROMPT, [[1], []], {}, "the continuation is empty; give at least one token"),
        (PROMPT, [[1, 99]], {}, "the continuation has 99 at index 1; allowed: token ids 0 .. 60"),
        (PROMPT, [[1, 2.5]], {}, "the continuation has 2.5 at index 1"),
        (PROMPT, ["ab"], {}, "the continuation is 'ab'; allowed: a string or a list of token ids"),
        ([1] * 100, [[1] * 30], {}, "the continuation has 30 tokens after a context of 100; the model's length of 128"),
        ([1] * 26, [[1] * 4], {}, "may need 29 K/V positions"),
        (PROMPT, [[1, 2, 3]], {"trace": (1, 1)}, "trace has 2 depths, but the request may produce 3 tokens"),
        ([], [[1]], {}, "the prompt is empty"),
    ],
)
def test_scores_that_cannot_be_made(context, forced, settings, message):
    reference, engine, watch = busy_engine()
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.submit(engine.prepare(context, Sampling(**settings), forced=forced))
    assert_goes_on(reference, engine, watch)


def test_a_trace_for_scoring_may_begin_at_any_depth():
    """None of its entries is forced to R: the context's last token is a decode row."""
    model, _ = twins(seed=3)
    engine = Engine(model)
    engine.submit(engine.prepare(PROMPT, Sampling(trace=(1, 2)), forced=[[4, 5]]))
    (score,) = [chunk.score for _ in range(9) for chunk in engine.step() if chunk.score]
    assert score.depths == (1, 2)


def test_a_trace_under_max_depth_still_begins_at_full_depth():
    """The first token comes from the prefill, which no bound concerns."""
    model, _ = twins(seed=3)
    engine = Engine(model)
    (output,) = drain(engine, [engine.prepare(PROMPT, Sampling(trace=(4, 2), max_depth=2, max_tokens=2))]).values()
    assert output.depths == (4, 2)


def test_an_id_in_use_is_refused_while_it_is():
    """While it runs and while it waits; when it has ended it is free."""
    reference, engine, watch = busy_engine()
    engine.submit(PROMPT, Sampling(max_tokens=20), id="waits")  # there are no pages left for it
    assert [sequence.request.id for sequence in engine.scheduler.waiting] == ["waits"]
    for id in ("other", "waits"):
        with pytest.raises(ValueError, match=f"request id '{id}' is in use; give another or abort the first"):
            engine.submit(PROMPT, Sampling(max_tokens=1), id=id)
    assert_goes_on(reference, engine, watch)
    engine.submit(PROMPT, Sampling(max_tokens=1), id="other")
    assert drain(engine)["other"].finish_reason == "length"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_batches": 3}, "unknown option of Engine 'max_batches'; did you mean 'max_batch'"),
        ({"max_batch": 0}, "max_batch is 0; allowed: whole numbers from 1"),
        ({"page_size": 2.0}, "page_size is 2.0"),
        ({"kv_pages": 0}, "kv_pages is 0; allowed: whole numbers from 1"),
        ({"kv_pages": -1}, "kv_pages is -1"),
        ({"max_batched_tokens": True}, "max_batched_tokens is True"),
        ({"fill": "lastexited"}, "unknown fill 'lastexited'; did you mean 'last_exited'"),
        ({"gate_dtype": "float16"}, "gate_dtype is 'float16'; allowed: 'float32', 'bfloat16'"),
    ],
)
def test_engine_options(options, message):
    model, _ = twins()
    with pytest.raises(ValueError, match=re.escape(message)):
        Engine(model, **options)


@pytest.mark.parametrize("kind, fill", [("layered", "last_exited"), ("layered", "shared"), ("looped", "project")])
def test_a_fill_that_the_model_has_not_is_refused_naming_those_it_has(kind, fill):
    model, _ = twins(kind, segments=(2, 4) if kind == "layered" else None)
    fits = set()
    for name in FILLS:
        with contextlib.suppress(ValueError):
            fits.add(Engine(model, fill=name).fill.name)
    with pytest.raises(
        ValueError, match=rf"fill '{fill}' is for (looped|layered) models; .* {kind}, allowed: "
    ) as said:
        Engine(model, fill=fill)
    assert {*re.findall(r"'(\w+)'", str(said.value).split("allowed")[1])} == fits


def test_sampling_must_be_a_sampling():
    model, _ = twins()
    with pytest.raises(ValueError, match="allowed: a Sampling"):
        Engine(model).submit(PROMPT, {"max_tokens": 3})


@pytest.mark.parametrize("turn", range(12))
@pytest.mark.parametrize("kind", ["looped", "layered"])
def test_an_error_inside_a_turn_ends_what_was_running(kind, turn, monkeypatch):
    """The caller sees the error; each running request ends once, as a prefix of its lone run, the one that waits for a
    slot is answered; nothing is held; the engine and its pool serve the next request as if new."""
    model, reference = twins(kind, seed=3, segments=None if kind == "looped" else (1, 2, 4))
    engine = poison(Engine(model, page_size=4, max_batch=2, max_batched_tokens=3))
    watch = Watch(engine)
    asks = {"a": (PROMPT, {"max_tokens": 5}), "b": ([9] * 7, {"max_tokens": 4, "depth": 1}), "c": ([3], {})}
    for id, (prompt, settings) in asks.items():
        engine.submit(prompt, Sampling(**settings), id=id)
    for _ in range(turn):
        engine.step()
    running = set(engine.scheduler.running) or {"a", "b"}
    segment = model.segment

    def fails_once(*args):
        monkeypatch.setattr(model, "segment", segment)
        segment(*args)  # half of its work is done: K/V is written
        raise RuntimeError("out of luck")

    monkeypatch.setattr(model, "segment", fails_once)
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()
    ends = {}
    while not engine.idle:
        ends |= {chunk.request_id: chunk.output for chunk in engine.step() if chunk.output}
    assert_empty(engine)
    assert running <= ends.keys()
    for id in ends:
        lone = expected(reference, asks[id], fill=engine.fill.name)
        assert ends[id].finish_reason == ("error" if id in running else lone.finish_reason)
        assert list(ends[id].token_ids) == lone.token_ids[: len(ends[id].token_ids)]
    engine.submit(PROMPT, Sampling(max_tokens=6), id="other")
    watch.logits.clear()
    assert_goes_on(reference, engine, watch)


def test_an_error_while_a_request_is_seated_leaves_the_engine_usable(monkeypatch):
    model, reference = twins(seed=3)
    engine = poison(Engine(model, page_size=4))
    watch = Watch(engine)
    embed = model.embed

    def fails_once(ids):
        monkeypatch.setattr(model, "embed", embed)
        raise RuntimeError("out of luck")

    monkeypatch.setattr(model, "embed", fails_once)
    engine.submit(PROMPT, id="first")
    with pytest.raises(RuntimeError):
        engine.step()
    assert [chunk.finish_reason for chunk in engine.step()] == ["error"]
    engine.submit(PROMPT, Sampling(max_tokens=6), id="other")
    assert_goes_on(reference, engine, watch)


def test_a_request_is_submitted_once():
    """Its text stream has been spoken; a second answer needs a request of its own."""
    engine = Engine(twins(seed=3)[0])
    request = engine.submit(PROMPT, Sampling(max_tokens=2))
    while not engine.idle:
        engine.step()
    with pytest.raises(ValueError, match="submitted before"):
        engine.submit(request)
    assert engine.idle


def test_an_abort_in_the_middle_of_a_turn_waits_for_its_end(monkeypatch):
    """As when the garbage collector closes a forgotten stream while somebody else steps."""
    model, reference = twins(seed=3)
    engine = poison(Engine(model, page_size=4))
    engine.submit(PROMPT, Sampling(max_tokens=6), id="forgotten")
    engine.submit(PROMPT, Sampling(max_tokens=6), id="kept")
    cut = engine.scheduler._cut_chunks

    def closes():
        engine.abort("forgotten")
        cut()

    monkeypatch.setattr(engine.scheduler, "_cut_chunks", closes)
    ends = {}
    while not engine.idle:
        ends |= {chunk.request_id: chunk.output for chunk in engine.step() if chunk.output}
    assert ends["forgotten"].finish_reason == "abort"
    assert (
        list(ends["kept"].token_ids) == expected(reference, (PROMPT, {"max_tokens": 6}), fill="last_exited").token_ids
    )


@pytest.mark.parametrize("sampling", [{}, 0, {"a": 1}])
def test_what_is_no_sampling_is_refused(sampling):
    with pytest.raises(ValueError, match="allowed: a Sampling"):
        Engine(twins(seed=3)[0]).prepare(PROMPT, sampling)


@pytest.mark.parametrize("more", [{"priority": 1}, {"id": "x"}, {"sampling": Sampling()}])
def test_a_prepared_request_takes_no_more_settings(more):
    engine = Engine(twins(seed=3)[0])
    with pytest.raises(ValueError, match="has its sampling, id and priority; give them to prepare"):
        engine.submit(engine.prepare(PROMPT), **more)
