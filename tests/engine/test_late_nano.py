"""A trained model in float32, under random schedules: each answer is that of the synchronous engine alone."""

from __future__ import annotations

import functools
import os
from random import Random

import pytest

from anydepth.engine.completions import AdversarialCompletions
from anydepth.engine.engine import Engine
from anydepth.engine.submission import Submission
from anydepth.models.load import load_checkpoint
from anydepth.models.nano.questions import questions
from anydepth.types import Sampling
from tests.engine.schedules import Asked, Schedule, run_schedule
from tests.helpers import assert_empty, poison

SCHEDULES = int(os.environ.get("ANYDEPTH_NANO_SCHEDULES", "40"))
STOPS = (" has", " .", "more than", "####")


@functools.cache
def nano():
    return load_checkpoint("nano")


@functools.cache
def prompts() -> list[tuple[int, ...]]:
    return [tuple(nano().tokenizer.encode(question.prompt)) for question in questions("validation", n=60)]


def draw(rng: Random) -> Schedule:
    """Questions at all thresholds and within bounds, greedy and sampled, that end by EOS, stop ids, stop strings,
    length or an abort; a small pool, short chunks, requests that have to give way."""
    mode = rng.choice(["exact", "resident"])
    fill = rng.choice(["last_exited", "full"] + ["shared"] * (mode == "resident"))
    asked = tuple(_asked(rng) for _ in range(rng.randint(3, 8)))
    page_size = rng.choice([4, 8, 16])
    most = max(-(-(len(ask.prompt) + ask.settings["max_tokens"]) // page_size) for ask in asked)
    engine = {
        "signals": mode,
        "max_batch": rng.randint(1, 6),
        "page_size": page_size,
        "kv_pages": most + rng.choice([0, most // 2, 3 * most]),  # half as much again: a pool for 1.5 requests
        "max_batched_tokens": rng.choice([3, 16, 512]),
        "submission": Submission(padding=mode == "resident" and rng.choice([True, False])),
    }
    squeezes = tuple((turn, rng.randint(0, 5)) for turn in range(60) if rng.random() < 0.3) * rng.choice([0, 1])
    return Schedule("nano", 0, {}, None, "float32", fill, (), engine, asked, rng.getrandbits(32), squeezes)


def _asked(rng: Random) -> Asked:
    low = rng.choice([1, 1, 2, 3])
    settings = {"max_tokens": rng.choice([3, 12, 40]), "exit_threshold": rng.choice([0.99, 0.9, 0.7, 0.5, 0.2, 0.0])}
    settings |= {"min_depth": low, "max_depth": rng.choice([4, 4, max(low, 3)])}
    if rng.random() < 0.3:
        settings |= {"temperature": rng.choice([0.7, 1.5]), "seed": rng.randrange(1000)}
    if rng.random() < 0.3:
        settings["stop"] = rng.choice(STOPS)
    if rng.random() < 0.2:
        settings["stop_token_ids"] = (rng.randrange(10, 70),)
    if rng.random() < 0.2:
        settings["first_token"] = "policy"
    abort = rng.randint(0, 60) if rng.random() < 0.2 else None
    return Asked(
        rng.randint(0, 25), rng.choice(prompts()), settings, abort, (), rng.choice([0, 0, 1]), rng.random() < 0.5
    )


@functools.lru_cache(maxsize=4096)
def alone(fill: str, prompt: tuple[int, ...], settings: tuple):
    engine = sync_engine(fill)
    outputs = [chunk.output for chunk in engine.run([engine.prepare(prompt, Sampling(**dict(settings)))])]
    return outputs[-1]


@functools.cache
def sync_engine(fill: str) -> Engine:
    return Engine(nano().model, tokenizer=nano().tokenizer, eos_ids=nano().eos_ids, fill=fill, prefix_sharing=False)


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_each_answer_is_that_of_a_lone_synchronous_run(seed):
    schedule = draw(Random(f"nano {seed}"))
    engine = poison(
        Engine(nano().model, tokenizer=nano().tokenizer, eos_ids=nano().eos_ids, fill=schedule.fill, **schedule.engine)
    )
    engine.runner.completions = AdversarialCompletions(schedule.late)
    for ask, ran in zip(schedule.asked, run_schedule(engine, schedule), strict=True):
        got, wanted = ran.output, alone(schedule.fill, ask.prompt, tuple(sorted(ask.settings.items())))
        count = len(got.token_ids)
        assert got.token_ids == wanted.token_ids[:count] and got.depths == wanted.depths[:count], schedule
        if got.finish_reason == "abort":
            continue
        assert (got.finish_reason, got.text, count) == (wanted.finish_reason, wanted.text, len(wanted.token_ids))
        if schedule.engine["signals"] == "resident" or schedule.fill == "full":
            assert got.usage.segments_executed == wanted.usage.segments_executed, schedule
    assert_empty(engine)
