"""Aggregates, by hand on three answers."""

import pytest

from anydepth.eval.aggregate import aggregate
from anydepth.stats import wilson


def answer(id, *, depths, score=1.0, group=1, levels=None, decode=None, prediction="8", reason="stop"):
    decode = len(depths) - 1 if decode is None else decode
    read = sum(depths[len(depths) - decode :])
    return {
        "id": id,
        "answer_index": 0,
        "group": group,
        "output_ids": [0] * len(depths),
        "depths": depths,
        "decode_tokens": decode,
        "segments_read": read,
        "segments_executed": read + 1,
        "finish_reason": reason,
        "prediction": {"strict": prediction, "tolerant": "9"},
        "score": score,
        "levels": levels,
    }


SAMPLES = [
    answer("a", depths=[4, 1, 2], levels=[0, 0, 1]),
    answer("b", depths=[4, 3], score=0.0, group=10, levels=[2, 2], prediction=None, reason="length"),
    answer("c", depths=[2, 4, 4], score=None, group=2, decode=3),
]


def test_all_of_them():
    found = aggregate(SAMPLES)
    assert (found["n"], found["unscored"], found["unparseable"], found["length_stops"]) == (3, 1, 1, 1)
    assert found["accuracy"] == 0.5 and (found["low"], found["high"]) == pytest.approx(wilson(1, 2))
    assert found["depth_histogram"] == {"1": 1, "2": 2, "3": 1, "4": 2}  # without the first tokens of a and b
    assert found["mean_depth"] == pytest.approx(16 / 6)
    assert found["tokens_per_question"] == pytest.approx(8 / 3)
    assert found["segments_read_per_question"] == pytest.approx(16 / 3)
    assert found["segments_executed_per_question"] == pytest.approx(19 / 3)


def test_by_group_in_order_of_number():
    groups = aggregate(SAMPLES)["by_group"]
    assert list(groups) == ["1", "2", "10"]
    assert groups["10"]["accuracy"] == 0 and groups["2"]["accuracy"] is None and groups["1"]["mean_depth"] == 1.5


def test_depth_by_level_leaves_first_tokens_out():
    assert aggregate(SAMPLES)["depth_by_level"] == {
        "1": {"tokens": 1, "mean_depth": 2},
        "2": {"tokens": 1, "mean_depth": 3},
    }


def test_a_pure_function_of_the_samples():
    assert aggregate(list(reversed(SAMPLES))) == aggregate(SAMPLES)
    assert aggregate([])["accuracy"] is None
