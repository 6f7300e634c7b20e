"""Where the answers of two arms part ways: token ids and readout depths, question by question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from statistics import quantiles
from typing import Any, NamedTuple

from anydepth.eval.compare.factors import EXACT_KV
from anydepth.record import Sample

# Why the first other token can come out, from what the two arms had in common before it.
ANOTHER_DEPTH, SAME_DEPTH, ANOTHER_CONTEXT = "another_depth", "same_depth", "another_context"


class Spread(NamedTuple):
    """Of output indices (0 is the first token): least, quartiles, most."""

    least: float
    lower: float
    median: float
    upper: float
    most: float


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """How many answers differ in their token ids, in their depths, in either, and where they first do.

    The first token that differs is put down to what came before it, the prompt and all tokens being the same:
    `another_depth`: so was the K/V, and this step was read at another depth.
    `same_depth`: so was the K/V, and this step was read at the same depth: arithmetic or sampling made the difference.
    `another_context`: earlier tokens left another K/V behind. Of exact fills it depends on the tokens alone; of others
    also on the depths at which these tokens were read.
    `depth_first_in_same_context` counts first differing depths with the same tokens and K/V before.

    `common_prefix_share` is the mean share of an answer (of the longer of the two) that comes before the first other
    token: 1 where all are the same, 0.5 for 8, 9 against 8, 7.

    `shared_tokens` counts the decode tokens up to the first other token; `depth_difference` is the mean depth of the
    first arm less the second's over them, None where there are none. `same_tokens` counts those of answers without
    another token, `executed_difference` is what the first arm executed more in these answers, a token: a token's own
    share of what was executed is not recorded. Where the first reads 3, 3 and the second 2, 2 for the tokens 8, 9, and
    another token follows, shared_tokens is 2 and depth_difference 1.
    """

    answers: int
    differ: int
    tokens_differ: int
    depths_differ: int
    first_token: Spread | None
    first_depth: Spread | None
    another_depth: int
    same_depth: int
    another_context: int
    depth_first_in_same_context: int
    common_prefix_share: float | None
    shared_tokens: int
    depth_difference: float | None
    same_tokens: int
    executed_difference: float | None

    def asdict(self) -> dict[str, Any]:
        found = asdict(self)
        for name in ("first_token", "first_depth"):
            value = getattr(self, name)
            found[name] = value and value._asdict()
        return found


def compare_sequences(
    pairs: Sequence[tuple[Sample, Sample]], *, segments: int, kv: tuple[str, str] = (EXACT_KV, EXACT_KV)
) -> Sequences:
    """Compare generated answers pair by pair.

    segments: R, below which a readout leaves planes to be filled. kv: what fills them in either arm (`kv_kind`).
    """
    tokens, depths, causes, difference, shared = [], [], Counter[str](), 0, 0
    differ = same_context = same = executed = 0
    common = 0.0
    for a, b in pairs:
        token = first_difference(a["output_ids"], b["output_ids"])
        depth = first_difference(a["depths"], b["depths"])
        differ += token is not None or depth is not None
        before = len(a["depths"]) - a["decode_tokens"]  # read off the prompt
        end = len(a["output_ids"]) if token is None else token
        shared += max(0, end - before)
        common += 1.0 if token is None else token / max(len(a["output_ids"]), len(b["output_ids"]))
        if token is None:
            same += a["decode_tokens"]
            executed += a["segments_executed"] - b["segments_executed"]
        if depth is not None and depth < end:
            difference += sum(a["depths"][before:end]) - sum(b["depths"][before:end])
        if token is None and depth is None:
            continue
        parted = kv_parted(a["depths"], b["depths"], before, segments, kv)
        if token is not None:
            tokens.append(token)
            step = {*a["depths"][token : token + 1], *b["depths"][token : token + 1]}
            causes[ANOTHER_CONTEXT if parted < token else ANOTHER_DEPTH if len(step) == 2 else SAME_DEPTH] += 1
        if depth is not None:
            depths.append(depth)
            same_context += (token is None or depth <= token) and parted >= depth
    return Sequences(
        answers=len(pairs),
        differ=differ,
        tokens_differ=len(tokens),
        depths_differ=len(depths),
        first_token=_spread(tokens),
        first_depth=_spread(depths),
        another_depth=causes[ANOTHER_DEPTH],
        same_depth=causes[SAME_DEPTH],
        another_context=causes[ANOTHER_CONTEXT],
        depth_first_in_same_context=same_context,
        common_prefix_share=common / len(pairs) if pairs else None,
        shared_tokens=shared,
        depth_difference=difference / shared if shared else None,
        same_tokens=same,
        executed_difference=executed / same if same else None,
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """First index at which two lists differ or only one goes on; None for equal ones."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def kv_parted(a: Sequence[int], b: Sequence[int], before: int, segments: int, kv: tuple[str, str]) -> float:
    """Output index after which the K/V is not the same any more, as long as the tokens are; infinity for never.

    a, b: depths, of which the first `before` were read off the prompt. segments: R. kv: `kv_kind` of either run.
    """
    if kv == (EXACT_KV, EXACT_KV):
        return inf
    if kv[0] == kv[1]:
        found = first_difference(a, b)
        return inf if found is None else found
    if "shared" in kv:
        return -1  # which holds one plane for all depths, for the prompt too
    short = [
        i
        for depths, kind in zip((a, b), kv, strict=True)
        if kind != EXACT_KV
        for i in range(before, len(depths))
        if depths[i] < segments
    ]
    return min(short, default=inf)


def _spread(indices: Sequence[int]) -> Spread | None:
    if not indices:
        return None
    several = [*indices, *indices] if len(indices) == 1 else indices
    lower, median, upper = quantiles(several, n=4, method="inclusive")
    return Spread(min(indices), lower, median, upper, max(indices))


@dataclass(frozen=True, kw_only=True)
class ChoiceDifferences:
    """Answers that were scored by likelihood: questions with another choice, the largest distance of two logprobs of
    one token that is possible in both, questions with a token that is impossible (null) in one arm alone, and those of
    which any token was read at another depth."""

    answers: int
    chosen_differ: int
    most_logprob_difference: float
    possible_differ: int
    depths_differ: int


def compare_choices(pairs: Sequence[tuple[Sample, Sample]]) -> ChoiceDifferences:
    """Compare answers that have `choices`. ValueError for continuations of other lengths, which are other questions."""
    most, chosen, possible, depths = 0.0, 0, 0, 0
    for a, b in pairs:
        ones, others = a["choices"], b["choices"]
        if [len(one["logprobs"]) for one in ones] != [len(other["logprobs"]) for other in others]:
            raise ValueError(f"question {a['id']!r} has choices of other lengths in the two Records; run one again")
        chosen += _chosen(ones) != _chosen(others)
        depths += [one["depths"] for one in ones] != [other["depths"] for other in others]
        both = list(zip(ones, others, strict=True))
        values = [xy for one, other in both for xy in zip(one["logprobs"], other["logprobs"], strict=True)]
        possible += any((x is None) != (y is None) for x, y in values)
        most = max([most, *(abs(x - y) for x, y in values if x is not None and y is not None)])
    return ChoiceDifferences(
        answers=len(pairs),
        chosen_differ=chosen,
        most_logprob_difference=most,
        possible_differ=possible,
        depths_differ=depths,
    )


def _chosen(choices: Sequence[Sample]) -> int | None:
    sums = [sum(-inf if x is None else x for x in choice["logprobs"]) for choice in choices]
    return sums.index(max(sums)) if max(sums) > -inf else None
