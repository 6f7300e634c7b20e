"""What a run's samples say: pure functions of the samples, so that a Record can be checked and broken down again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anydepth.record import Sample
from anydepth.stats import clustered_interval


def aggregate(samples: Sequence[Sample]) -> dict[str, Any]:
    """Accuracy, lengths, depths and segments of an arm, over all samples and by group.

    Depths count decode tokens only: an answer's first token comes from the prompt's prefill, which runs at full depth.
    Tokens a question include it. Shares are in 0..1, None where there is nothing to divide by. `by_extractor` has the
    accuracy by each of several extractors. `depth_by_level` is the mean depth of the tokens that take so many steps of
    work, where the task marks them. `latency_s` has percentiles (between the two nearest values) over answers, each
    from its beginning to its end; what was too long to be asked is left out. `tallies`, of policies that have some: of
    `confidence` how often its tests kept a row, and how often one alone did.
    """
    groups = sorted({sample["group"] for sample in samples if sample["group"] is not None}, key=_order)
    return {
        **_summary(samples),
        "unscored": sum(sample["score"] is None for sample in samples),
        "unparseable": sum(next(iter(sample["prediction"].values()), "") is None for sample in samples),
        "by_extractor": _by_extractor(samples),
        "length_stops": sum(sample["finish_reason"] == "length" for sample in samples),
        "depth_histogram": _histogram(samples),
        "segments_read_per_question": _mean(sample["segments_read"] for sample in samples),
        "segments_executed_per_question": _mean(sample["segments_executed"] for sample in samples),
        "by_group": {str(group): _summary([s for s in samples if s["group"] == group]) for group in groups},
        "depth_by_level": _by_level(samples),
        "latency_s": _latency([sample["latency_s"] for sample in samples if sample.get("latency_s")]),
        **_tallies(samples),
    }


def mean_layer(found: Mapping[str, Any], settings: Mapping[str, Any]) -> float | None:
    """The mean layer after which decode tokens were read, from a Record's aggregates and settings. None where the
    settings name no layers, or nothing was decoded."""
    shares = layer_shares(found, settings)
    return sum(layer * share for layer, share in shares.items()) if shares else None


def layer_shares(found: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[int, float]:
    """Share of decode tokens read after each layer that has an exit; {} where `mean_layer` is None."""
    layers, counts = settings.get("exit_layers") or [], found["depth_histogram"]
    total = sum(counts.values())
    return {layer: counts.get(str(k), 0) / total for k, layer in enumerate(layers, 1)} if total else {}


def _latency(seconds: Sequence[float]) -> dict[str, float | None]:
    return {f"p{q}": _percentile(sorted(seconds), q / 100) for q in (50, 95)}


def _tallies(samples: Sequence[Sample]) -> dict[str, dict[str, int]]:
    total = Counter[str]()
    for sample in samples:
        total.update(sample.get("tallies", {}))
    return {"tallies": dict(total)} if total else {}


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def decode_depths(sample: Sample) -> list[int]:
    """Readout depths of the decode tokens: all of them but, as a rule, the first. Of choices that were scored, the
    depths of every continuation's tokens."""
    if "choices" in sample:
        return [depth for choice in sample["choices"] for depth in choice["depths"]]
    depths: list[int] = sample["depths"]
    return depths[len(depths) - sample["decode_tokens"] :]


def accuracy(scores: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Mean of (question id, score) with its 95 % interval, for which a question is the unit however many answers it
    has: Wilson's where each has one, right or wrong."""
    by_question: dict[str, list[float]] = {}
    for id, score in scores:
        by_question.setdefault(id, []).append(score)
    low, high = clustered_interval(by_question.values()) if by_question else (None, None)
    return {"accuracy": _mean(sum(marks) / len(marks) for marks in by_question.values()), "low": low, "high": high}


def _summary(samples: Sequence[Sample]) -> dict[str, Any]:
    return {
        "n": len(samples),
        **accuracy((sample["id"], sample["score"]) for sample in samples if sample["score"] is not None),
        "mean_depth": _mean(depth for sample in samples for depth in decode_depths(sample)),
        "tokens_per_question": _mean(len(sample["output_ids"]) for sample in samples),
    }


def _by_extractor(samples: Sequence[Sample]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for sample in samples for name in sample.get("scores", {})))
    found = {}
    for name in names:
        marked = [sample for sample in samples if name in sample.get("scores", {})]
        unread = sum(sample["prediction"].get(name) is None for sample in marked)
        found[name] = {**accuracy((sample["id"], sample["scores"][name]) for sample in marked), "unparseable": unread}
    return found


def _histogram(samples: Sequence[Sample]) -> dict[str, int]:
    counts = Counter(depth for sample in samples for depth in decode_depths(sample))
    return {str(depth): counts[depth] for depth in sorted(counts)}


def _by_level(samples: Sequence[Sample]) -> dict[str, Mapping[str, Any]]:
    found: dict[int, list[int]] = {}
    for sample in samples:
        decoded = decode_depths(sample)
        levels = (sample.get("levels") or [])[len(sample["depths"]) - len(decoded) :]
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
