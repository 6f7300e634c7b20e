"""The same seed gives the same answer: alone, in a group, in any slot, after slot reuse, after preemption."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from anydepth import LLM, Sampling
from anydepth.rollout.rollout import Rollout

QUESTION = "Ann has 5 . Bob has 3 more than Ann . Eve has as many as Bob . How many has Eve ?"
OTHER = "Ann has 5 . Bob has 3 more than Ann . How many has Bob and why ?"
DRAWN = Sampling(max_tokens=14, temperature=4.0, top_p=0.98, seed=21, exit_threshold=0.7, ignore_eos=True)
NOISE = Sampling(max_tokens=5, temperature=2.0, seed=99, ignore_eos=True)
SIGNALS = pytest.mark.parametrize("signals", ["sync", "exact", "resident"])
N = 4


@functools.cache
def alone(index):
    """The answer of that index to QUESTION, from its seed, in an engine of its own."""
    seed = LLM("nano").prepare(QUESTION, replace(DRAWN, n=N))[index].seed
    (output,) = LLM("nano", max_batch=1).generate(QUESTION, replace(DRAWN, seed=seed))
    return output.token_ids, output.depths


def assert_alone(answers):
    found = {answer.answer_index: (answer.token_ids, answer.depths) for answer in answers}
    assert found == {index: alone(index) for index in found} and found


def test_the_answers_differ():
    assert len({alone(index) for index in range(N)}) == N


@SIGNALS
def test_in_a_group(signals):
    (group,) = Rollout(LLM("nano", signals=signals)).generate(QUESTION, DRAWN, n=N)
    assert_alone(group.answers)


@SIGNALS
@pytest.mark.parametrize("slot", [0, 2, 5])
def test_in_any_slot(slot, signals):
    """Behind so many others that the group begins at that slot."""
    llm = LLM("nano", signals=signals, max_batch=6)
    others = llm.stream([OTHER] * slot, replace(DRAWN, seed=1)) if slot else iter(())
    next(others, None)
    (group,) = Rollout(llm).generate(QUESTION, DRAWN, n=N)
    assert_alone(group.answers)


@SIGNALS
def test_after_slot_reuse(signals):
    """Two slots, which others had before and between."""
    llm = LLM("nano", signals=signals, max_batch=2)
    requests = llm.prepare([OTHER], replace(NOISE, n=3)) + llm.prepare(QUESTION, replace(DRAWN, n=N))
    requests = requests[::2] + requests[1::2]
    outputs = [chunk.output for chunk in llm.run(requests) if chunk.output]
    assert_alone(output for output in outputs if output.prompt_ids == requests[-1].prompt_ids)


@SIGNALS
def test_after_preemption(signals):
    """The pool holds one answer and a half, so that answers give way and come back."""
    llm = LLM("nano", signals=signals, page_size=4, kv_pages=14)
    (group,) = Rollout(llm).generate(QUESTION, DRAWN, n=N)
    assert llm.stats()["preempted"] > 0
    assert_alone(group.answers)
