"""What a run's samples say: pure functions of the samples, so that a Record can be checked and broken down again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anydepth.record import Sample
from anydepth.stats import wilson


def aggregate(samples: Sequence[Sample]) -> dict[str, Any]:
    """Accuracy, lengths, depths and segments of an arm, over all samples and by group.

    Depths count decode tokens only: an answer's first token comes from the prompt's prefill, which runs at full depth.
    Tokens a question include it. Shares are in 0..1, None where there is nothing to divide by. `depth_by_level` is the
    mean depth of the tokens that take so many steps of work, where the task marks them.
    """
    groups = sorted({sample["group"] for sample in samples if sample["group"] is not None}, key=_order)
    return {
        **_summary(samples),
        "unscored": sum(sample["score"] is None for sample in samples),
        "unparseable": sum(next(iter(sample["prediction"].values()), "") is None for sample in samples),
        "length_stops": sum(sample["finish_reason"] == "length" for sample in samples),
        "depth_histogram": _histogram(samples),
        "segments_read_per_question": _mean(sample["segments_read"] for sample in samples),
        "segments_executed_per_question": _mean(sample["segments_executed"] for sample in samples),
        "by_group": {str(group): _summary([s for s in samples if s["group"] == group]) for group in groups},
        "depth_by_level": _by_level(samples),
    }


def decode_depths(sample: Sample) -> list[int]:
    """Readout depths of the decode tokens: all of them but, as a rule, the first."""
    depths: list[int] = sample["depths"]
    return depths[len(depths) - sample["decode_tokens"] :]


def _summary(samples: Sequence[Sample]) -> dict[str, Any]:
    scores = [sample["score"] for sample in samples if sample["score"] is not None]
    low, high = wilson(sum(scores), len(scores)) if scores else (None, None)
    return {
        "n": len(samples),
        "accuracy": _mean(scores),
        "low": low,
        "high": high,
        "mean_depth": _mean(depth for sample in samples for depth in decode_depths(sample)),
        "tokens_per_question": _mean(len(sample["output_ids"]) for sample in samples),
    }


def _histogram(samples: Sequence[Sample]) -> dict[str, int]:
    counts = Counter(depth for sample in samples for depth in decode_depths(sample))
    return {str(depth): counts[depth] for depth in sorted(counts)}


def _by_level(samples: Sequence[Sample]) -> dict[str, Mapping[str, Any]]:
    found: dict[int, list[int]] = {}
    for sample in samples:
        decoded = decode_depths(sample)
        levels = (sample["levels"] or [])[len(sample["depths"]) - len(decoded) :]
        for level, depth in zip(levels, decoded, strict=False):
            if level:
                found.setdefault(level, []).append(depth)
    return {str(level): {"tokens": len(depths), "mean_depth": _mean(depths)} for level, depths in sorted(found.items())}


def _order(group: str | int) -> tuple[bool, str | int]:
    """Numbers in order, then words."""
    return isinstance(group, str), group


def _mean(values: Iterable[float]) -> float | None:
    every = list(values)
    return sum(every) / len(every) if every else None
