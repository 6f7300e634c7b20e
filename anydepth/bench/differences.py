"""Whether two runs answered alike: token ids and readout depths, request by request.

At float32 on one machine a repetition must not differ. At bfloat16 the composition of the batch alone changes tokens,
so a difference says something only beside those that the same prompts show under another composition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

Answer = Sequence[Sequence[int]]  # token ids, depths


def first_difference(one: Answer, other: Answer) -> int | None:
    """Index of the first output whose id or depth differs (or that only one has), None where all are the same."""
    outputs = zip_longest(zip(*one, strict=True), zip(*other, strict=True))
    return next((index for index, (a, b) in enumerate(outputs) if a != b), None)


def compare(pairs: Iterable[tuple[int, int, Answer, Answer]]) -> dict[str, Any]:
    """Count the pairs (repetition, request, an answer, the other) that differ, in ids, in depths, in either.

    `where` has [repetition, request, index of the first output that differs] of each that does.
    """
    requests = in_tokens = in_depths = 0
    where = []
    for repetition, request, one, other in pairs:
        requests += 1
        index = first_difference(one, other)
        if index is not None:
            where.append([repetition, request, index])
            in_tokens += list(one[0]) != list(other[0])
            in_depths += list(one[1]) != list(other[1])
    return {
        "requests": requests,
        "differ": len(where),
        "differ_in_tokens": in_tokens,
        "differ_in_depths": in_depths,
        "first_position": min((index for *_, index in where), default=None),
        "where": where,
    }


def pack(answers: Sequence[Answer], first: Sequence[Answer] | None) -> dict[str, Any]:
    """Answers as a sample keeps them: all of the first repetition, of a later one those that differ from it."""
    if first is None:
        return {"answers": [[list(part) for part in answer] for answer in answers]}
    changed = [i for i, pair in enumerate(zip(answers, first, strict=True)) if first_difference(*pair) is not None]
    return {"changed": {str(i): [list(part) for part in answers[i]] for i in changed}}


def unpack(sample: Mapping[str, Any], first: Mapping[str, Any]) -> list[Answer]:
    """The answers of a sample; `first` is that of the first repetition."""
    changed = sample.get("changed", {})
    return [changed.get(str(i), answer) for i, answer in enumerate(first["answers"])]
