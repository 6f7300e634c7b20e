"""The engine against the independent dense reference: tokens, depths, logits, logprobs, planes, endings and usage.

float64 throughout but for one campaign, so that nothing is excused. Every page is NaN when it is handed out.
"""

from __future__ import annotations

import functools
from random import Random

import pytest
import torch

from anydepth.engine.engine import Engine
from anydepth.reference import score
from anydepth.types import Sampling
from tests.equality import assert_campaign
from tests.helpers import assert_lone_runs, drain_scores, score_verdicts, twins, verdicts

VOCABULARY = 61
LOOPED = {
    "looped, grouped": {},
    "looped, tied": {"tie_word_embeddings": True, "num_key_value_heads": 4, "total_ut_steps": 3},
    "looped, one K/V head": {"num_key_value_heads": 1, "num_hidden_layers": 3, "total_ut_steps": 2},
    "looped once": {"total_ut_steps": 1},
}
LAYERED = {
    "layered, grouped": {"segments": (1, 2, 4)},
    "layered, tied": {"segments": (2, 4), "tie_word_embeddings": True, "num_key_value_heads": 4},
    "layered, one K/V head": {"segments": (1, 2, 3, 4), "num_key_value_heads": 1},
    "layered, not split": {},
}
FILLS = ("full", "last_exited", "shared")
CASES = [(name, fill) for name in LOOPED for fill in FILLS] + [(name, "full") for name in LAYERED]
MODELS = pytest.mark.parametrize("name, fill", CASES)
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 2**63 + 5}


@functools.cache
def model(name: str, dtype: torch.dtype = torch.float64, seed: int = 2):
    kind = "looped" if name in LOOPED else "layered"
    return twins(kind, seed=seed, dtype=dtype, gentle=dtype == torch.float32, **(LOOPED | LAYERED)[name])


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = Random(seed * 1000 + length)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def trace(segments: int, length: int, first: str = "prefill", seed: int = 0) -> tuple[int, ...]:
    rng = Random(seed)
    depths = [rng.randint(1, segments) for _ in range(length)]
    return (segments, *depths[1:]) if first == "prefill" else tuple(depths)


def policies(pair, tokens: int = 7) -> dict[str, dict]:
    """Settings for every policy the model can have."""
    segments = pair[1].segments
    asks = {
        "never": {},
        "never, named": {"exit_policy": "never", "exit_threshold": 1.0},
        "fixed at 1": {"depth": 1},
        "fixed at R": {"depth": segments, "exit_policy": "fixed"},
        "trace": {"trace": trace(segments, tokens)},
        "trace, first by policy": {"trace": trace(segments, tokens, "policy"), "first_token": "policy"},
        "never, first by policy": {"first_token": "policy"},
        "interval of one": {"interval": 1},
        **({"interval": {"interval": 3, "shallow_depth": 1}} if segments > 1 else {}),
    }
    if pair[1].has_gate:
        asks |= {f"gate at {tau}": {"exit_threshold": tau} for tau in (0, 0.3, 0.5, 0.7, 0.95)}
        asks["gate off"] = {"exit_policy": "gate_cdf"}
        asks["gate, first by policy"] = {"exit_threshold": 0.5, "first_token": "policy"}
        if segments > 2:
            asks["gate within bounds"] = {"exit_threshold": 0.3, "min_depth": 2, "max_depth": segments - 1}
            asks["gate at 0, min 2"] = {"exit_threshold": 0, "min_depth": 2, "first_token": "policy"}
    return asks


@MODELS
def test_every_policy_alone_greedy_and_sampled(name, fill):
    """A batch of one: greedy with raw logprobs, sampled with processed ones."""
    pair = model(name)
    for settings in policies(pair).values():
        for more in ({"logprobs": "raw"}, {"logprobs": "processed", **SAMPLED}):
            ask = {"max_tokens": 7, **more, **settings}
            assert_lone_runs(pair, [(prompt(5), ask)], fill=fill, max_batch=1, max_batched_tokens=512)


@MODELS
def test_every_policy_together_in_one_batch(name, fill):
    """Rows of all settings share turns, slots change hands, and each request still equals its lone run."""
    pair = model(name)
    asks = [
        (prompt(length, seed), {"max_tokens": 7, **settings, **more})
        for seed, settings in enumerate(policies(pair).values())
        for length, more in ((1 + seed % 9, {}), (18 - seed % 17, {"logprobs": "processed", **SAMPLED}))
    ]
    assert_lone_runs(pair, asks, fill=fill, max_batch=4, page_size=4)


@MODELS
def test_every_forced_depth(name, fill):
    """Each depth as `fixed`, and all of them side by side in one batch."""
    pair = model(name)
    asks = [
        (prompt(6), {"max_tokens": 6, "depth": depth, "first_token": first})
        for depth in range(1, pair[1].segments + 1)
        for first in ("prefill", "policy")
    ]
    assert_lone_runs(pair, asks, fill=fill, max_batch=8)


def edge_asks(segments: int) -> list:
    """Lengths on both sides of the page and chunk sizes, depths that differ from row to row."""
    settings = [{"depth": 1}, {}, {"trace": trace(segments, 6)}, {"depth": segments}]
    firsts = ["prefill", "prefill", "prefill", "policy"]
    return [
        (prompt(length), {"max_tokens": 6, "first_token": firsts[n % 4], **settings[n % 4]})
        for n, length in enumerate((1, 2, 3, 4, 5, 8, 15, 16, 17))
    ]


@pytest.mark.parametrize("max_batched_tokens", [1, 2, 3, 4, 5, 16, 512])
@pytest.mark.parametrize("name, fill", [("looped, grouped", fill) for fill in FILLS] + [("layered, grouped", "full")])
def test_chunk_edges_cannot_be_seen(name, fill, max_batched_tokens):
    pair = model(name)
    assert_lone_runs(pair, edge_asks(pair[1].segments), fill=fill, max_batched_tokens=max_batched_tokens)


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("name, fill", [("looped, grouped", fill) for fill in FILLS] + [("layered, grouped", "full")])
def test_page_edges_cannot_be_seen(name, fill, page_size):
    pair = model(name)
    assert_lone_runs(pair, edge_asks(pair[1].segments), fill=fill, page_size=page_size)


@pytest.mark.parametrize("fill", FILLS)
def test_the_released_gate_arithmetic(fill):
    """gate_dtype="bfloat16": 0.2 becomes 0.2002, and a threshold of 1 can leave early."""
    pair = twins("looped", seed=5)
    pair[1].weights["model.early_exit_gate.bias"].add_(2.0)
    pair[0].slots()["model.early_exit_gate.bias"].add_(2.0)
    asks = [
        (prompt(4, seed), {"max_tokens": 8, "exit_policy": "gate_cdf", "exit_threshold": tau, "first_token": "policy"})
        for seed in range(2)
        for tau in (0.0, 0.2, 0.5, 0.9, 0.99, 1.0)
    ]
    assert_lone_runs(pair, asks, fill=fill, gate_dtype="bfloat16")


def test_endings():
    """max_tokens, EOS, stop ids, ignored EOS and the model's length end a request where the reference ends it."""
    pair = twins("looped", seed=3, vocab_size=17, max_position_embeddings=20)
    ids = [n % 17 for n in prompt(6)]
    asks = [
        (ids[:length], {"max_tokens": tokens, "temperature": 1.0, "seed": seed, **more})
        for seed in range(6)
        for length, tokens in ((1, 1), (2, 50), (6, 50), (6, 9))
        for more in ({}, {"ignore_eos": True}, {"stop_token_ids": (3, 4), "ignore_eos": True})
    ]
    assert_lone_runs(pair, asks, fill="last_exited", eos_ids=(0, 7), max_batch=5)


def test_a_pool_for_one_and_a_half_requests():
    """Requests wait for pages, not for slots, and are not changed by it."""
    pair = model("looped, grouped")
    asks = [(prompt(n), {"max_tokens": 8, "exit_threshold": 0.5}) for n in (9, 8, 7, 9)]
    assert_lone_runs(pair, asks, fill="last_exited", kv_pages=6, page_size=4, max_batch=8)


def test_float32_campaign():
    """400 requests in float32: equal within tolerance, near-ties of the reference in at most 0.5 % of them."""
    rng, found = Random(20), []
    for name, fill in CASES:
        for seed in (2, 3):
            pair = model(name, torch.float32, seed)
            settings = list(policies(pair).values())
            asks = []
            for _ in range(12):
                ask = {"max_tokens": rng.randint(1, 7), **rng.choice(settings)}
                if rng.random() < 0.5:
                    ask |= {"temperature": rng.choice([0.6, 1.0]), "top_k": rng.choice([None, 5, 30])}
                    ask |= {"top_p": rng.choice([1.0, 0.9]), "seed": rng.getrandbits(64), "logprobs": "processed"}
                asks.append((prompt(rng.randint(1, 12), rng.randrange(99)), ask))
            found += verdicts(pair, asks, fill=fill, max_batched_tokens=rng.choice([1, 3, 16]), max_batch=4)
    assert len(found) >= 380
    assert_campaign(found)


# -- scoring ----------------------------------------------------------------------------------------------------------


def score_asks(pair):
    """One and several continuations of one context, one-token contexts, every policy."""
    segments = pair[1].segments
    targets = [prompt(4, 7), prompt(1, 8), prompt(6, 9), prompt(4, 7)]
    settings = [{}, {"depth": 1}, {"trace": trace(segments, 6, "policy", seed=3)}]
    settings += [{"exit_threshold": 0.5}, {"exit_threshold": 0.3, "min_depth": segments}] * pair[1].has_gate
    return [(prompt(length), targets[: 1 + n], ask) for n, ask in enumerate(settings) for length in (1, 2, 9)]


@MODELS
def test_scores(name, fill):
    for verdict in score_verdicts(model(name), score_asks(model(name)), fill=fill):
        assert verdict.equal, verdict.problems


@pytest.mark.parametrize("max_batched_tokens", [1, 2, 3, 64])
def test_scores_do_not_depend_on_chunks_or_batches(max_batched_tokens):
    pair = model("looped, grouped")
    for max_batch in (1, 6):
        options = {"max_batched_tokens": max_batched_tokens, "max_batch": max_batch}
        for verdict in score_verdicts(pair, score_asks(pair), fill="last_exited", **options):
            assert verdict.equal, verdict.problems


@pytest.mark.parametrize("name, fill", [case for case in CASES if case[1] != "shared"])
def test_never_scores_as_one_dense_pass(name, fill):
    """Not so under `shared`, where a position sees earlier ones' last K/V, which no dense pass has."""
    pair = model(name)
    context, target = prompt(5), prompt(6, 4)
    logits = pair[1].readout(pair[1].dense(context + target)[0][-1])
    dense = [float(logits[4 + t].log_softmax(-1)[token]) for t, token in enumerate(target)]
    engine = Engine(pair[0], fill=fill)
    (score,) = drain_scores(engine, [engine.prepare(context, Sampling(), forced=[target], id="it")])["it"]
    assert score.logprobs == pytest.approx(dense, abs=1e-9)


@pytest.mark.parametrize("mode", [None, "raw", "processed"])
def test_scores_are_raw_whatever_the_sampling_says(mode):
    """A temperature or processed logprobs of the settings have no say in a log-likelihood."""
    model, reference = twins(seed=4)
    engine = Engine(model)
    request = engine.submit(engine.prepare([5, 6, 7], Sampling(temperature=1.0, logprobs=mode), forced=[[8, 9]]))
    scores = [chunk.score for _ in range(40) for chunk in engine.step() if chunk.score]
    assert scores[0].logprobs == pytest.approx(
        score(reference, [5, 6, 7], [8, 9], fill="last_exited").logprobs, abs=1e-9
    )
    assert request.submitted
