"""Groups of answers: what is in them, in which order they come, what they cost, and how they end early."""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import pytest

from anydepth import LLM, Sampling
from anydepth.engine.philox import derive
from anydepth.models.load import load_checkpoint
from anydepth.reference import sampling as reference
from anydepth.rollout.rollout import Rollout
from tests.helpers import Watch, assert_empty

SHORT = "Ann has 5 . How many has Ann ?"
MIDDLE = "Ann has 5 . Bob has 3 more than Ann . How many has Bob ?"
LONG = "Ann has 5 . Bob has 3 more than Ann . Eve has as many as Bob . How many has Eve ?"
SAMPLED = Sampling(max_tokens=10, temperature=1.3, seed=5, exit_threshold=0.7)
EIGHT = replace(SAMPLED, max_tokens=8, ignore_eos=True)


def shown(answer):
    return answer.token_ids, answer.depths, answer.finish_reason, answer.seed


def prefilled_once(length=23, n=5, **options):
    """Of a group's answers one runs the whole prompt, the others its last position."""
    llm = LLM("nano", **options)
    prompt = llm.tokenizer.encode(LONG)[:length]
    (group,) = Rollout(llm).generate([prompt], SAMPLED, n=n)
    cost = sorted(answer.usage.segments_prefill for answer in group.answers)
    assert cost == [4] * (n - 1) + [4 * length], cost
    assert llm.stats()["prefix_tokens"] == (n - 1) * (length - 1)
    assert_empty(llm.engine)


@pytest.mark.parametrize("signals", ["sync", "exact", "resident"])
@pytest.mark.parametrize("length", [1, 2, 9, 15, 16, 17, 23])
def test_a_group_prefills_its_prompt_once(length, signals):
    """Shorter than a page of 16, whole pages, an unfilled last page."""
    prefilled_once(length, signals=signals)


def test_in_chunks_and_with_few_slots():
    prefilled_once(23, n=6, max_batch=2, max_batched_tokens=5)


def test_several_groups_at_once_prefill_each_prompt_once():
    llm = LLM("nano", max_batch=4)
    groups = Rollout(llm).generate([SHORT, MIDDLE, LONG], SAMPLED, n=4)
    prompts = [len(group.prompt_ids) for group in groups]
    assert llm.stats()["usage"]["segments_prefill"] <= 4 * sum(prompts) + 4 * 3 * len(groups)


def test_without_sharing_a_group_is_refused():
    rollout = Rollout(LLM("nano", prefix_sharing=False))
    with pytest.raises(ValueError, match="prefix_sharing=False, so that every answer of a group would prefill"):
        rollout.groups(SHORT, SAMPLED, n=2)
    assert len(rollout.generate(SHORT, SAMPLED)) == 1


def test_answers_are_those_of_generate():
    """With the seeds that `LLM.generate` derives, and all that a replay needs."""
    llm, prompts = LLM("nano", fill="full"), [SHORT, LONG]
    groups = Rollout(llm).generate(prompts, SAMPLED, n=3)
    outputs = LLM("nano", fill="full").generate(prompts, replace(SAMPLED, n=3, logprobs="processed"))
    answers = [answer for group in groups for answer in group.answers]
    assert [(a.prompt_index, a.answer_index) for a in answers] == [(i, j) for i in range(2) for j in range(3)]
    for answer, output in zip(answers, outputs, strict=True):
        assert shown(answer) == shown(output) and answer.seed == derive(5, answer.prompt_index, answer.answer_index)
        assert answer.logprobs == pytest.approx(output.logprobs, abs=1e-5)
        assert (answer.fill, answer.logprobs_mode, answer.weight_version) == ("full", "processed", 0)
        assert answer.prompt_ids == output.prompt_ids and answer.text == output.text
        assert answer.usage.segments_executed == 4 * answer.usage.decode_tokens
        (alone,) = llm.generate([answer.prompt_ids], answer.sampling)
        assert shown(alone) == shown(answer)
    for group in groups:
        assert not group.partial and group.prompt_ids == group.answers[0].prompt_ids


@pytest.mark.parametrize(
    ("temperature", "asked", "mode"),
    [(1.0, None, "processed"), (1.0, "raw", "raw"), (0.0, None, "raw"), (0.0, "processed", "raw")],
)
def test_logprobs_are_named(temperature, asked, mode):
    (group,) = Rollout(LLM("nano")).generate(SHORT, Sampling(max_tokens=4, temperature=temperature, logprobs=asked))
    assert group.answers[0].logprobs_mode == mode and len(group.answers[0].logprobs) == len(group.answers[0].token_ids)


def test_processed_logprobs_are_those_of_the_logits():
    """Recomputed from every row of logits; half of the vocabulary repeats the other, so that the logits are tied."""
    cuts = [{}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.6}]
    mixes = [{"temperature": temperature, **cut} for temperature in (0.7, 1.0, 1.9) for cut in cuts]
    llm = LLM("nano", dtype="float64")
    watch = Watch(llm.engine)
    choose = llm.engine.slots.sampler.choose

    def tied(draws, logits):
        half = logits.shape[1] // 2
        logits[:, half : 2 * half] = logits[:, :half]
        return choose(draws, logits)

    llm.engine.slots.sampler.choose = tied
    samplings = [Sampling(max_tokens=3, seed=3, ignore_eos=True, **mix) for mix in mixes]
    groups = Rollout(llm).generate([MIDDLE] * len(mixes), samplings)
    rows = {(request.prompt_index, request.answer_index): logits for request, logits in watch.logits.items()}
    for answer in (answer for group in groups for answer in group.answers):
        logits = rows[answer.prompt_index, answer.answer_index]
        mix = {"top_k": None, "top_p": 1.0} | mixes[answer.prompt_index]
        for token, logprob, row in zip(answer.token_ids, answer.logprobs, logits, strict=True):
            wanted = reference.process(row.tolist(), **mix).probabilities[token]
            assert logprob == pytest.approx(math.log(wanted), abs=1e-9)


def test_groups_come_as_they_are_done():
    llm = LLM("nano")
    asks = [replace(EIGHT, max_tokens=length) for length in (12, 3, 7)]
    groups = list(Rollout(llm).groups([LONG, MIDDLE, SHORT], asks, n=3))
    assert [group.prompt_index for group in groups] == [1, 2, 0]
    assert [answer.answer_index for answer in groups[0].answers] == [0, 1, 2]
    answers = list(Rollout(llm).answers([LONG, MIDDLE, SHORT], asks, n=2))
    assert [answer.prompt_index for answer in answers] == [1, 1, 2, 2, 0, 0]


def test_skipping_answers_changes_no_other():
    rollout = Rollout(LLM("nano"))
    everything = {(a.prompt_index, a.answer_index): shown(a) for a in rollout.answers([SHORT, LONG], SAMPLED, n=3)}
    skip = {(0, 0), (1, 1), (1, 2)}
    left = {(a.prompt_index, a.answer_index): shown(a) for a in rollout.answers([SHORT, LONG], SAMPLED, n=3, skip=skip)}
    assert left == {key: answer for key, answer in everything.items() if key not in skip}


@pytest.mark.parametrize("signals", ["sync", "exact", "resident"])
def test_an_aborted_group_comes_out_partial(signals):
    """With what there is of its answers; the others are as they would have been."""
    llm = LLM("nano", signals=signals, max_batch=3)
    whole = Rollout(llm).generate([SHORT, MIDDLE, LONG], EIGHT, n=2)
    groups = Rollout(llm).groups([SHORT, MIDDLE, LONG], EIGHT, n=2)
    first = next(groups)
    groups.abort(2)
    groups.abort(first.prompt_index)  # has come out: nothing happens
    rest = {group.prompt_index: group for group in groups}
    assert first.prompt_index == 0 and not first.partial and rest.keys() == {1, 2}
    assert [shown(a) for a in rest[1].answers] == [shown(a) for a in whole[1].answers] and not rest[1].partial
    assert rest[2].partial and {a.finish_reason for a in rest[2].answers} == {"abort"}
    for answer, wanted in zip(rest[2].answers, whole[2].answers, strict=True):
        length = len(answer.token_ids)
        assert answer.token_ids == wanted.token_ids[:length] and answer.depths == wanted.depths[:length]
        assert len(answer.logprobs) == length < 8
    assert_empty(llm.engine)


def test_a_group_aborted_before_the_first_was_asked_for():
    groups = Rollout(LLM("nano")).groups([LONG, SHORT], EIGHT, n=2)
    groups.abort(0)
    first, second = groups
    assert (first.prompt_index, first.partial, second.partial) == (0, True, False)
    assert max(len(answer.token_ids) for answer in first.answers) <= 1


@pytest.mark.parametrize("signals", ["sync", "resident"])
def test_closing_gives_the_partial_groups(signals):
    """Finished answers stand beside aborted ones."""
    llm = LLM("nano", signals=signals, max_batch=3)
    asks = [replace(EIGHT, max_tokens=2), replace(EIGHT, max_tokens=30), EIGHT]
    groups = Rollout(llm).groups([SHORT, MIDDLE, LONG], asks, n=2)
    assert next(groups).prompt_index == 0
    (one, other) = groups.close()
    assert one.partial and other.partial and list(groups) == []
    assert all(answer.finish_reason in ("abort", "length") for answer in (*one.answers, *other.answers))
    assert any(answer.token_ids for answer in one.answers)
    assert_empty(llm.engine)
    assert not llm._inbox and Rollout(llm).groups(SHORT, EIGHT).close() == []


def test_a_partial_group_keeps_its_finished_answers():
    """One slot: the second answer begins when the first has ended."""
    llm = LLM("nano", max_batch=1)
    groups = Rollout(llm).groups([SHORT], replace(EIGHT, max_tokens=3), n=3)
    ended = 0

    def aborting():
        nonlocal ended
        for chunk in chunks:
            ended += chunk.output is not None
            if ended == 1:
                groups.abort(0)
            yield chunk

    chunks, groups._chunks = groups._chunks, aborting()
    (group,) = groups
    assert group.partial and [a.finish_reason for a in group.answers] == ["length", "abort", "abort"]


@pytest.mark.parametrize("end", ["with", "drop", "close"])
def test_nothing_is_held_by_a_rollout_that_ends_early(end):
    llm = LLM("nano")
    if end == "with":
        with pytest.raises(KeyError), Rollout(llm).groups([SHORT, LONG], EIGHT, n=2) as groups:
            raise KeyError(next(groups))
    else:
        answers = Rollout(llm).answers([SHORT, LONG], EIGHT, n=2)
        next(answers)
        if end == "close":
            answers.close()
        del answers
        gc.collect()
    assert not llm._inbox and not llm.engine.scheduler.sequences
    llm.generate(SHORT)
    assert_empty(llm.engine)


def test_wrong_asks_are_refused_before_anything_runs():
    rollout = Rollout(LLM("nano"))
    for prompts, sampling, n, message in (
        ([SHORT, []], SAMPLED, 2, "prompt 1: the prompt is empty"),
        (SHORT, SAMPLED, 0, "n is 0; allowed"),
        (SHORT, Sampling(depth=5), 2, "prompt 0: depth is 5"),
        ([SHORT, LONG], [SAMPLED], 2, "1 Samplings for 2 prompts"),
        ([SHORT], [{"max_tokens": 3}], 2, "prompt 0: its sampling is"),
        ([SHORT], 3, 2, "sampling is 3; allowed: a Sampling"),
    ):
        with pytest.raises(ValueError, match=message):
            rollout.groups(prompts, sampling, n=n)
    assert rollout.llm.stats()["turns"] == 0 and rollout.generate([], SAMPLED) == []


@pytest.mark.parametrize("in_flight", ["finish", "abort"])
def test_weights_that_change_during_a_rollout(in_flight):
    """Answers say of which weights they are, whatever was under way."""
    new = load_checkpoint("nano-plain").path
    llm = LLM("nano", max_batch=2)
    whole = Rollout(llm).generate([SHORT, LONG], EIGHT, n=3)
    rollout = Rollout(llm)
    groups, later = rollout.groups([SHORT, LONG], EIGHT, n=3), rollout.answers(LONG, EIGHT)
    first = next(groups)
    llm.update_weights(new, in_flight=in_flight)
    (second,) = groups
    assert {a.weight_version for a in (*first.answers, *second.answers)} == {0}
    assert second.partial == (in_flight == "abort")
    if in_flight == "finish":
        assert [shown(a) for a in second.answers] == [shown(a) for a in whole[1].answers]
    assert [a.weight_version for a in later] == [1]
