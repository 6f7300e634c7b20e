"""Running an arm: one line an answer, nothing lost or doubled by an interruption, refusals before any work."""

from __future__ import annotations

import pytest

from anydepth import LLM
from anydepth.eval.arms import Arm
from anydepth.eval.backends.engine import EngineBackend
from anydepth.eval.run import run, token_pieces
from anydepth.eval.task import load_task
from anydepth.record import Record
from tests.random_nano import write_random_nano


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(write_random_nano(tmp_path_factory.mktemp("random")), max_batch=4)


@pytest.fixture(scope="module")
def task():
    return load_task("nano")


@pytest.fixture(scope="module")
def questions(task):
    return task.select(limit=12)


ARM = Arm.parse({"name": "gate", "exit_threshold": 0.5, "max_tokens": 12})


def timeless(record):
    """Samples by question, without what differs between two runs of the same."""
    return sorted(
        ({**sample, "latency_s": None} for sample in record.samples), key=lambda s: (s["id"], s["answer_index"])
    )


def test_a_sample_says_what_was_answered_at_which_cost(llm, task, questions, tmp_path):
    seen = []
    record = run(
        ARM,
        task=task,
        backend=EngineBackend(llm),
        out=tmp_path,
        questions=questions,
        concurrency=5,
        progress=seen.append,
    )
    assert record == Record.read(tmp_path) and sum(seen) == len(questions) == record.aggregates["n"]
    assert record.settings_used["policy"] == "gate_cdf" and record.settings_used["fill"] == "last_exited"
    assert record.settings_passed == {"name": "gate", "exit_threshold": 0.5, "max_tokens": 12}
    assert {"hash", "name"} == record.provenance["model"].keys()
    alone = llm.generate([q.prompt for q in questions], ARM.sampling())
    for question, output in zip(questions, alone, strict=True):
        sample = next(s for s in record.samples if s["id"] == question.id)
        assert tuple(sample["output_ids"]) == output.token_ids and tuple(sample["depths"]) == output.depths
        assert sample["text"] == output.text and sample["group"] == question.group
        assert sample["segments_read"] == sum(output.depths[1:]) == output.usage.segments_read
        assert sample["decode_tokens"] == len(output.token_ids) - 1 and sample["latency_s"] > 0


@pytest.mark.parametrize("after", [0, 1, 5, 11])
def test_an_interrupted_run_goes_on_to_the_same_record(llm, task, questions, tmp_path, after):
    whole = run(ARM, task=task, backend=EngineBackend(llm), out=tmp_path / "whole", questions=questions)

    def interrupt(_):
        nonlocal after
        after -= 1
        if after < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(ARM, task=task, backend=EngineBackend(llm), out=tmp_path / "cut", questions=questions, progress=interrupt)
    assert llm.engine.idle and llm.engine.pages.in_use == 0
    with (tmp_path / "cut" / "samples.jsonl").open("ab") as file:
        file.write(b'{"id": "half')
    seen = []
    resumed = run(
        ARM, task=task, backend=EngineBackend(llm), out=tmp_path / "cut", questions=questions, progress=seen.append
    )
    assert timeless(resumed) == timeless(whole)
    assert {**resumed.aggregates, "latency_s": None} == {**whole.aggregates, "latency_s": None}
    assert sum(seen) == len(questions)


def test_a_complete_run_is_not_run_again(llm, task, questions, tmp_path):
    first = run(ARM, task=task, backend=EngineBackend(llm), out=tmp_path, questions=questions)
    turns = llm.stats()["turns"]
    assert run(ARM, task=task, backend=EngineBackend(llm), out=tmp_path, questions=questions) == first
    assert llm.stats()["turns"] == turns


def test_several_answers_have_seeds_of_their_own_paired_between_arms(llm, task, questions, tmp_path):
    several = {"n": 2, "temperature": 1.0, "max_tokens": 4}
    one = run(
        Arm.parse({"name": "a", **several}),
        task=task,
        backend=EngineBackend(llm),
        out=tmp_path / "a",
        questions=questions[:4],
    )
    two = run(
        Arm.parse({"name": "b", "depth": 1, **several}),
        task=task,
        backend=EngineBackend(llm),
        out=tmp_path / "b",
        questions=questions[:4],
    )
    seeds = {(s["id"], s["answer_index"]): s["seed"] for s in one.samples}
    assert len(set(seeds.values())) == 8
    assert seeds == {(s["id"], s["answer_index"]): s["seed"] for s in two.samples}


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ({"fill": "full"}, "arm 'a' wants fill 'full', this engine was made with 'last_exited'"),
        ({"signals": "exact"}, "arm 'a' wants signals 'exact', this engine was made with 'sync'"),
        ({"batch_invariant": True}, "arm 'a' wants batch_invariant True, this engine was made with False"),
        ({"lateness": 1}, "arm 'a' wants lateness 1, this engine was made with 0"),
        ({"depth": 9}, "arm 'a': depth is 9; this model has 4 segments"),
        ({"max_tokens": 10**9, "trace": [4]}, "arm 'a': trace"),
    ],
)
def test_refuses_before_any_work(llm, task, questions, tmp_path, arm, message):
    turns = llm.stats()["turns"]
    with pytest.raises(ValueError, match=message):
        run(
            Arm.parse({"name": "a", **arm}),
            task=task,
            backend=EngineBackend(llm),
            out=tmp_path / "a",
            questions=questions,
        )
    with pytest.raises(ValueError, match="no questions"):
        run(ARM, task=task, backend=EngineBackend(llm), out=tmp_path / "a", questions=[])
    assert llm.stats()["turns"] == turns and not (tmp_path / "a").exists()


def test_token_pieces_join_to_the_text_with_special_tokens():
    texts = {1: b"a", 2: b"\xc3", 3: b"\xa9", 4: b"<eos>", 5: b"\xe2"}

    def decode(ids, *, skip_special):
        assert not skip_special
        return b"".join(texts[id] for id in ids).decode(errors="replace")

    assert token_pieces(decode, [1, 2, 3, 4]) == ["a", "", "é", "<eos>"]
    assert token_pieces(decode, [1, 5]) == ["a", "\ufffd"] and token_pieces(decode, []) == []


def test_answers_that_were_never_asked_for_are_not_counted(llm, task, questions, tmp_path):
    def interrupt(count):
        if count:
            raise KeyboardInterrupt

    backend = EngineBackend(llm)
    with pytest.raises(KeyboardInterrupt):
        run(ARM, task=task, backend=backend, out=tmp_path, questions=questions, progress=interrupt)
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"id":"planted","answer_index":0}\n')
    with pytest.raises(ValueError, match="answer 0 of question 'planted', which this run does not ask"):
        run(ARM, task=task, backend=backend, out=tmp_path, questions=questions)
