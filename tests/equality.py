"""What "equal" means when a run is compared with the reference, in one place.

float64: nothing is excused. float32: ids and depths are identical unless the reference was a near-tie at the first
place where the two differ; such cases are listed in the verdict, and a campaign allows 0.5 % of them. Logits, logprobs
and planes agree over the common prefix, absolute plus relative.

    verdict = compare(reference.generate(...), output)   # or assert_equal(...), which raises with every problem
    assert_campaign(verdicts)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
TOP_GAP = 1e-4  # greedy: largest minus second largest logit
CUT_GAP = 1e-4  # sampled: the logit gap at top-k's cut
EDGE_GAP = 1e-5  # sampled: u to an edge of its interval; top_p to a cumulative mass
POLICY_GAP = 1e-5  # cdf to the threshold
NEAR_TIE_SHARE = 0.005
USAGE = (
    "prompt_tokens",
    "output_tokens",
    "decode_tokens",
    "segments_read",
    "segments_executed",
    "segments_prefill",
)
SCORE_USAGE = ("decode_tokens", "segments_read", "segments_executed")


@dataclass
class Verdict:
    """problems: why the two are not equal. near_ties: differences the reference excuses (float32 only). divergence: the
    first output whose id or depth differs. worst: per kind of value, the largest error as a multiple of its tolerance.
    """

    problems: list[str] = field(default_factory=list)
    near_ties: list[str] = field(default_factory=list)
    divergence: int | None = None
    worst: dict[str, float] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        return not self.problems

    def __bool__(self) -> bool:
        return self.equal


def compare(reference: Any, got: Any, *, usage: Sequence[str] | None = None, executed: int | None = None) -> Verdict:
    """Compare a `anydepth.reference` Result with anything that has its attributes.

    got: token_ids (a scored continuation may lack them), depths and, each optional or None: prompt_ids, logprobs and
    logprobs_mode, finish_reason, greedy, logits (a [V] per output), planes (K and V per plane, each [layers, positions,
    K, C] over at least the compared positions), plane_depths (how many planes hold true K/V at each position, for fills
    that leave deeper ones empty), usage.
    usage: the fields compared (default: all but segments_wasted; of a score, what decode rows cost). executed: the
    segments_executed expected where it is not the reference fill's own number.
    """
    verdict = Verdict()
    exact = reference.logits[0].dtype == torch.float64
    ids = list(_get(got, "token_ids", reference.token_ids))
    if list(_get(got, "prompt_ids", reference.prompt_ids)) != list(reference.prompt_ids):
        verdict.problems.append("another prompt")
        return verdict
    depths = list(got.depths)
    if len(depths) != len(ids):
        verdict.problems.append(f"{len(ids)} token ids but {len(depths)} depths")
        return verdict
    same_depth_there = _first_divergence(verdict, reference, ids, depths, exact)
    common = len(ids) if verdict.divergence is None else verdict.divergence
    common = min(common, len(reference.token_ids))
    _logits(verdict, reference, got, common + same_depth_there)
    _logprobs(verdict, reference, got, common, exact)
    _planes(verdict, reference, got, len(reference.prompt_ids) - 1 + common + same_depth_there)
    if verdict.divergence is None:
        _ending(verdict, reference, got, exact)
        _usage(verdict, reference, got, usage, executed)
    return verdict


def assert_equal(reference: Any, got: Any, **options: Any) -> Verdict:
    """`compare`, raising with every problem; gives the verdict, whose near-ties a campaign counts."""
    verdict = compare(reference, got, **options)
    assert verdict.equal, "\n".join(verdict.problems)
    return verdict


def assert_campaign(verdicts: Iterable[Verdict]) -> None:
    """Every case equal, and at most 0.5 % of the cases excused by a near-tie."""
    verdicts = list(verdicts)
    problems = [f"case {n}: {problem}" for n, v in enumerate(verdicts) for problem in v.problems]
    assert not problems, "\n".join(problems)
    excused = [f"case {n}: {'; '.join(v.near_ties)}" for n, v in enumerate(verdicts) if v.near_ties]
    allowed = NEAR_TIE_SHARE * len(verdicts)
    assert len(excused) <= allowed, "\n".join([f"{len(excused)} near-ties, {allowed:g} allowed", *excused])


def _get(obj: Any, name: str, default: Any = None) -> Any:
    value = getattr(obj, name, None)
    return default if value is None else value


def _first_divergence(verdict: Verdict, reference: Any, ids: list[int], depths: list[int], exact: bool) -> bool:
    """Records the first differing output; True when only its id differs, so that its row is still comparable."""
    wanted = list(zip(reference.token_ids, reference.depths, strict=True))
    for n, (want, have) in enumerate(zip(wanted, zip(ids, depths, strict=True), strict=False)):
        if want == have:
            continue
        verdict.divergence = n
        deeper = want[1] != have[1]
        tie = None if exact else _policy_tie(reference.decisions[n]) if deeper else _token_tie(reference, n)
        text = f"output {n}: id {have[0]} at depth {have[1]}, the reference has id {want[0]} at depth {want[1]}"
        if tie is None:
            verdict.problems.append(text)
        else:
            verdict.near_ties.append(f"{text}; {tie}")
        return not deeper
    if len(ids) != len(wanted):
        verdict.problems.append(f"{len(ids)} outputs, the reference has {len(wanted)}; the common ones are equal")
    return False


def _policy_tie(row: Any) -> str | None:
    if row is None or not row.margin <= POLICY_GAP:
        return None
    return f"its deciding number is {row.margin:.1e} from the threshold"


def _token_tie(reference: Any, n: int) -> str | None:
    if not reference.draws:  # a scored continuation: its tokens are given
        return None
    draw = reference.draws[n]
    if not draw.sampled:
        return f"top-1 and top-2 are {draw.top_gap:.1e} apart" if draw.top_gap <= TOP_GAP else None
    if min(abs(draw.u - draw.low), abs(draw.u - draw.high)) <= EDGE_GAP:
        return f"u = {draw.u:.7f} is at an edge of [{draw.low:.7f}, {draw.high:.7f})"
    return _kept_set_tie(draw)


def _kept_set_tie(draw: Any) -> str | None:
    if draw.cut_gap <= CUT_GAP:
        return f"top-k cuts between logits {draw.cut_gap:.1e} apart"
    return f"top_p is {draw.mass_gap:.1e} from a cumulative mass" if draw.mass_gap <= EDGE_GAP else None


def _within(verdict: Verdict, reference: Any, kind: str, have: Any, want: Any) -> bool:
    """|have - want| <= tolerance + tolerance * |want| everywhere; a NaN is never within."""
    tolerance = TOLERANCE[reference.logits[0].dtype]
    have, want = (torch.as_tensor(x, dtype=torch.float64).detach().cpu() for x in (have, want))
    if have.shape != want.shape:
        verdict.problems.append(f"{kind}: shape {tuple(have.shape)}, the reference has {tuple(want.shape)}")
        return True
    if want.numel() == 0:
        return True
    ratio = torch.where(have == want, 0.0, (have - want).abs() / (tolerance + tolerance * want.abs()))
    worst = float(torch.where(ratio.isnan(), math.inf, ratio).max())
    verdict.worst[kind] = max(worst, verdict.worst.get(kind, 0.0))
    return worst <= 1.0


def _logits(verdict: Verdict, reference: Any, got: Any, outputs: int) -> None:
    logits = _get(got, "logits")
    if logits is None:
        return
    if len(logits) < outputs:
        verdict.problems.append(f"logits of {len(logits)} outputs, {outputs} to compare")
        return
    for n in range(outputs):
        if not _within(verdict, reference, "logits", logits[n], reference.logits[n]):
            verdict.problems.append(f"logits of output {n}: {verdict.worst['logits']:.3g} times the tolerance at worst")
            return


def _logprobs(verdict: Verdict, reference: Any, got: Any, outputs: int, exact: bool) -> None:
    logprobs = _get(got, "logprobs")
    if logprobs is None:
        return
    mode = _get(got, "logprobs_mode", reference.logprobs_mode)
    if mode != reference.logprobs_mode:
        verdict.problems.append(f"logprobs are {mode}, the reference's {reference.logprobs_mode}")
        return
    if len(logprobs) < outputs:
        verdict.problems.append(f"logprobs of {len(logprobs)} outputs, {outputs} to compare")
        return
    for n in range(outputs):
        if _within(verdict, reference, "logprobs", logprobs[n], reference.logprobs[n]):
            continue
        # Another set of kept tokens renormalises differently, even where the same token was drawn.
        tie = _kept_set_tie(reference.draws[n]) if mode == "processed" and not exact else None
        text = f"logprob of output {n}: {float(logprobs[n])}, the reference has {reference.logprobs[n]}"
        if tie is None:
            verdict.problems.append(text)
            return
        verdict.near_ties.append(f"{text}; {tie}")


def _planes(verdict: Verdict, reference: Any, got: Any, positions: int) -> None:
    planes = _get(got, "planes")
    if planes is None:
        return
    if len(planes) != len(reference.planes):
        verdict.problems.append(f"{len(planes)} planes, the reference has {len(reference.planes)}")
        return
    held = torch.as_tensor(_get(got, "plane_depths", [len(planes)] * positions))[:positions]
    if len(held) < positions:
        verdict.problems.append(f"plane_depths of {len(held)} positions, {positions} to compare")
        return
    for plane, (pair, wanted) in enumerate(zip(planes, reference.planes, strict=True), start=1):
        filled = held >= plane
        for name, have, want in zip("KV", pair, wanted, strict=True):
            kind = f"plane {plane} {name}"
            if not _within(verdict, reference, kind, _prefix(have, filled), _prefix(want, filled)):
                verdict.problems.append(f"{kind}: {verdict.worst[kind]:.3g} times the tolerance at worst")


def _prefix(x_LTKC: Tensor, filled_T: Tensor) -> Tensor:
    """The filled ones of the compared positions; too few positions show as another shape."""
    x_LTKC = x_LTKC[:, : len(filled_T)]
    return x_LTKC[:, filled_T[: x_LTKC.shape[1]].to(x_LTKC.device)]


def _ending(verdict: Verdict, reference: Any, got: Any, exact: bool) -> None:
    reason = _get(got, "finish_reason", reference.finish_reason)
    if reason != reference.finish_reason:
        verdict.problems.append(f"finish_reason {reason!r}, the reference has {reference.finish_reason!r}")
    greedy = _get(got, "greedy", reference.greedy)
    if reference.greedy is not None and bool(greedy) != reference.greedy:
        gaps = [float(top[0] - top[1]) for top in (z.topk(2).values for z in reference.logits)]
        text = f"greedy {greedy}, the reference has {reference.greedy}"
        if exact or min(gaps) > TOP_GAP:
            verdict.problems.append(text)
        else:
            verdict.near_ties.append(f"{text}; top-1 and top-2 are {min(gaps):.1e} apart")


def _usage(verdict: Verdict, reference: Any, got: Any, fields: Sequence[str] | None, executed: int | None) -> None:
    usage = _get(got, "usage")
    if usage is None:
        return
    if fields is None:
        fields = USAGE if reference.greedy is None else SCORE_USAGE
    for name in fields:
        want = executed if name == "segments_executed" and executed is not None else getattr(reference.usage, name)
        if getattr(usage, name) != want:
            verdict.problems.append(f"usage.{name} is {getattr(usage, name)}, expected {want}")
