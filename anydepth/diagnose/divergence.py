"""Where two runs of the same questions first differ, how narrow the decision was there, and what to make of it.

Two numbers decide. A *margin* says how much the arithmetic would have to move for both runs to be right about the first
thing they disagree on; a *baseline* says how much it does move when nothing but the batch around a request changes. A
difference within the baseline is a tie that rounding broke; one beyond it is a fault. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any, Protocol

from anydepth.eval.compare.factors import EXACT_KV, Factor, factors
from anydepth.eval.compare.sequences import first_difference, kv_parted
from anydepth.types import Output

NEAR_TIE, GATE_TIE = "near-tie", "gate-tie"
DIFFERENT_WORK, FAULT = "different work", "state or ordering fault"
CLASSES = (NEAR_TIE, GATE_TIE, DIFFERENT_WORK, FAULT)
# Settings that say how the work is done. By the semantics none of them changes an output.
HOW = frozenset(
    {
        *("backend", "batch_invariant", "device", "dtype", "kv_pages", "lateness", "max_batch", "max_batched_tokens"),
        *("page_size", "signals", "submission", "streams", "static_buffers", "padding", "graphs"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Margins:
    """How narrow the decisions at one output were, in a replay of both runs up to there; None where there is none.

    `top`: greedy, largest minus second largest logit of A's replay; sampled, the distance of u to the nearer edge of
    its interval, in probability. `token`: the same as far as it takes for each run to have chosen its own token at its
    own depth: the largest logit minus the chosen one (0 for the largest), or u's distance to the chosen token's
    interval; the worse of the two runs. It equals `top` where A and B have the two likeliest tokens. `cut`, `mass`: the
    logit gap at top-k's cut, and top_p's distance to a cumulative probability.
    `gate`: where the depths differ, the largest |cdf - tau| over the rounds at which one of the two runs decided
    against the replayed gate (all of them have to tip); else the least over the rounds that could have decided
    otherwise. inf for a depth that the policy never chooses.
    """

    top: float | None = None
    token: float | None = None
    cut: float = inf
    mass: float = inf
    gate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Batch variance: 99th percentiles of what changes when the same tokens are read at the same depths alone and
    `concurrency` at a time. Over output positions, `logit` of the |difference| of either of the two largest logits,
    `probability` of either edge of the token's interval (None: greedy); `cdf` over rounds (None: no gate). `most_...`
    are the largest; no class depends on them, but one difference in a hundred lies above its percentile."""

    concurrency: int
    answers: int
    positions: int
    logit: float
    probability: float | None = None
    cdf: float | None = None
    most_logit: float = 0.0
    most_probability: float | None = None
    most_cdf: float | None = None


class Judge(Protocol):
    """What can replay the two runs; `diagnose.replay` has the real one."""

    def margins(self, pairs: Sequence[tuple[Output, Output, int]]) -> Sequence[Margins]:
        """The margins of A and B at an output index, for each (A's answer, B's answer, index)."""

    def baseline(self) -> Baseline: ...


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """One answer that differs. `position` is the first output index with another token or depth (or where only one of
    the two goes on); `first_token` and `first_depth` are those of either kind, None where that never differs.

    All tokens and depths before `position` are the same. `kv_differs_after` is the index after which the K/V is not
    (None: it never differs): a depth leaves no trace in the K/V of exact fills, in that of others it does. `tokens`,
    `depths`: of A and B at `position`, None where one has ended.
    """

    id: str
    answer_index: int
    position: int
    first_token: int | None
    first_depth: int | None
    kv_differs_after: int | None
    tokens: tuple[int | None, int | None]
    depths: tuple[int | None, int | None]
    margins: Margins
    kind: str

    @property
    def context(self) -> str:
        """What stood before the first other token (where there is none, before `position`), in words: the ids are the
        same there, the K/V need not be."""
        at = self.position if self.first_token is None else self.first_token
        since = self.kv_differs_after
        return "same" if since is None or since >= at else f"K/V differs after {since}"

    def asdict(self) -> dict[str, Any]:
        """As JSON takes it: "inf" is written as a word, as JSON has no such number."""
        margins = {name: "inf" if value == inf else value for name, value in asdict(self.margins).items()}
        return {**asdict(self), "margins": margins, "context": self.context}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All differences between two runs. `work` names the settings in which they ask for other outputs; `baseline` is
    None where it was not needed."""

    answers: int
    work: tuple[Factor, ...]
    divergences: tuple[Divergence, ...]
    baseline: Baseline | None

    @property
    def classes(self) -> dict[str, int]:
        """Answers of each class, all classes named."""
        found = Counter(divergence.kind for divergence in self.divergences)
        return {kind: found[kind] for kind in CLASSES}

    @property
    def faults(self) -> int:
        return self.classes[FAULT]

    def asdict(self) -> dict[str, Any]:
        return {
            "answers": self.answers,
            "differ": len(self.divergences),
            "classes": self.classes,
            "different_work": [factor._asdict() for factor in self.work],
            "baseline": self.baseline and asdict(self.baseline),
            "divergences": [divergence.asdict() for divergence in self.divergences],
        }


def asks_differ(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Factor, ...]:
    """Settings in which two runs ask for different outputs: policy, threshold, fill, temperature and so on, and
    `signals` where one is `delayed`, which is another policy. How the same is done (HOW) is none of them."""
    late = "delayed" in (a.get("signals"), b.get("signals"))
    found = factors(a, b).counted
    return tuple(factor for factor in found if factor.name not in HOW or (factor.name == "signals" and late))


def diagnose(
    a: Sequence[Output],
    b: Sequence[Output],
    *,
    judge: Judge,
    work: Sequence[Factor] = (),
    kv: tuple[str, str] = (EXACT_KV, EXACT_KV),
    segments: int,
) -> Diagnosis:
    """Hold the answers of two runs against each other, in A's order. `request_id` names the question.

    work: of `asks_differ`. kv: `kv_kind` of either run's settings. segments: R. The judge replays only answers that
    differ, and measures the baseline only if there are any.
    Example: A and B differ at output 7 in the token, at one depth; its logits there are 2e-6 apart and batch variance
    is 4e-6: a near-tie. 0.5 apart, it is a state or ordering fault.
    Raises ValueError where the two don't answer the same prompts.
    """
    others = {_key(output): output for output in b}
    if {_key(output) for output in a} != others.keys():
        raise ValueError(f"A has {len(a)} answers and B {len(b)}, not of the same questions; ask both the same ones")
    pairs = []
    for one in a:
        other = others[_key(one)]
        if one.prompt_ids != other.prompt_ids:
            raise ValueError(f"question {one.request_id!r} has another prompt in A and B; give both the same tokenizer")
        if (position := _first(one, other)) is not None:
            pairs.append((one, other, position))
    if not pairs:
        return Diagnosis(answers=len(a), work=tuple(work), divergences=(), baseline=None)
    baseline = judge.baseline()
    found = []
    for (one, other, position), margins in zip(pairs, judge.margins(pairs), strict=True):
        before = len(one.depths) - one.usage.decode_tokens
        parted = kv_parted(one.depths, other.depths, before, segments, kv)
        kind = DIFFERENT_WORK if work else _kind(one, other, position, margins, baseline)
        found.append(_divergence(one, other, position, margins, kind, parted))
    return Diagnosis(answers=len(a), work=tuple(work), divergences=tuple(found), baseline=baseline)


def gate_contradiction(cdf: Sequence[float], thresholds: Sequence[float], depth: int, *, late: bool = False) -> float:
    """How far the gate is from having read a row at `depth`: the largest |cdf - tau| over rounds whose decision was
    another one; 0 where it agrees, inf for a depth that no gate leads to.

    cdf: exit probability by each round that ran, up to `depth` at least. thresholds: one a depth, inf below min_depth
    and -inf from max_depth on, where every row leaves. late: signals are `delayed`, a row is read one round after the
    one that decided.
    Example: cdf (.3, .51), tau .5, depth 3 of 4: round 2 should have left, .01 over the threshold.
    """
    high = thresholds.index(-inf) + 1
    decided = depth - late
    if depth > high or (decided < 1 and depth < high):
        return inf
    worst = 0.0
    for r in range(1, min(decided, high - 1) + 1):
        leaves = r == decided
        if leaves and depth == high:  # one round late it ends at max_depth, whatever was decided there
            continue
        if (cdf[r - 1] >= thresholds[r - 1]) != leaves:
            worst = max(worst, abs(cdf[r - 1] - thresholds[r - 1]))
    return worst


def _key(output: Output) -> tuple[str, int]:
    return output.request_id, output.answer_index


def _first(a: Output, b: Output) -> int | None:
    """First index at which tokens, depths or, at last, the ends differ."""
    found = [first_difference(a.token_ids, b.token_ids), first_difference(a.depths, b.depths)]
    first = min((index for index in found if index is not None), default=None)
    return len(a.token_ids) if first is None and a.finish_reason != b.finish_reason else first


def _divergence(
    a: Output, b: Output, position: int, margins: Margins, kind: str, kv_differs_after: float
) -> Divergence:
    return Divergence(
        id=a.request_id,
        answer_index=a.answer_index,
        position=position,
        first_token=first_difference(a.token_ids, b.token_ids),
        first_depth=first_difference(a.depths, b.depths),
        kv_differs_after=None if kv_differs_after == inf else int(kv_differs_after),
        tokens=(_at(a.token_ids, position), _at(b.token_ids, position)),
        depths=(_at(a.depths, position), _at(b.depths, position)),
        margins=margins,
        kind=kind,
    )


def _kind(a: Output, b: Output, position: int, margins: Margins, baseline: Baseline) -> str:
    """A tie where every decision that differs is within the baseline: the depth, and the token at its own depth."""
    if position >= min(len(a.token_ids), len(b.token_ids)):
        return FAULT
    if a.depths[position] == b.depths[position]:
        return NEAR_TIE if _token_tie(margins, baseline) else FAULT
    tokens = margins.token == 0 or _token_tie(margins, baseline)
    return GATE_TIE if tokens and _below(margins.gate, baseline.cdf) else FAULT


def _token_tie(margins: Margins, baseline: Baseline) -> bool:
    """Whether each run's token is the replay's own, or as near to it as batch variance reaches."""
    if baseline.probability is None:
        return _below(margins.token, baseline.logit)
    return (
        _below(margins.token, baseline.probability)
        or _below(margins.cut, baseline.logit)
        or _below(margins.mass, baseline.probability)
    )


def _below(margin: float | None, bound: float | None) -> bool:
    return margin is not None and bound is not None and margin < bound


def _at(values: Sequence[int], index: int) -> int | None:
    return values[index] if index < len(values) else None
