"""From a rollout's Record back to its answers."""

from __future__ import annotations

import pytest
import torch

from anydepth import LLM, Sampling
from anydepth.rollout import Rollout, answer_of, read_answers, replay
from anydepth.rollout.record import Ask, write_rollout

PROMPTS = ("Ann has 5 . How many has Ann ?", "Ann has 5 . Bob has 3 more than Ann . How many has Bob ?")
SETTINGS = [
    {"temperature": 1.3, "exit_threshold": 0.5},
    {"temperature": 1.0, "interval": 3, "shallow_depth": 1, "first_token": "policy"},
    {"temperature": 1.0, "top_k": 20, "logprobs": "raw"},
    {"depth": 2},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_record_gives_the_answers_that_were_written(settings, tmp_path):
    llm, ask = LLM("nano", fill="deferred", dtype="float64"), Sampling(max_tokens=12, seed=5, n=2, **settings)
    asks = [Ask(id=str(n), prompt_ids=tuple(llm.tokenizer.encode(prompt))) for n, prompt in enumerate(PROMPTS)]
    record = write_rollout(llm, asks, ask, out=tmp_path / "r", passed={})
    answers = read_answers(record)
    wanted = Rollout(LLM("nano", fill="deferred", dtype="float64")).generate([one.prompt_ids for one in asks], ask)
    for read, made in zip(answers, (answer for group in wanted for answer in group.answers), strict=True):
        for name in ("prompt_ids", "token_ids", "depths", "logprobs_mode", "seed", "fill", "finish_reason"):
            assert getattr(read, name) == getattr(made, name), name
        assert read.logprobs == pytest.approx(made.logprobs, abs=1e-9)
        again = llm.generate([read.prompt_ids], read.sampling)[0]
        assert (again.token_ids, again.depths) == (read.token_ids, read.depths)
    with torch.no_grad():
        assert replay(llm.checkpoint.model, answers).max_difference < 1e-9


def test_what_is_no_answer_is_refused():
    llm = LLM("nano")
    model, (output,) = llm.checkpoint.model, llm.generate([PROMPTS[0]], Sampling(max_tokens=3, logprobs="raw"))
    assert replay(model, [answer_of(output, sampling=Sampling(max_tokens=3), fill="last_exited")]).mask_NT.sum() == 3
    with pytest.raises(ValueError, match="of type Output; allowed: Answers"):
        replay(model, [output])
    with pytest.raises(ValueError, match="model is LLM; allowed: a model"):
        replay(llm, [])
    with pytest.raises(ValueError, match="llm is 'nano'; allowed: an LLM"):
        Rollout("nano")
