"""A replay sees what the reference computed for the same tokens and depths: logits, and the gate at every round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anydepth.diagnose.replay import replay
from anydepth.engine.engine import Engine
from anydepth.types import Sampling
from tests.helpers import drain, expected, twins

PROMPTS = [(5, 9, 2), (7, 1, 44, 3, 8, 13, 2), (60,), tuple(range(3, 15))]
ASKS = {
    "gate": {"exit_threshold": 0.5, "max_tokens": 9},
    "sampled": {"exit_threshold": 0.4, "temperature": 1.0, "seed": 3, "max_tokens": 7},
    "policy": {"exit_threshold": 0.5, "first_token": "policy", "max_tokens": 6},
    "bounds": {"exit_threshold": 0.3, "min_depth": 2, "max_depth": 3, "max_tokens": 6},
}


def answers(model, ask, fill, **options):
    engine = Engine(model, fill=fill, max_batch=3, page_size=4, **options)
    requests = [engine.prepare(prompt, Sampling(**ask)) for prompt in PROMPTS]
    outputs = drain(engine, requests)
    return [outputs[request.id] for request in requests]


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("fill", ["full", "last_exited", "shared"])
@pytest.mark.parametrize("ask", ASKS)
def test_logits_and_gate_are_the_references(ask, fill, concurrency):
    model, reference = twins(seed=2)
    outputs = answers(model, ASKS[ask], fill)
    seen = list(replay(model, outputs, fill=fill, concurrency=concurrency))
    assert len(seen) == sum(len(output.token_ids) for output in outputs)
    for each in seen:
        output = outputs[each.answer]
        wanted = expected(reference, (output.prompt_ids, ASKS[ask]), fill=fill)
        torch.testing.assert_close(each.logits_V, wanted.logits[each.output], rtol=1e-9, atol=1e-9)
        assert len(each.cdf) == (3 if fill == "full" else min(output.depths[each.output], 3))
        if (row := wanted.decisions[each.output]) is not None:
            asked = row.cdf[: len(each.cdf)]
            assert each.cdf[: len(asked)] == pytest.approx(asked, abs=1e-9)


def test_a_deeper_replay_of_the_last_output_shows_the_rounds_that_were_not_run():
    model, _ = twins(seed=2)
    ask = {"exit_threshold": 0.2, "max_tokens": 6}
    (output, *_) = answers(model, ask, "last_exited")
    at = next(i for i, depth in enumerate(output.depths) if depth < 3)
    deeper = replace(output, token_ids=output.token_ids[: at + 1], depths=(*output.depths[:at], 4))
    *_, last = replay(model, [deeper], fill="last_exited")
    *_, shallow = replay(model, [replace(deeper, depths=output.depths[: at + 1])], fill="last_exited")
    assert len(last.cdf) == 3 > len(shallow.cdf)
    assert last.cdf[: len(shallow.cdf)] == pytest.approx(shallow.cdf, abs=1e-12)


def test_layered_models_are_read_by_depth():
    model, reference = twins("layered", segments=(1, 2, 4), seed=1)
    outputs = [output for depth in (1, 2, 3) for output in answers(model, {"depth": depth, "max_tokens": 5}, "full")]
    for each in replay(model, outputs, fill="full", concurrency=4):
        output = outputs[each.answer]
        wanted = expected(reference, (output.prompt_ids, {"depth": output.depths[-1], "max_tokens": 5}), fill="full")
        torch.testing.assert_close(each.logits_V, wanted.logits[each.output], rtol=1e-9, atol=1e-9)
        assert each.cdf == ()


def test_the_released_arithmetic_is_replayed_in_its_own_numbers():
    model, _ = twins(seed=2, dtype=torch.float32)
    outputs = answers(model, ASKS["gate"], "full", gate_dtype="bfloat16")
    seen = [each for each in replay(model, outputs, fill="full", gate_dtype="bfloat16") if each.output]
    for each in seen:
        assert [torch.tensor(value).bfloat16().item() for value in each.cdf] == list(each.cdf)
        depth = outputs[each.answer].depths[each.output]
        assert next((r for r, value in enumerate(each.cdf, 1) if value >= 0.5), 4) == depth
