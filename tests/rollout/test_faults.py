"""Guards of rollouts and weights that are broken on purpose: for each, the smallest check that must notice."""

from __future__ import annotations

from functools import partial

import pytest

from anydepth.engine import answers
from anydepth.engine.engine import Engine
from anydepth.engine.llm import LLM
from anydepth.engine.scheduler import Scheduler
from anydepth.models.update import NewWeights
from anydepth.rollout import rollout
from anydepth.rollout.rollout import Groups
from tests.engine.planting import Fault, notice
from tests.rollout import test_rollout, test_seeds, test_weights

FAULTS = {
    "prompt pages of the old weights are used": Fault(
        Engine, "weights_changed", "self.pages.forget()", "pass", test_weights.equals_a_fresh_one
    ),
    "scores use prompt pages of the old weights": Fault(
        LLM, "update_weights", "scorer.weights_changed()", "pass",
        test_weights.scores_equal_those_of_a_fresh_one,
    ),
    "the version stays": Fault(
        Engine, "weights_changed", "self.weight_version += 1", "pass", test_weights.equals_a_fresh_one
    ),
    "the version is not that of the weights at submission": Fault(
        Engine, "submit", "request.weight_version = True, self.weight_version", "request.weight_version = True, 7",
        partial(test_rollout.test_weights_that_change_during_a_rollout, "finish"),
    ),
    "answers do not carry the version": Fault(
        answers, "_last", "weight_version=request.weight_version,", "", test_weights.equals_a_fresh_one
    ),
    "weights are written before they were checked to the last": Fault(
        NewWeights, "__init__", "for name in self._names:", "for name in self._names[:-1]:",
        partial(test_weights.test_wrong_weights_change_nothing, "nan", "finish"),
    ),
    "answers under way go on with the new weights": Fault(
        Engine, "update_weights", "while not self.idle:", "while False:",
        partial(test_weights.test_answers_under_way_are_of_the_old_weights_to_their_end, "finish", "sync"),
        also=(Engine, "weights_changed", 'assert self.scheduler.idle, "requests are under way"', "pass"),
    ),
    "chunks that came meanwhile are lost": Fault(
        Engine, "update_weights", "self._held = held + self._held", "pass",
        test_weights.test_an_engine_gives_what_came_meanwhile_with_its_next_step,
    ),
    "chunks that came meanwhile are counted again": Fault(
        Engine, "step", "return held\n", "self._account(None, held)\n        return held\n",
        test_weights.test_an_engine_gives_what_came_meanwhile_with_its_next_step,
    ),
    "a short prompt is prefilled by every answer": Fault(
        Scheduler, "_soon_more", "or most == len(ids) - 1 > at", "", partial(test_rollout.prefilled_once, 9)
    ),
    "a group comes with its first answer": Fault(
        Groups, "__next__", "if all(", "if any(", test_rollout.test_groups_come_as_they_are_done
    ),
    "a partial group is not marked": Fault(
        Groups, "_group", '("abort", "error")', "()", test_rollout.test_a_group_aborted_before_the_first_was_asked_for
    ),
    "an answer's sampling lacks its seed": Fault(
        rollout, "_answer", "replace(request.sampling, seed=request.seed)", "request.sampling",
        test_rollout.test_answers_are_those_of_generate,
    ),
    "answers of a group draw the same numbers": Fault(
        LLM, "prepare", "derive(seed, own, j)", "derive(seed, own, 0)",
        partial(test_seeds.test_in_a_group, "sync"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_guard_is_noticed(name, monkeypatch, tmp_path):
    test_seeds.alone.cache_clear()
    for index in range(test_seeds.N):
        test_seeds.alone(index)
    notice(FAULTS[name], monkeypatch, tmp_path)
