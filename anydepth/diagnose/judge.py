"""What a replay says of two runs: margins where they differ, and how far numbers move with the batch around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anydepth.diagnose.divergence import Baseline, Margins, gate_contradiction
from anydepth.diagnose.replay import Seen, replay
from anydepth.engine.philox import uniforms
from anydepth.engine.sampling import Settings, processed
from anydepth.exits.load import load_policy
from anydepth.models.base import Model
from anydepth.reference import process
from anydepth.types import EXACT_FILLS, Output, Sampling

PERCENT = 99  # of the baseline's differences lie below what is called a tie
EPSILON = 1e-12  # the last edge is 1: nothing lies beyond it


class Sight(NamedTuple):
    """What is kept of an output: its two likeliest ids and their logits, the edges of its token's interval (sampled),
    the gate's exit probabilities."""

    ids: Tensor
    logits: Tensor
    edges: tuple[float, float] | None
    cdf: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Replayer:
    """The Judge over real models.

    models: of the dtypes that the two runs compute in, A's first. settings: A's, as a Record has them. answers: A's,
    for the baseline. concurrency: answers at a time in the runs. Margins come from the most precise model, baselines
    from each of them: the larger one counts.
    """

    models: tuple[Model, ...]
    settings: Mapping[str, Any]
    answers: Sequence[Output]
    concurrency: int

    @cached_property
    def _sampling(self) -> Sampling:
        names = ("temperature", "top_k", "top_p", "exit_threshold", "min_depth", "max_depth", "first_token")
        return Sampling(**{name: self.settings[name] for name in names if name in self.settings})

    @cached_property
    def _thresholds(self) -> tuple[float, ...] | None:
        """tau at every depth; None where another policy than the gate's decides."""
        if self.settings["policy"] != "gate_cdf":
            return None
        policy = load_policy("gate_cdf", gate_dtype=self._gate_dtype)
        segments, ask = self.models[0].shape.segments, self._sampling
        return policy.parameters(ask, (ask.min_depth, ask.max_depth or segments), segments)[:segments]

    @property
    def _gate_dtype(self) -> str:
        return self.settings.get("gate_dtype") or "float32"

    @property
    def _fill(self) -> str:
        """`deferred` holds in the end what `full` does."""
        fill: str = self.settings["fill"]
        return "full" if fill in EXACT_FILLS else fill

    def baseline(self) -> Baseline:
        """Replays all answers alone and together, in every model."""
        answers = [answer for answer in self.answers if answer.token_ids]
        found = [self._variance(model, answers) for model in self.models]
        figures = ("logit", "probability", "cdf", "most_logit", "most_probability", "most_cdf")
        worst: dict[str, Any] = {name: _worst([getattr(each, name) for each in found]) for name in figures}
        return replace(found[0], **worst)

    def margins(self, pairs: Sequence[tuple[Output, Output, int]]) -> list[Margins]:
        """Replays both answers of every pair up to the position, each alone."""
        model = max(self.models, key=lambda model: torch.finfo(model.dtype).bits)
        asked = [
            (number, side, _until(answer, position))
            for number, (*both, position) in enumerate(pairs)
            for side, answer in enumerate(both)
            if position < len(answer.token_ids)
        ]
        seen: dict[tuple[int, int], Seen] = {}
        ends = [answer for *_, answer in asked]
        for each in replay(model, ends, fill=self._fill, gate_dtype=self._gate_dtype):
            number, side, answer = asked[each.answer]
            if each.output == len(answer.token_ids) - 1:
                seen[number, side] = each
        return [self._margins(pair, [seen.get((number, side)) for side in (0, 1)]) for number, pair in enumerate(pairs)]

    def _variance(self, model: Model, answers: Sequence[Output]) -> Baseline:
        """Percentiles of what differs between reading alone and in company."""
        alone = {(s.answer, s.output): self._sight(s, answers) for s in self._replay(model, answers, 1)}
        logit, edge, cdf = [np.zeros(0)], [], []
        for seen in self._replay(model, answers, self.concurrency):
            one = alone.pop((seen.answer, seen.output))
            logit.append((seen.logits_V.double()[one.ids] - one.logits).abs().cpu().numpy())
            cdf += [abs(x - y) for x, y in zip(one.cdf, seen.cdf, strict=True)]
            if one.edges is not None:
                other = self._edges(seen.logits_V, answers[seen.answer].token_ids[seen.output])
                edge += [abs(x - y) for x, y in zip(one.edges, other, strict=True)]
        return Baseline(
            concurrency=self.concurrency,
            answers=len(answers),
            positions=sum(len(answer.token_ids) for answer in answers),
            logit=_percentile(apart := np.concatenate(logit)) or 0.0,
            probability=_percentile(edge),
            cdf=_percentile(cdf),
            most_logit=float(apart.max(initial=0.0)),
            most_probability=max(edge, default=None),
            most_cdf=max(cdf, default=None),
        )

    def _replay(self, model: Model, answers: Sequence[Output], concurrency: int) -> Any:
        return replay(model, answers, fill=self._fill, gate_dtype=self._gate_dtype, concurrency=concurrency)

    def _sight(self, seen: Seen, answers: Sequence[Output]) -> Sight:
        ids = seen.logits_V.topk(2).indices
        token = answers[seen.answer].token_ids[seen.output]
        edges = self._edges(seen.logits_V, token) if self._sampling.temperature > 0 else None
        return Sight(ids, seen.logits_V.double()[ids], edges, seen.cdf)

    def _edges(self, logits_V: Tensor, token: int) -> tuple[float, float]:
        """The token's interval of cumulative processed probability."""
        ask, vocab, device = self._sampling, len(logits_V), logits_V.device
        top_k = None if ask.top_k is None else min(ask.top_k, vocab)
        settings = Settings(
            torch.tensor([ask.temperature], dtype=torch.float64, device=device),
            torch.tensor([top_k or vocab + 1], device=device),
            torch.tensor([ask.top_p], dtype=torch.float64, device=device),
        )
        row = logits_V.unsqueeze(0)
        high = processed(row, settings, max_k=top_k, any_top_p=ask.top_p < 1)[0].cumsum(0)
        return (float(high[token - 1]) if token else 0.0), float(high[token])

    def _margins(self, pair: tuple[Output, Output, int], seen: Sequence[Seen | None]) -> Margins:
        *both, position = pair
        found = [(answer, each) for answer, each in zip(both, seen, strict=True) if each is not None]
        if not found:
            return Margins()
        return replace(self._draw(found, position), gate=self._gate(found, position))

    def _draw(self, found: Sequence[tuple[Output, Seen]], position: int) -> Margins:
        first = found[0][1].logits_V
        if self._sampling.temperature == 0:
            top = first.double().topk(2).values
            missed = [float(s.logits_V.double().max() - s.logits_V.double()[a.token_ids[position]]) for a, s in found]
            return Margins(top=float(top[0] - top[1]), token=max(missed))
        ask, u = self._sampling, float(uniforms(found[0][0].seed, position + 1)[position])
        away = [_outside(u, self._edges(s.logits_V, a.token_ids[position])) for a, s in found]
        settled = process(first.double().tolist(), temperature=ask.temperature, top_k=ask.top_k, top_p=ask.top_p)
        edges = [edge for edge in accumulate(settled.probabilities) if 0 < edge < 1 - EPSILON]
        return Margins(
            top=min((abs(edge - u) for edge in edges), default=inf),
            token=max(away),
            cut=settled.cut_gap,
            mass=settled.mass_gap,
        )

    def _gate(self, found: Sequence[tuple[Output, Seen]], position: int) -> float | None:
        thresholds = self._thresholds
        if thresholds is None or (position == 0 and self._sampling.first_token == "prefill"):
            return None
        # All that ran up to the deeper readout is the same in both: the deeper replay has all rounds.
        cdf = max((seen.cdf for _, seen in found), key=len)
        depths = {answer.depths[position] for answer, _ in found}
        late = self.settings.get("signals") == "delayed"
        if len(depths) > 1:
            return max(gate_contradiction(cdf, thresholds, depth, late=late) for depth in depths)
        asked = zip(cdf[: max(depths) - late], thresholds, strict=False)
        return min((abs(x - tau) for x, tau in asked if abs(tau) != inf), default=None)


def _until(answer: Output, position: int) -> Output:
    """The answer up to this output."""
    return replace(answer, token_ids=answer.token_ids[: position + 1], depths=answer.depths[: position + 1])


def _outside(u: float, edges: tuple[float, float]) -> float:
    return max(edges[0] - u, u - edges[1], 0.0)


def _worst(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _percentile(values: Any) -> float | None:
    return float(np.percentile(values, PERCENT)) if len(values) else None
