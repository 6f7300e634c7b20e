"""Random schedules: whatever arrives, ends or is aborted beside it, a request is what it would be alone."""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import anydepth
from tests.engine.schedules import draw, play
from tests.equality import NEAR_TIE_SHARE

EXAMPLES = settings(
    max_examples=int(os.environ.get("ANYDEPTH_EXAMPLES", "200")),
    deadline=None,
    derandomize=False,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
RANDOM = st.randoms(use_true_random=False)
LATE = ("exact", "resident", "delayed")
CAMPAIGNS: dict[str, dict[str, Any]] = {
    "schedules": {"signals": ("sync",), "dtypes": ("float64", "float32")},
    "late_schedules": {"signals": LATE, "dtypes": ("float64",)},
    "deferred_schedules": {"signals": ("sync", "exact", "delayed"), "dtypes": ("float64",), "fills": ("deferred",)},
}


@EXAMPLES
@given(RANDOM)
def test_each_request_equals_its_lone_run(rng):
    """Tokens, depths, logits, logprobs, planes and usage are the reference's; an aborted request is a prefix."""
    play(draw(rng))


@EXAMPLES
@given(RANDOM)
def test_late_signals_change_nothing(rng):
    """`exact` and `resident` against the synchronous reference, `delayed` against its own synchronous form, outcomes
    late by 0 to 3 turns and out of order."""
    play(draw(rng, signals=LATE))


@EXAMPLES
@given(RANDOM)
def test_read_executed_and_prefilled_segments_add_up(rng):
    """Rows per turn and usage per request are two books of the same work; no page or slot is held at the end."""
    play(draw(rng, signals=("sync", *LATE)), with_reference=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAMPAIGNS)
def test_campaign_of_random_schedules(name):
    """5,000 schedules. Of the synchronous ones every second is in float32, where 0.5 % of the requests may be near-ties
    of the reference.

    ANYDEPTH_CAMPAIGN_OUT names a folder for the outcomes; ANYDEPTH_CAMPAIGN_SEED repeats a run, and
    ANYDEPTH_CAMPAIGN_SCHEDULES shortens one.
    """
    seed = int(os.environ.get("ANYDEPTH_CAMPAIGN_SEED") or secrets.randbits(63))
    outcome = campaign(name, seed, int(os.environ.get("ANYDEPTH_CAMPAIGN_SCHEDULES", "5000")))
    if folder := os.environ.get("ANYDEPTH_CAMPAIGN_OUT"):
        (Path(folder) / f"{name}.json").write_text(json.dumps(outcome, indent=1) + "\n")
    assert not outcome["failures"], f"{len(outcome['failures'])} fail, the first: {outcome['failures'][0]}"
    allowed = NEAR_TIE_SHARE * outcome["dtypes"].get("float32", {"requests": 0})["requests"]
    assert len(outcome["near_ties"]) <= allowed, outcome["near_ties"]


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_short_campaign(name):
    """The long one's code, so that it is known to work when it is wanted."""
    outcome = campaign(name, seed=1, count=6)
    assert outcome["schedules"] == 6 and outcome["seed"] == 1 and not outcome["failures"]
    assert outcome["requests"] == sum(kind["requests"] for kind in outcome["dtypes"].values()) > 6
    assert sum(outcome["signals"].values()) == 6
    assert sum(outcome["finish_reasons"].values()) == outcome["requests"]
    assert json.loads(json.dumps(outcome)) == outcome


def campaign(name: str, seed: int, count: int) -> dict[str, Any]:
    """Play `count` schedules; what came of it, failures with an expression that repeats them included."""
    print(f"{count} {name}, ANYDEPTH_CAMPAIGN_SEED={seed}")
    started, options = time.monotonic(), dict(CAMPAIGNS[name])
    dtypes = options.pop("dtypes")
    kinds = {dtype: {"requests": 0, "output_tokens": 0} for dtype in dtypes}
    modes, endings, near_ties, failures = Counter[str](), Counter[str](), [], []
    for n in range(count):
        dtype = dtypes[n % len(dtypes)]
        schedule = draw(Random(f"{seed}/{n}"), dtype=dtype, **options)
        modes[schedule.engine["signals"]] += 1
        try:
            played = play(schedule)
        except Exception as error:
            failures.append({"error": f"{type(error).__name__}: {error}", "repeat": f"play({schedule!r})"})
            print(f"schedule {n} fails: {error}\nplay({schedule!r})")
            continue
        kinds[dtype]["requests"] += len(played.ran)
        kinds[dtype]["output_tokens"] += sum(usage.output_tokens for ran in played.ran for usage in ran.usages)
        endings.update(ran.output.finish_reason for ran in played.ran)
        endings.update(preempted=played.preempted, shared_prompt_tokens=played.shared_tokens)
        near_ties += [f"schedule {n}: {'; '.join(v.near_ties)}" for v in played.verdicts if v.near_ties]
    preempted, shared = endings.pop("preempted", 0), endings.pop("shared_prompt_tokens", 0)
    return {
        "schedules": count,
        "signals": dict(modes),
        "requests": sum(kind["requests"] for kind in kinds.values()),
        "dtypes": kinds,
        "finish_reasons": dict(endings),
        "preempted": preempted,
        "shared_prompt_tokens": shared,
        "near_ties": near_ties,
        "failures": failures,
        "seconds": round(time.monotonic() - started, 1),
        "seed": seed,
        "versions": {
            "anydepth": anydepth.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }
