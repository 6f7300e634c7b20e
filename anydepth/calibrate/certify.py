"""Which of the fitted profiles keeps the loss below a bound, on answers that nothing was fitted on.

A question's loss is the share of its answer's decode tokens at which the early exit says another token than full depth
(`disagree_tokens`). Learn then test (arXiv 2110.01052), as `anydepth.eval.calibrate` does it, strictest profile first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

import numpy as np

from anydepth.calibrate.table import Table, agrees, walk
from anydepth.certificate import DRAW_SETTINGS, EXIT_SETTINGS, NEVER, Certificate, question_set_hash
from anydepth.dtypes import dtype_name
from anydepth.engine.llm import LLM
from anydepth.profile import Profile
from anydepth.provenance import source
from anydepth.stats import fixed_sequence, hoeffding_bentkus
from anydepth.types import Sampling

LOSS = "disagree_tokens"


def table_losses(table: Table, profile: Profile, policy: str) -> list[float]:
    """Each question's loss under `fill` full or deferred; 0 for an answer without decode tokens."""
    wrong = ~agrees(table, walk(table, profile, policy))
    counts = np.bincount(table.question_R, minlength=table.questions)
    losses = np.bincount(table.question_R, weights=wrong, minlength=table.questions) / np.maximum(counts, 1)
    return [float(loss) for loss in losses]


def p_value(losses: Sequence[float], epsilon: float) -> float:
    """Of "the mean loss is above epsilon"."""
    return hoeffding_bentkus(fsum(losses) / len(losses), len(losses), epsilon)


def choose(
    profiles: Sequence[Profile],
    losses: Sequence[Sequence[float]],
    *,
    llm: LLM,
    policy: str,
    fill: str,
    epsilon: float,
    delta: float,
    ids: Sequence[str],
    fitted_on: Sequence[str],
    seed: int,
    plan_hash: str,
) -> Certificate:
    """The certificate of the laxest profile reached, the strictest being first; `losses` of each, a question each."""
    p_values = [p_value(lost, epsilon) for lost in losses]
    count = fixed_sequence(p_values, delta)
    grid: tuple[Mapping[str, Any], ...] = tuple({"profile": profile.name} for profile in profiles)
    model, defaults = llm.checkpoint.model, Sampling()
    exits = {name: getattr(defaults, name) for name in EXIT_SETTINGS if name != "profile"}
    segments = model.shape.segments
    return Certificate(
        model_hash=llm.checkpoint.model_hash,
        head_hash=profiles[0].head_hash,
        policy={**exits, "exit_policy": policy, "max_depth": segments, "segments": segments},
        fill=fill,
        signals="sync",
        dtype=dtype_name(model.dtype),
        gate_dtype="float32",
        sampling={name: getattr(defaults, name) for name in DRAW_SETTINGS},
        protocol_hash=plan_hash,
        loss=LOSS,
        grid=grid,
        n=len(ids),
        eps=epsilon,
        delta=delta,
        method="ltt",
        points=tuple(
            {"n": len(lost), "losses": fsum(lost), "unscored": 0, "p": p, "profile_hash": profile.hash}
            for profile, lost, p in zip(profiles, losses, p_values, strict=True)
        ),
        chosen=grid[count - 1] if count else NEVER,
        fitted_on=question_set_hash(fitted_on),
        certified_on=question_set_hash(ids),
        seed=seed,
        made_by=source(),
    )
