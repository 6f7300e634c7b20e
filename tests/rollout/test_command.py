"""`anydepth rollout`: a file of prompts becomes a Record, also where it was interrupted, and errors name the line."""

from __future__ import annotations

import json
import re

import pytest

from anydepth import LLM, Sampling
from anydepth.cli import app
from anydepth.engine.engine import Engine
from anydepth.record import Record
from anydepth.rollout.record import aggregate, read_prompts, write_rollout
from anydepth.rollout.rollout import Rollout
from tests.models.checkpoints import write_folder, write_tokenizer

SHORT = "Ann has 5 . How many has Ann ?"
LONG = "Ann has 5 . Bob has 3 more than Ann . Eve has as many as Bob . How many has Eve ?"
IDS = [56, 3, 22, 11, 57]
LINES = [{"id": "first", "prompt": SHORT}, {"prompt_ids": IDS, "answer": 5}, {"id": "third", "prompt": LONG}]
OPTIONS = ("--n", 3, "--seed", 7, "--max-tokens", 12, "--exit-threshold", 0.7, "--temperature", 2, "--threads", 1)


def run(*arguments):
    app(["rollout", *map(str, arguments)], standalone_mode=False)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return path


def in_order(record):
    return sorted(record.samples, key=lambda sample: (sample["prompt_index"], sample["answer_index"]))


def approximate(sample):
    """A sample but for what no two runs share: time, and the last bits of logprobs."""
    return {**sample, "logprobs": pytest.approx(sample["logprobs"], abs=1e-5), "latency_s": pytest.approx(0, abs=60)}


def test_a_record_has_the_answers_that_a_rollout_gives(prompts, tmp_path, capsys):
    run(prompts, "--out", tmp_path / "out", *OPTIONS, "--json")
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    record = Record.read(tmp_path / "out")
    assert (said["command"], said["result"]["status"], said["result"]["n"]) == ("rollout", "complete", 9)
    assert record.kind == "rollout" and record.aggregates == aggregate(record.samples)
    assert record.settings_passed["temperature"] == 2 and "top_p" not in record.settings_passed
    used = record.settings_used
    assert (used["policy"], used["fill"], used["logprobs"], used["seed"]) == ("gate_cdf", "last_exited", "processed", 7)
    sampling = Sampling(n=3, seed=7, max_tokens=12, exit_threshold=0.7, temperature=2.0)
    groups = Rollout(LLM("nano")).generate([SHORT, IDS, LONG], sampling)
    answers = [answer for group in groups for answer in group.answers]
    for sample, answer in zip(in_order(record), answers, strict=True):
        assert sample["id"] == ("first", "2", "third")[answer.prompt_index]
        assert sample["output_ids"] == list(answer.token_ids) and sample["depths"] == list(answer.depths)
        assert sample["logprobs"] == pytest.approx(answer.logprobs, abs=1e-5)
        assert (sample["logprobs_mode"], sample["weight_version"], sample["fill"]) == ("processed", 0, "last_exited")
        assert (sample["seed"], sample["text"]) == (answer.seed, answer.text)
        assert sample["prompt_ids"] == list(answer.prompt_ids) and len(sample["prompt_ids_sha256"]) == 64
        assert sample["segments_executed"] == answer.usage.segments_executed
        assert sample["finish_reason"] == answer.finish_reason


@pytest.mark.parametrize("turns", [1, 13, 16, 19])
def test_an_interrupted_run_goes_on(turns, prompts, tmp_path, monkeypatch):
    """Killed in the middle of a line: the samples are those of one go, under the same seeds."""
    run(prompts, "--out", tmp_path / "whole", *OPTIONS)
    step, left = Engine.step, [turns]

    def interrupted(engine):
        left[0] -= 1
        if left[0] == 0:
            raise InterruptedError("killed")
        return step(engine)

    with monkeypatch.context() as patch, pytest.raises(InterruptedError, match="killed"):
        patch.setattr(Engine, "step", interrupted)
        run(prompts, "--out", tmp_path / "out", *OPTIONS)
    with (tmp_path / "out/samples.jsonl").open("ab") as file:
        file.write(b'{"id":"third","answer_')
    kept = len(Record.read(tmp_path / "out").samples)
    assert (kept > 0) == (turns > 1) and kept < 9
    run(prompts, "--out", tmp_path / "out", *OPTIONS)
    whole, gone_on = Record.read(tmp_path / "whole"), Record.read(tmp_path / "out")
    assert [approximate(sample) for sample in in_order(gone_on)] == in_order(whole)
    assert gone_on.status == "complete" and gone_on.aggregates == whole.aggregates
    before = (tmp_path / "out/samples.jsonl").read_bytes()
    run(prompts, "--out", tmp_path / "out", *OPTIONS)  # which finds it done
    assert (tmp_path / "out/samples.jsonl").read_bytes() == before


def test_a_folder_of_another_run_is_refused(prompts, tmp_path):
    run(prompts, "--out", tmp_path / "out", *OPTIONS)
    for other, named in (("--seed", 8), "seed is 7"), (("--top-p", 0.9), "top_p is 1.0"), (("--n", 2), "n is 3"):
        with pytest.raises(ValueError, match=f"holds a run of something else .*{named} there"):
            run(prompts, "--out", tmp_path / "out", *OPTIONS, *other)
    prompts.write_text(json.dumps({"id": "first", "prompt": SHORT + " ?"}) + "\n" * 3)
    with pytest.raises(ValueError, match="holds a run of something else"):
        run(prompts, "--out", tmp_path / "out", *OPTIONS)


WRONG = {
    '{"prompt": "a"': "it is not JSON",
    "\xff": "it is not JSON",
    "[1, 2]": r"\[1, 2\] is no object",
    '{"id": "x"}': "it has no prompt; allowed: exactly one of prompt, prompt_ids, messages",
    '{"prompt": "a", "prompt_ids": [1]}': "it has prompt and prompt_ids; allowed: exactly one",
    '{"prompt": [1]}': r"prompt is \[1\]; allowed: a string",
    '{"prompt_ids": "a"}': "prompt_ids is 'a'; allowed: a list of token ids",
    '{"prompt_ids": [999]}': "the prompt has 999 at index 0",
    '{"prompt": ""}': "the prompt is empty",
    '{"prompt": "a", "id": 3}': "id is 3; allowed: a string",
    '{"prompt": "a", "id": "first"}': "the id 'first' stands in line 1 too",
    '{"messages": []}': r"messages is \[\]; allowed: a list of",
    '{"messages": [{"role": "user", "content": "a"}]}': "has no chat template",
}


@pytest.mark.parametrize("line", WRONG)
def test_errors_name_file_and_line(line, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(json.dumps(LINES[0]).encode() + b"\n\n" + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}, line 3: .*{WRONG[line]}"):
        run(path, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_no_line_is_to_blame_for(prompts, tmp_path):
    with pytest.raises(ValueError, match=r"^depth is 9"):
        run(prompts, "--out", tmp_path / "out", "--depth", 9)
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(ValueError, match="has no prompts; give one JSON object a line"):
        run(tmp_path / "empty", "--out", tmp_path / "out")
    with pytest.raises(OSError, match="no-such-file"):
        run(tmp_path / "no-such-file", "--out", tmp_path / "out")
    llm = LLM("nano")
    asks = read_prompts(prompts, llm, Sampling())
    with pytest.raises(ValueError, match="seed is None; give one"):
        write_rollout(llm, asks, Sampling(), out=tmp_path / "out", passed={})
    llm.update_weights(llm.checkpoint.path)
    with pytest.raises(ValueError, match="were exchanged after it was loaded"):
        write_rollout(llm, asks, Sampling(seed=1), out=tmp_path / "out", passed={})
    assert not (tmp_path / "out").exists()


def test_messages_go_through_the_chat_template(tmp_path):
    write_folder(tmp_path, "looped", vocab_size=16)
    write_tokenizer(tmp_path)
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    llm = LLM(tmp_path)
    (ask,) = read_prompts(tmp_path / "p.jsonl", llm, Sampling())
    assert [list(ask.prompt_ids)] == llm.chat_ids([{"role": "user", "content": "a"}]) and ask.id == "1"
