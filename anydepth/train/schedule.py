"""Where a run of looped pretraining stands, how large its steps are there, and where it goes next."""

from __future__ import annotations

from dataclasses import dataclass, replace

from anydepth.models.nano.questions import MAX_HOPS
from anydepth.train.recipe import Recipe

_DECAY_TO = 0.02


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands. `accuracy` are running means on computed numbers, one a depth; `levels` the step of each."""

    phase: str = "A"
    step: int = 0
    level: int = 0
    level_steps: int = 0
    accuracy: tuple[float, ...] = ()
    levels: tuple[int, ...] = (0,)
    steps: tuple[int, ...] = ()
    tokens: int = 0
    seconds: float = 0.0


def lr_factor(recipe: Recipe, at: Progress) -> float:
    """Share of the learning rates at a step: linear warm-up in each phase, constant, linear decay in B and C."""
    warm = min(1.0, (at.step + 1) / recipe.warmup)
    if at.phase == "A":
        return warm
    steps, decay, top = (
        (recipe.steps_b, recipe.decay_b, 1.0) if at.phase == "B" else (recipe.steps_c, recipe.decay_c, recipe.lr_c)
    )
    left = (steps - at.step) / max(1.0, decay * steps)
    return top * warm * max(_DECAY_TO, min(1.0, left))


def next_place(recipe: Recipe, now: Progress) -> Progress:
    """The same place, or the start of the next level or phase."""
    full = now.accuracy[-1]
    if now.phase == "A":
        if now.level == 0 and now.step >= recipe.escape_steps:
            raise RuntimeError(
                f"{full:.0%} of the numbers are right after {now.step} steps at level 0, and above "
                f"{recipe.level_accuracy:.0%} were needed: this start is stuck; choose another seed"
            )
        if now.level < MAX_HOPS and full > recipe.level_accuracy:
            # The running means start afresh, so that a level cannot be passed on the merits of the one before.
            return replace(
                now, level=now.level + 1, level_steps=0, levels=(*now.levels, now.step), accuracy=(0.0,) * recipe.loops
            )
        least, most = recipe.end_steps
        learnt = now.level == MAX_HOPS and (
            now.level_steps >= most or (now.level_steps >= least and full > recipe.end_accuracy)
        )
        return _enter(now, "B") if learnt or now.step >= recipe.cap_a else now
    if now.phase == "B" and now.step >= recipe.steps_b:
        return _enter(now, "C")
    if now.phase == "C" and now.step >= recipe.steps_c:
        return _enter(now, "done")
    return now


def _enter(now: Progress, phase: str) -> Progress:
    return replace(now, phase=phase, step=0, steps=(*now.steps, now.step))


def steps_left(recipe: Recipe, at: Progress) -> int:
    """The most steps that can still come."""
    later = {"A": recipe.steps_b + recipe.steps_c, "B": recipe.steps_c, "C": 0, "done": 0}[at.phase]
    own = {"A": recipe.cap_a, "B": recipe.steps_b, "C": recipe.steps_c, "done": 0}[at.phase]
    return later + own - at.step
