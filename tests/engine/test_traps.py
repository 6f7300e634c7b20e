"""The traps an engine of this kind falls into, one test each."""

from __future__ import annotations

import json
import math
from random import Random
from types import SimpleNamespace

import pytest
import torch

from anydepth.engine.engine import Engine
from anydepth.engine.llm import LLM
from anydepth.engine.sampling import Settings, processed
from anydepth.engine.text import TextStream
from anydepth.exits import gate_cdf
from anydepth.types import Sampling
from tests.equality import assert_equal
from tests.helpers import Watch, assert_lone_runs, drain, expected, planes_of, poison, twins
from tests.models.checkpoints import write_folder, write_tokenizer

FILLS = ["full", "last_exited", "shared"]
PROMPTS = {length: Random(length).choices(range(61), k=length) for length in (3, 7, 12)}


def logit(hazard: float) -> float:
    return math.log(hazard / (1 - hazard)) if hazard else -math.inf


def depth_left_at(hazards, tau, low):
    """Where gate_cdf leaves, asked round by round as the runner asks."""
    policy, segments = gate_cdf.Policy(), len(hazards)
    numbers = policy.parameters(Sampling(exit_threshold=tau), (low, segments), segments)
    state = policy.start(torch.tensor([numbers], dtype=torch.float64))
    for depth, hazard in enumerate(hazards, start=1):
        leave, state = policy.decide(state, torch.tensor([depth]), torch.tensor([logit(hazard)], dtype=torch.float64))
        if leave.item():
            return depth
    raise AssertionError("it never left")


def in_engine(hazards, fill="last_exited", **settings):
    """Depth of a token whose gate says these hazards, in an engine."""
    model, _ = twins(total_ut_steps=len(hazards))
    model.signal = lambda k, h: torch.full((len(h),), logit(hazards[k - 1]), dtype=h.dtype)
    engine = poison(Engine(model, fill=fill))
    (output,) = drain(engine, [engine.prepare([1, 2, 3], Sampling(max_tokens=2, **settings))]).values()
    return output.depths[1]


@pytest.mark.parametrize("fill", FILLS)
def test_01_the_cdf_runs_over_the_rounds_below_min_too(fill):
    """1 - .7 * .7 = .51 reaches .5 at depth 2; a hazard of .9 in round 1 has done so already, whatever round 2 says."""
    for hazards in ((0.3, 0.3, 0.0, 0.0), (0.9, 0.0, 0.0, 0.0)):
        assert depth_left_at(hazards, 0.5, low=2) == 2
        assert in_engine(hazards, fill, exit_threshold=0.5, min_depth=2) == 2


@pytest.mark.parametrize("fill", FILLS)
def test_02_a_gate_that_never_fires_means_full_depth(fill):
    """The argmax of a mask without a True is 0, which would be a silent depth 1."""
    assert depth_left_at((0.0, 0.0, 0.0, 0.0), 0.5, low=1) == 4
    assert in_engine((0.0, 0.0, 0.0, 0.0), fill, exit_threshold=0.5) == 4
    assert in_engine((0.0, 0.0, 0.0, 0.0), fill, exit_threshold=0.5, max_depth=3) == 3


@pytest.mark.parametrize("fill", FILLS)
def test_03_three_prompts_alone_and_together(fill):
    pair = twins(seed=4)
    asks = [(prompt, {"max_tokens": 9, "exit_threshold": 0.5}) for prompt in PROMPTS.values()]
    for ask in asks:
        assert_lone_runs(pair, [ask], fill=fill)
    assert_lone_runs(pair, asks, fill=fill)


@pytest.mark.parametrize(
    "kind, segments, fill",
    [("looped", None, "full"), ("looped", None, "last_exited"), ("layered", (1, 2, 4), "full")],
)
def test_04_teacher_forced_readout_equals_the_truncated_model(kind, segments, fill):
    """At every depth, the logits of positions 0, 5 and 63 are those of the model without its deeper segments."""
    model, reference = twins(kind, seed=4, segments=segments)
    ids = [(7 * n * n + 3 * n) % 61 for n in range(65)]
    for depth in range(1, reference.segments + 1):
        engine = poison(Engine(model, fill=fill, page_size=4))
        watch = Watch(engine)
        drain(engine, [engine.prepare(ids[:1], Sampling(depth=depth), forced=[ids[1:]], id="a")])
        truncated = reference.truncated_logits(ids[:-1], depth)
        for position in (0, 5, 63):
            torch.testing.assert_close(watch.of("a")[position], truncated[position], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("page_size, max_batched_tokens", [(1, 1), (2, 3), (3, 512), (4, 2), (16, 5)])
@pytest.mark.parametrize("fill", FILLS)
def test_05_early_and_deep_rows_side_by_side_swap_roles(fill, page_size, max_batched_tokens):
    """Neighbours leave at 1 and 4 by turns, across page and chunk edges."""
    asks = [
        (PROMPTS[7], {"max_tokens": 10, "trace": (4, *[1, 4, 4] * 3)}),
        (PROMPTS[7], {"max_tokens": 10, "trace": (4, *[4, 1, 1] * 3)}),
        (PROMPTS[3], {"max_tokens": 10, "trace": (4, *[2, 3, 1] * 3)}),
    ]
    assert_lone_runs(twins(seed=4), asks, fill=fill, page_size=page_size, max_batched_tokens=max_batched_tokens)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("gate_dtype", ["float32", "bfloat16"])
def test_06_state_follows_the_request_and_not_its_slot(fill, gate_dtype):
    """Two slots, six requests of unlike lengths: running products, snapshots and seeds are not the former tenant's."""
    pair = twins(seed=4)
    asks = [
        (PROMPTS[3], {"max_tokens": 3, "exit_threshold": 0.9}),
        (PROMPTS[12], {"max_tokens": 12, "exit_threshold": 0.3, "temperature": 1.0, "seed": 1}),
        (PROMPTS[7], {"max_tokens": 4, "exit_threshold": 0.5, "min_depth": 2}),
        (PROMPTS[3], {"max_tokens": 5, "exit_threshold": 0.6, "temperature": 2.0, "seed": 2, "top_k": 3}),
        (PROMPTS[7], {"max_tokens": 6, "exit_threshold": 0.1, "first_token": "policy"}),
        (PROMPTS[7], {"max_tokens": 6, "depth": 2, "temperature": 1.0, "seed": 1}),
    ]
    assert_lone_runs(pair, asks, fill=fill, max_batch=2, gate_dtype=gate_dtype)


@pytest.mark.parametrize("fill", FILLS)
def test_07_padding_writes_nothing_and_asks_nothing(fill):
    """Rows of unlike length share turns: exactly their own positions are written, the null page stays zero, and every
    signal and readout belongs to a row."""
    model, reference = twins(seed=4)
    engine = Engine(model, fill=fill, page_size=4, kv_pages=16, max_batch=4)
    pool, engine.work = engine.slots.pool, []
    pool.data[:, :, pool.page_size :] = math.nan
    asks = [(prompt, {"max_tokens": 4, "exit_threshold": 0.5}) for prompt in PROMPTS.values()]
    requests = [engine.submit(prompt, Sampling(**settings)) for prompt, settings in asks]
    engine.step()
    pages = {request.id: engine.scheduler.running[request.id].pages for request in requests}
    outputs = drain(engine)
    unwritten = torch.ones(pool.data.shape[2], dtype=torch.bool)
    unwritten[: pool.page_size] = False
    for request in requests:
        positions = len(request.prompt_ids) + 3
        for plane in engine.slots.map.storage(pages[request.id]).view(pool.planes, -1):
            unwritten[plane[:positions]] = False
        assert not any(x.isnan().any() for pair in planes_of(engine, pages[request.id], positions) for x in pair)
    assert pool.data[:, :, unwritten].isnan().all()
    assert (pool.data[:, :, : pool.page_size] == 0).all()
    lone = [expected(reference, ask, fill=fill) for ask in asks]
    asked = sum(3 if fill == "full" else min(depth, 3) for result in lone for depth in result.depths[1:])
    assert sum(turn.signal_rows for turn in engine.work) == asked
    assert sum(turn.readout_rows for turn in engine.work) == sum(len(o.token_ids) for o in outputs.values()) == 12


@pytest.mark.parametrize("steps", range(0, 14, 2))
def test_08_the_same_id_again_right_after_an_abort(steps):
    """Whatever the first "a" left behind in its slot, the second is a run of its own."""
    model, reference = twins(seed=4)
    settings = {"max_tokens": 6, "exit_threshold": 0.5}
    engine = poison(Engine(model, max_batch=1, page_size=4, max_batched_tokens=4))
    watch = Watch(engine)
    engine.submit(PROMPTS[12], Sampling(**settings), id="a")
    for _ in range(steps):
        engine.step()
    assert engine.abort("a") and not engine.abort("a")
    watch.logits.clear()
    again = engine.submit(PROMPTS[7], Sampling(**settings), id="a")
    first, *chunks = [chunk for _ in range(60) for chunk in engine.step()]
    assert first.finish_reason == "abort" and first.output.prompt_ids == tuple(PROMPTS[12])
    assert all(chunk.output is None for chunk in chunks[:-1])
    lone = expected(reference, (PROMPTS[7], settings), fill="last_exited")
    assert_equal(lone, watch.answer(again, chunks[-1].output))


def test_09_a_pool_for_one_and_a_half_requests_serves_three():
    """Tokens and depths are a roomy run's, nothing is held at the end, and no work was done twice."""
    model, _ = twins(seed=4)
    asks = [Sampling(max_tokens=12, exit_threshold=0.5, temperature=1.0, seed=n) for n in range(3)]
    found = {}
    for name, kv_pages in (("tight", 9), ("roomy", 100)):
        engine = poison(Engine(model, page_size=4, kv_pages=kv_pages, prefix_sharing=False))
        outputs = drain(engine, [engine.prepare(PROMPTS[12], ask, id=str(ask.seed)) for ask in asks])
        found[name] = [(outputs[key].token_ids, outputs[key].depths, outputs[key].usage) for key in sorted(outputs)]
        stats = engine.stats()
        assert stats["pages_peak"] <= kv_pages and (stats["preempted"] > 0) == (name == "tight")
    assert found["tight"] == found["roomy"]
    for _, depths, usage in found["tight"]:
        assert usage.segments_executed == sum(depths[1:]) <= 4 * 11 and usage.segments_prefill == 4 * 12


def test_10_top_k_with_ties_and_top_p_keep_what_they_should():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]])

    def kept(top_k, top_p=1.0):
        settings = Settings(torch.ones(1).double(), torch.tensor([top_k]), torch.tensor([top_p]).double())
        probabilities = processed(logits, settings, max_k=top_k if top_k <= 6 else None, any_top_p=top_p < 1)
        assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-15)
        return probabilities[0].nonzero().flatten().tolist()

    assert kept(1) == [1] and kept(2) == [1, 3]
    assert kept(3) == [1, 2, 3] and kept(4) == [1, 2, 3, 4]  # of equal logits the lower ids, exactly k
    assert kept(7, top_p=1e-9) == [1]  # top-p keeps at least one
    assert kept(7, top_p=0.5) == [1, 3]


PIECES = ["al", "pha be", "ta ga", "mma"]


def test_11_a_stop_string_over_several_tokens():
    def stream(pieces, stop):
        text = TextStream(lambda ids: "".join(pieces[i] for i in ids), [stop])
        return [text.push(i) for i in range(len(pieces))], text.end(), text.text, text.stopped

    assert stream(PIECES, "beta gamma") == (["al", "pha ", "", ""], "", "alpha ", True)
    assert stream(PIECES[:3], "beta gamma") == (["al", "pha ", ""], "beta ga", "alpha beta ga", False)


@pytest.mark.parametrize("tokens, text, reason", [(9, "alpha ", "stop"), (3, "alpha beta ga", "length")])
def test_11_a_stop_string_in_the_engine(tokens, text, reason):
    """The ids the model draws get the trap's pieces as their text; an end that is half a stop string is delivered."""
    model, reference = twins(seed=4)
    drawn = {"temperature": 2.0, "seed": 1}
    ids = expected(reference, (PROMPTS[7], {"max_tokens": 4, **drawn}), fill="full").token_ids
    assert len(set(ids)) == 4
    piece = dict(zip(ids, PIECES, strict=True))
    engine = Engine(model, tokenizer=SimpleNamespace(decode=lambda ids: "".join(piece[i] for i in ids)))
    engine.submit(PROMPTS[7], Sampling(max_tokens=tokens, stop="beta gamma", **drawn))
    chunks = [chunk for _ in range(20) for chunk in engine.step()]
    output = chunks[-1].output
    assert (output.text, output.finish_reason) == (text, reason) and "".join(c.text for c in chunks) == text
    assert list(output.token_ids) == ids[: len(chunks)]  # ids keep what the text leaves out


def test_12_eos_of_config_generation_config_and_tokenizer(tmp_path):
    """Three files name an end, and each of them ends an answer."""
    write_folder(tmp_path, "looped", vocab_size=8, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3]}))
    write_tokenizer(tmp_path, words=["<s>", "[user]", "[bot]", "<end>", "</s>", "j"])  # its eos_token is </s>, id 4
    llm = LLM(tmp_path)
    outputs = llm.generate([[5, 6, 7]], Sampling(max_tokens=12, temperature=3.0, seed=0, n=60))
    for output in outputs:
        assert (output.token_ids[-1] in (2, 3, 4)) == (output.finish_reason == "stop")
        assert not set(output.token_ids[:-1]) & {2, 3, 4}
    assert {o.token_ids[-1] for o in outputs if o.finish_reason == "stop"} == {2, 3, 4}
    ignoring = llm.generate([[5, 6, 7]], Sampling(max_tokens=12, temperature=3.0, seed=0, n=60, ignore_eos=True))
    assert all(len(output.token_ids) == 12 for output in ignoring)
