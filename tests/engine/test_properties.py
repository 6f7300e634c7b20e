"""Random schedules: whatever arrives, ends or is aborted beside it, a request is what it would be alone."""

from __future__ import annotations

import json
import os
import platform
import secrets
import time
from pathlib import Path
from random import Random

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


@EXAMPLES
@given(RANDOM)
def test_each_request_equals_its_lone_run(rng):
    """Tokens, depths, logits, logprobs, planes and usage are the reference's; an aborted request is a prefix."""
    play(draw(rng))


@EXAMPLES
@given(RANDOM)
def test_read_executed_and_prefilled_segments_add_up(rng):
    """Rows per turn and usage per request are two books of the same work; no page or slot is held at the end."""
    play(draw(rng), with_reference=False)


@pytest.mark.slow
def test_campaign_of_random_schedules():
    """5,000 schedules, every second one in float32, where 0.5 % of the requests may be near-ties of the reference.

    ANYDEPTH_CAMPAIGN_OUT names a JSON file for the outcome; ANYDEPTH_CAMPAIGN_SEED repeats a run.
    """
    seed = int(os.environ.get("ANYDEPTH_CAMPAIGN_SEED") or secrets.randbits(63))
    count = int(os.environ.get("ANYDEPTH_CAMPAIGN_SCHEDULES", "5000"))
    print(f"campaign of {count} schedules, ANYDEPTH_CAMPAIGN_SEED={seed}")
    started, requests, tokens, endings, near_ties, failures = time.monotonic(), [0, 0], 0, {}, [], []
    for n in range(count):
        schedule = draw(Random(f"{seed}/{n}"), dtype="float32" if n % 2 else "float64")
        try:
            played = play(schedule)
        except Exception as error:
            failures.append({"schedule": repr(schedule), "error": f"{type(error).__name__}: {error}"})
            print(f"schedule {n} fails: {error}\nplay({schedule!r})")
            continue
        requests[n % 2] += len(played.outputs)
        tokens += sum(len(output.token_ids) for output in played.outputs)
        for output in played.outputs:
            endings[output.finish_reason] = endings.get(output.finish_reason, 0) + 1
        near_ties += [f"schedule {n}: {tie}" for verdict in played.verdicts for tie in verdict.near_ties]
    outcome = {
        "schedules": count,
        "requests": sum(requests),
        "requests_float64": requests[0],
        "requests_float32": requests[1],
        "output_tokens": tokens,
        "finish_reasons": endings,
        "near_ties": near_ties,
        "failures": failures,
        "seconds": round(time.monotonic() - started, 1),
        "seed": seed,
        "versions": {
            "anydepth": anydepth.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    if path := os.environ.get("ANYDEPTH_CAMPAIGN_OUT"):
        Path(path).write_text(json.dumps(outcome, indent=1) + "\n")
    assert not failures, f"{len(failures)} schedules fail, the first: {failures[0]}"
    assert len(near_ties) <= NEAR_TIE_SHARE * requests[1], near_ties
