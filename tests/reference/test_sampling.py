import math

import pytest
import torch

from anydepth.reference.sampling import argmax, log_softmax, philox, pick, process, sample, uniform

FULL = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_philox_known_answers(counter, key, words):
    assert philox(counter, key) == words


def test_uniform_takes_53_bits_of_the_first_two_words():
    assert uniform(0, 0) == ((0x6627E8D5E169C58D) >> 11) / 2**53
    high_word, low_word = uniform(1 << 32, 0), uniform(1, 0)
    x0, x1, _, _ = philox((0, 0, 0, 0), (1, 0))
    assert low_word == ((x0 << 32 | x1) >> 11) / 2**53 != high_word  # key = (low word, high word)
    values = [uniform(7, i) for i in range(2000)]
    assert all(0 <= u < 1 for u in values)
    assert abs(sum(values) / 2000 - 0.5) < 0.02


def test_greedy_ties_go_to_the_lower_id():
    assert argmax([0.0, 2.0, 2.0]) == 1


def test_top_k_keeps_exactly_k_and_of_equals_the_lower_ids():
    p = process([1.0, 3.0, 3.0, 3.0, 0.0], temperature=1.0, top_k=2, top_p=1.0)
    assert p.probabilities == [0.0, 0.5, 0.5, 0.0, 0.0]
    assert p.cut_gap == 0.0
    p = process([1.0, 3.0, 2.5], temperature=0.7, top_k=2, top_p=1.0)
    assert math.isclose(sum(p.probabilities), 1.0) and p.cut_gap == 1.5


def test_top_p_keeps_the_crossing_token_of_the_renormalised_top_k():
    logits = [math.log(x) for x in (0.1, 0.4, 0.3, 0.2)]
    p = process(logits, temperature=1.0, top_k=None, top_p=0.5).probabilities
    assert p == pytest.approx([0, 4 / 7, 3 / 7, 0])
    # of the top two, 0.4 is 4/7 = 0.571 > 0.5: it crosses alone, though it did not in the whole vocabulary
    p = process(logits, temperature=1.0, top_k=2, top_p=0.5).probabilities
    assert p == pytest.approx([0, 1, 0, 0])
    p = process(logits, temperature=1.0, top_k=None, top_p=1e-9).probabilities
    assert p == pytest.approx([0, 1, 0, 0])  # at least one stays
    p = process([0.0, 1.0, 1.0, 1.0], temperature=1.0, top_k=None, top_p=0.5).probabilities
    assert p == pytest.approx([0, 0.5, 0.5, 0])  # equal probabilities in ascending id
    near = process([math.log(x) for x in (0.5, 0.3, 0.2)], temperature=1.0, top_k=None, top_p=0.8 + 1e-6)
    assert near.mass_gap == pytest.approx(1e-6)


def test_the_token_is_the_first_whose_cumulative_probability_exceeds_u():
    logits = torch.tensor([0.2, 0.5, 0.3]).double().log()
    for index in range(50):
        draw, logprob = sample(logits, index=index, seed=3, temperature=1.0, top_k=None, top_p=1.0, logprobs="raw")
        u = uniform(3, index)
        assert draw.u == u and draw.low <= u < draw.high
        assert draw.token == (0 if u < 0.2 else 1 if u < 0.7 else 2)
        assert logprob == pytest.approx(float(logits[draw.token]))


def test_edges_of_the_intervals():
    p = [0.0, 0.25, 0.25, 0.0, 0.5, 0.0]
    assert [pick(p, u)[0] for u in (0.0, 0.2499, 0.25, 0.4999, 0.5, 1 - 2**-53)] == [1, 1, 2, 2, 4, 4]
    assert pick(p, 0.25) == (2, 0.25, 0.5)
    assert pick([0.5, 0.4999, 0.0], 0.99999)[0] == 1  # nothing exceeds u: the last id of non-zero probability


def test_processed_logprobs_are_renormalised_and_greedy_reports_raw():
    logits = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    settings = {"index": 0, "seed": 0, "logprobs": "processed"}
    draw, logprob = sample(logits, temperature=2.0, top_k=2, top_p=1.0, **settings)
    z = {1: 1.5, 2: 1.0}
    assert logprob == pytest.approx(z[draw.token] - math.log(math.exp(1.5) + math.exp(1.0)))
    draw, logprob = sample(logits, temperature=0.0, top_k=None, top_p=1.0, **settings)
    assert (draw.token, draw.top_gap) == (1, 1.0) and logprob == log_softmax(logits.tolist())[1]
    assert logprob == pytest.approx(float(logits.log_softmax(0)[1]))
