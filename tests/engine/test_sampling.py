"""From logits to a token: known answers, the definition in plain Python, and nothing that depends on the batch."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anydepth.engine.engine import Engine
from anydepth.engine.philox import derive, fresh_seed, philox, uniforms
from anydepth.engine.sampling import Settings, greedy, pick, processed, processed_logprobs, raw_logprobs
from anydepth.reference import sampling as reference
from anydepth.types import Sampling
from tests.helpers import drain, twins

SEEDS = (0, 1, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1)


def settings_of(*rows, vocabulary):
    """Settings of (temperature, top_k, top_p) rows, with what `processed` wants to know of them all."""
    temperature, top_k, top_p = zip(*rows, strict=True)
    numbers = torch.tensor([vocabulary + 1 if k is None else min(k, vocabulary) for k in top_k])
    wide = {"dtype": torch.float64}
    asks = Settings(torch.tensor(temperature, **wide), numbers, torch.tensor(top_p, **wide))
    max_k = max((min(k, vocabulary) for k in top_k if k is not None), default=None)
    return asks, {"max_k": max_k, "any_top_p": any(p < 1 for p in top_p)}


def probabilities(logits, *rows):
    asks, options = settings_of(*rows, vocabulary=logits.shape[1])
    return processed(logits, asks, **options)


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    """The three vectors that Random123 publishes for philox4x32-10."""
    assert philox(np.array(counter, dtype=np.uint64).reshape(4, 1), key).flatten().tolist() == list(words)


@pytest.mark.parametrize("seed", SEEDS)
def test_uniforms_are_the_definition(seed):
    """Key = seed, low word first; counter = (output index, 0, 0, 0); a multiple of 2^-53 in [0, 1)."""
    drawn = uniforms(seed, 300)
    assert drawn.tolist() == [reference.uniform(seed, index) for index in range(300)]
    assert (drawn >= 0).all() and (drawn < 1).all() and (drawn * 2.0**53 % 1 == 0).all()
    assert uniforms(seed, 7).tolist() == drawn[:7].tolist()


def test_derived_seeds():
    """Answer (0, 0) keeps the seed, every other one has its own, none repeats a token's counter."""
    for seed in SEEDS:
        assert derive(seed, 0, 0) == seed
        derived = [derive(seed, prompt, answer) for prompt in range(20) for answer in range(20)]
        assert len(set(derived)) == 400 and all(0 <= one < 2**64 for one in derived)
        token_words = [philox(np.array([[i], [0], [0], [0]], dtype=np.uint64), (seed & 0xFFFFFFFF, seed >> 32))
                       for i in range(50)]  # fmt: skip
        assert not {(int(x[0, 0]) << 32) | int(x[1, 0]) for x in token_words} & set(derived[1:])
    assert derive(5, 3, 4) != derive(5, 4, 3) and derive(5, 0, 1) != derive(6, 0, 1)
    assert all(0 <= fresh_seed() < 2**63 for _ in range(100))


LOGITS = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5000001, 2.0, 7.0, -50.0, 30.0]), min_size=2, max_size=12)
ROW = st.tuples(
    st.sampled_from([1.0, 0.3, 2.5, 1e-3, 1e6]),
    st.sampled_from([None, 1, 2, 3, 5, 11, 12, 40]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
)


@settings(max_examples=200, deadline=None, derandomize=False, database=None, print_blob=True)
@given(st.data())
def test_processed_probabilities_are_the_definition(data):
    """Rows of unlike settings in one batch, logits full of ties, against plain Python."""
    width = data.draw(st.integers(2, 12))
    rows = data.draw(st.lists(ROW, min_size=1, max_size=4))
    logits = [data.draw(st.lists(LOGITS.map(lambda x: x[0]), min_size=width, max_size=width)) for _ in rows]
    found = probabilities(torch.tensor(logits, dtype=torch.float64), *rows)
    for got, wanted, (temperature, top_k, top_p) in zip(found, logits, rows, strict=True):
        lone = reference.process(wanted, temperature=temperature, top_k=top_k, top_p=top_p)
        assert got.sum().item() == pytest.approx(1.0, abs=1e-12)
        if lone.mass_gap > 1e-12:  # else the crossing token is a matter of the last bit
            assert got.tolist() == pytest.approx(lone.probabilities, abs=1e-12)
            assert (got > 0).tolist() == [p > 0 for p in lone.probabilities]


@pytest.mark.parametrize("seed", range(8))
def test_a_row_does_not_depend_on_its_neighbours(seed):
    """Bit for bit: alone, in another place, beside rows that ask for top-k and top-p."""
    logits = torch.randn(6, 997, generator=torch.Generator().manual_seed(seed)) * 3
    rows = [(1.0, None, 1.0), (0.7, 5, 1.0), (1.3, None, 0.8), (1.0, 40, 0.5), (0.2, 61, 0.99), (2.0, 1, 1.0)]
    together = probabilities(logits, *rows)
    for n, row in enumerate(rows):
        assert torch.equal(probabilities(logits[n : n + 1], row)[0], together[n]), row
    order = [3, 0, 5, 1, 4, 2]
    assert torch.equal(probabilities(logits[order], *(rows[n] for n in order)), together[order])


def test_top_p_edges():
    """Kept: every token before which less than top_p was reached, the crossing one included."""
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    for top_p, kept in ((1e-9, 1), (0.4999, 1), (0.5001, 2), (0.7501, 3), (0.8751, 4), (1.0, 4)):
        found = probabilities(logits, (1.0, None, top_p))[0]
        assert (found > 0).sum().item() == kept, top_p
        assert found.sum().item() == pytest.approx(1.0, abs=1e-15)
    # Measured on the renormalised top-k: of 2/3 and 1/3, .6 keeps one and .7 two.
    assert [(probabilities(logits, (1.0, 2, p))[0] > 0).sum().item() for p in (0.6, 0.7)] == [1, 2]
    equal = probabilities(torch.zeros(1, 5), (1.0, None, 0.5))[0]
    assert (equal > 0).tolist() == [True, True, True, False, False]  # equal ones in ascending id


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-6])
def test_tiny_temperatures_are_greedy(temperature):
    """Nothing overflows; logits that tie at the top share the mass."""
    logits = torch.tensor([[1.0, 900.0, -1e4, 899.0], [5.0, 5.0, 4.0, 0.0]])
    found = probabilities(logits, (temperature, None, 1.0), (temperature, None, 1.0))
    assert found.tolist() == [[0, 1, 0, 0], [0.5, 0.5, 0, 0]]
    assert probabilities(logits, (1e6, None, 1.0), (1e6, None, 1.0)).max().item() < 0.26


def test_pick_is_the_first_id_whose_cumulative_probability_exceeds_u():
    chances = torch.tensor([0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    for u, token in ((0.0, 0), (0.2499, 0), (0.25, 2), (0.7499, 2), (0.75, 3), (1 - 2**-53, 3)):
        assert pick(chances.unsqueeze(0), torch.tensor([u], dtype=torch.float64)).item() == token, u


def test_pick_falls_back_to_the_last_possible_id():
    """Rounding may leave the whole mass at or below u; an id of no probability is never drawn."""
    short = torch.tensor([[0.5, 0.25, 0.0, 0.0], [0.0, 0.3, 0.3, 0.3], [0.0, 0.5, 0.0, 0.0]], dtype=torch.float64)
    assert pick(short, torch.tensor([0.9, 0.95, 0.99], dtype=torch.float64)).tolist() == [1, 3, 1]


def test_argmax_ties_go_to_the_lower_id():
    assert greedy(torch.tensor([[1.0, 4.0, 4.0, 2.0], [7.0, 7.0, 7.0, 7.0]])).tolist() == [1, 0]


def test_logprobs_are_plain_logarithms():
    logits = torch.randn(5, 61, generator=torch.Generator().manual_seed(1))
    token = torch.tensor([0, 7, 60, 13, 21])
    for row, got in enumerate(raw_logprobs(logits, token).tolist()):
        wanted = logits[row].double().tolist()
        assert got == pytest.approx(wanted[token[row]] - math.log(math.fsum(map(math.exp, wanted))), abs=1e-12)
    chances = probabilities(logits, *[(0.7, 10, 0.9)] * 5)
    token = chances.argmax(-1)
    assert processed_logprobs(chances, token).tolist() == [
        math.log(chances[row, token[row]]) for row in range(len(chances))
    ]


@pytest.mark.parametrize("max_batch", [1, 2, 7])
def test_a_sampled_answer_does_not_depend_on_slot_batch_or_neighbours(max_batch):
    """The same request first, last and among others; its recorded seed, submitted alone, repeats it."""
    model, _ = twins(seed=6)
    ask = Sampling(max_tokens=10, temperature=1.0, top_p=0.9, seed=77, logprobs="processed", exit_threshold=0.5)
    rng = Random(1)
    others = [
        Sampling(max_tokens=rng.randint(1, 9), temperature=rng.choice([0.0, 1.0, 2.0]), top_k=rng.choice([None, 3]))
        for _ in range(6)
    ]
    (alone,) = drain(Engine(model), [Engine(model).prepare([1, 2, 3], ask)]).values()
    for place in range(0, 7, 2):
        engine = Engine(model, max_batch=max_batch, page_size=2)
        requests = [engine.prepare([rng.randrange(61)] * rng.randint(1, 6), other) for other in others]
        requests.insert(place, engine.prepare([1, 2, 3], ask, id="ours"))
        ours = drain(engine, requests)["ours"]
        assert (ours.token_ids, ours.depths, ours.seed) == (alone.token_ids, alone.depths, 77)
        assert ours.logprobs == pytest.approx(alone.logprobs, abs=1e-9) and ours.logprobs_mode == "processed"


def test_greedy_reports_raw_logprobs_in_both_modes():
    model, _ = twins(seed=6)
    for mode in ("raw", "processed"):
        engine = Engine(model)
        (output,) = drain(engine, [engine.prepare([1, 2, 3], Sampling(max_tokens=4, logprobs=mode))]).values()
        assert output.logprobs_mode == "raw" and max(output.logprobs) < 0
    engine = Engine(model)
    (output,) = drain(engine, [engine.prepare([1, 2, 3], Sampling(max_tokens=4))]).values()
    assert output.logprobs is None and output.logprobs_mode is None


def test_seed_none_is_resolved_and_recorded():
    model, _ = twins(seed=6)
    engine = Engine(model)
    ask = Sampling(max_tokens=8, temperature=2.0)
    first, second = drain(engine, [engine.prepare([1, 2, 3], ask) for _ in range(2)]).values()
    assert first.seed != second.seed
    repeat = Sampling(max_tokens=8, temperature=2.0, seed=first.seed)
    (again,) = drain(engine, [engine.prepare([1, 2, 3], repeat)]).values()
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize("ask", [{}, {"top_k": 6}, {"top_p": 0.8}, {"temperature": 1.7, "top_k": 12, "top_p": 0.9}])
def test_tokens_are_drawn_in_proportion(ask):
    """Chi-square of 20,000 first tokens under seeds 0, 1, 2, ... against the processed probabilities.

    The seeds are fixed, so that the outcome is too; under fresh seeds it would raise a false alarm once in 10^6 runs.
    """
    draws, logits = 20_000, torch.randn(1, 30, generator=torch.Generator().manual_seed(9)) * 1.5
    chances = probabilities(logits, (ask.get("temperature", 1.0), ask.get("top_k"), ask.get("top_p", 1.0)))
    u = torch.from_numpy(np.concatenate([uniforms(seed, 1) for seed in range(draws)]))
    counts = torch.bincount(pick(chances.expand(draws, -1), u), minlength=30).double()
    expected = chances[0] * draws
    assert counts[expected == 0].sum() == 0
    usual = expected >= 5
    rest = (counts[~usual].sum(), expected[~usual].sum())
    statistic = ((counts - expected)[usual] ** 2 / expected[usual]).sum() + (rest[0] - rest[1]) ** 2 / max(rest[1], 1)
    assert statistic < chi_square_limit(int(usual.sum()), normal_quantile=4.7534)


def chi_square_limit(degrees: int, normal_quantile: float) -> float:
    """Wilson and Hilferty's approximation; 4.7534 is the normal quantile of 1 - 10^-6. (10, 4.7534) -> 45.1"""
    step = 2 / (9 * degrees)
    return degrees * (1 - step + normal_quantile * math.sqrt(step)) ** 3
