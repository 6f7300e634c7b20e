"""Scores under a policy against one pass of the whole text: through the model for `never`, through a truncated one for
a fixed depth, under every fill that promises it."""

from __future__ import annotations

import pytest
import torch

from anydepth.engine.engine import Engine
from anydepth.reference import Model
from anydepth.types import Sampling
from tests.helpers import drain_scores, twins

CONTEXT = [3, 17, 5, 40, 22, 8, 60, 31]
CONTINUATIONS = [[9, 2, 55, 13], [1], [44, 44, 7, 30, 12, 6]]


def one_pass(reference: Model, ids: list[int]) -> list[float]:
    """Log-likelihood of each continuation token from one dense pass, read after the last segment."""
    h = reference.dense([*CONTEXT, *ids[:-1]])[0][-1][-len(ids) :]
    logprobs = reference.readout(h).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1).tolist()


def scores(model, fill: str, sampling: Sampling) -> list[list[float]]:
    engine = Engine(model, fill=fill, max_batch=2)
    [found] = drain_scores(engine, [engine.prepare(CONTEXT, sampling, forced=CONTINUATIONS)]).values()
    return [list(score.logprobs) for score in found]


@pytest.mark.parametrize("fill", ["full", "last_exited"])
@pytest.mark.parametrize("depth", [1, 2, 3, None])
def test_a_looped_model_scores_as_the_one_with_fewer_loops(fill, depth):
    model, reference = twins("looped", dtype=torch.float32, gentle=True)
    truncated = Model({**reference.config, "total_ut_steps": depth or 4}, reference.weights)
    for found, ids in zip(scores(model, fill, Sampling(depth=depth)), CONTINUATIONS, strict=True):
        assert found == pytest.approx(one_pass(truncated, ids), abs=1e-4)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_layered_model_scores_as_the_one_with_fewer_layers(depth):
    model, reference = twins("layered", dtype=torch.float32, segments=[2, 4])
    truncated = Model({**reference.config, "num_hidden_layers": 2 * depth}, reference.weights)
    for found, ids in zip(scores(model, "full", Sampling(depth=depth)), CONTINUATIONS, strict=True):
        assert found == pytest.approx(one_pass(truncated, ids), abs=1e-4)


def test_shared_planes_do_not():
    """The context's K/V is that of its last loop: a shallow row attends to what a truncated model never computes."""
    model, reference = twins("looped", dtype=torch.float32, gentle=True)
    truncated = Model({**reference.config, "total_ut_steps": 1}, reference.weights)
    found = scores(model, "shared", Sampling(depth=1))
    assert found[0] != pytest.approx(one_pass(truncated, CONTINUATIONS[0]), abs=1e-3)
