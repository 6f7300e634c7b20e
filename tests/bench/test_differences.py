"""Whether answers are the same, by hand."""

from __future__ import annotations

import json

import pytest

from anydepth.bench.differences import compare, first_difference, pack, unpack

A = ((5, 6, 7), (4, 1, 2))


@pytest.mark.parametrize(
    ("other", "at"),
    [
        (A, None),
        (([5, 6, 7], [4, 1, 2]), None),  # as a Record has it
        (((5, 9, 7), (4, 1, 2)), 1),
        (((5, 6, 7), (4, 1, 3)), 2),  # the same words, thought otherwise
        (((5, 9, 7), (3, 1, 2)), 0),
        (((5, 6), (4, 1)), 2),
        (((5, 6, 7, 8), (4, 1, 2, 4)), 3),
    ],
)
def test_first_difference(other, at):
    assert first_difference(A, other) == at == first_difference(other, A)


def test_compare_counts_ids_and_depths_apart():
    found = compare(
        [
            (1, 0, A, A),
            (1, 1, A, ((5, 6, 8), (4, 1, 2))),
            (2, 0, A, ((5, 6, 7), (4, 2, 2))),
            (2, 1, A, ((5, 0, 7), (4, 1, 1))),
        ]
    )
    assert found == {
        "requests": 4,
        "differ": 3,
        "differ_in_tokens": 2,
        "differ_in_depths": 2,
        "first_position": 1,
        "where": [[1, 1, 2], [2, 0, 1], [2, 1, 1]],
    }
    assert compare([])["first_position"] is None


def test_a_sample_keeps_what_changed_and_gives_back_everything():
    first, later = [A, ((1,), (4,)), A], [A, ((2,), (4,)), A]
    kept = json.loads(json.dumps([pack(first, None), pack(later, first)]))
    assert kept[1] == {"changed": {"1": [[2], [4]]}}
    for answers, sample in zip((first, later), kept, strict=True):
        back = unpack(sample, kept[0])
        assert [first_difference(a, b) for a, b in zip(answers, back, strict=True)] == [None] * 3
