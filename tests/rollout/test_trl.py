"""The adapter for TRL: what it trains with is what the engine sampled with, and the engine follows every step."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anydepth import LLM, Sampling
from anydepth.models.load import load_checkpoint
from anydepth.record import Record
from anydepth.rollout.logprobs import replay
from anydepth.rollout.rollout import Rollout
from tests.random_nano import write_random_nano

trl = pytest.importorskip("trl", reason="the extra rl is not installed")

from datasets import Dataset  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from anydepth.rollout import trl as adapter  # noqa: E402

PROMPTS = ["Ann has 5 . How many has Ann ?", "Bob has 3 more than Ann . Ann has 2 . How many has Bob ?"]
DEPTHS = Sampling(interval=3, shallow_depth=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_random_nano(tmp_path_factory.mktemp("nano"))


def odd(completions, seen=None, **extras):
    """A reward that random answers differ in; `seen` collects what else a reward function is shown."""
    if seen is not None:
        seen.append(extras)
    return [float(len(text) % 2) for text in completions]


def make_trainer(
    folder, tmp_path, *, sampling=DEPTHS, reward=odd, fill="full", prompts=PROMPTS, processing_class=..., **settings
):
    defaults = {
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "max_completion_length": 10,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return adapter.RolloutGRPOTrainer(
        adapter.Trainable.load(folder),
        llm=LLM(folder, fill=fill),
        sampling=sampling,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder)
        if processing_class is ...
        else processing_class,
        args=trl.GRPOConfig(str(tmp_path / "steps"), **defaults | settings),
    )


def steps(trainer):
    return [line for line in trainer.state.log_history if "reward" in line]


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """A trainer after two steps, and what its reward function was shown."""
    seen = []
    path = tmp_path_factory.mktemp("trained")

    def reward(completions, **extras):
        return odd(completions, seen, **extras)

    trainer = make_trainer(folder, path, reward=reward)
    trainer.train()
    return trainer, seen


def test_replay_says_what_the_rollout_said_and_every_step_pushes_its_weights(trained, folder):
    trainer, _ = trained
    assert all(0 < line["rollout/largest_difference"] < 1e-4 for line in steps(trainer))
    assert [line["rollout/weight_version"] for line in steps(trainer)] == [1, 2]
    before = load_checkpoint(folder).model.slots()
    moved = [name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])]
    assert len(moved) == len(before) - 2  # all but the gate


def test_reward_functions_are_shown_depths(trained):
    _, seen = trained
    for depths, ids in zip(seen[0]["depths"], seen[0]["completion_ids"], strict=True):
        assert depths == [4 if i % 3 == 0 else 2 for i in range(len(ids))]
    assert len(seen) == 2 and all(executed > 0 for executed in seen[0]["segments_executed"])


def test_no_two_answers_share_a_seed(folder, tmp_path):
    """Neither in a group, nor in a step, nor in a run, nor in an evaluation of several batches."""
    trainer = make_trainer(folder, tmp_path, per_device_eval_batch_size=4)
    answer, made = trainer.answer, []
    trainer.answer = lambda prompts: made.append(answer(prompts)) or made[-1]
    trainer.train()
    assert len({answer.seed for step in made for answer in step}) == 16
    assert [answer.answer_index for answer in made[0]] == [0, 1, 2, 3] * 2
    trainer.evaluate(Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]))
    assert len(made) == 4 and len({answer.seed for step in made for answer in step}) == 16 + 8


def test_the_saved_folder_answers_as_the_engine_does(trained, tmp_path):
    trainer, _ = trained
    trainer.save_model(tmp_path)
    prompts = trainer.processing_class(PROMPTS)["input_ids"]
    answers = trainer.answer(prompts)
    assert answers[0].weight_version == max(line["rollout/weight_version"] for line in steps(trainer)) + 1
    fresh = LLM(tmp_path, fill="full")
    assert fresh.checkpoint.eos_ids == trainer.llm.checkpoint.eos_ids
    # From strings: the saved tokenizer is the same, too.
    others = fresh.generate(PROMPTS, [answer.sampling for answer in answers])
    for other, answer in zip(others, answers, strict=True):
        assert (other.token_ids, other.depths, other.logprobs) == (answer.token_ids, answer.depths, answer.logprobs)


@pytest.mark.parametrize("fill", ["deferred", "last_exited"])
@pytest.mark.parametrize("sampling", [Sampling(depth=2), Sampling(exit_threshold=0.6)])
def test_any_policy_trains(folder, tmp_path, sampling, fill):
    trainer = make_trainer(folder, tmp_path, sampling=sampling, fill=fill, max_steps=1, temperature=0.7, top_k=20)
    assert (trainer.sampling.temperature, trainer.sampling.top_k) == (0.7, 20)
    trainer.train()
    assert steps(trainer)[0]["rollout/largest_difference"] < 1e-4


def test_pieces_of_one_generation_keep_their_answers(folder, tmp_path):
    """Two optimiser steps on one rollout: the second has other weights than the rollout and is not compared."""
    trainer = make_trainer(folder, tmp_path, per_device_train_batch_size=4, steps_per_generation=2, max_steps=4)
    trainer.train()
    versions = [line.get("rollout/weight_version") for line in trainer.state.log_history]
    assert versions == [1, None, 2, None, None]  # the last line is the run's


def test_the_old_logprobs_are_the_rollouts(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path, max_steps=1)
    compute, checked = trainer._compute_loss, []

    def watched(model, inputs):
        for answer, row in zip(inputs["answers"], inputs["old_per_token_logps"], strict=True):
            checked.append(row[: len(answer.logprobs)].tolist() == pytest.approx(answer.logprobs, rel=1e-6))
        return compute(model, inputs)

    trainer._compute_loss = watched
    trainer.train()
    assert checked == [True] * 8


def test_a_stopped_run_goes_on(folder, tmp_path):
    """A trainer made anew from the last checkpoint logs the step after it as the one that was not stopped did."""
    prompts = [prompt.replace("Ann", name) for name in ("Ann", "Cal") for prompt in PROMPTS]  # two steps, no repeats
    whole = make_trainer(folder, tmp_path, prompts=prompts, save_strategy="steps", save_steps=1)
    whole.train()
    again = make_trainer(folder, tmp_path, prompts=prompts, save_strategy="steps", save_steps=1)
    again.train(resume_from_checkpoint=str(tmp_path / "steps" / "checkpoint-1"))
    first, second = steps(whole)[1], steps(again)[1]
    assert (first["reward"], first["num_tokens"]) == (second["reward"], second["num_tokens"])
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-6)
    assert second["rollout/weight_version"] == 1  # of a new engine


def test_the_example_runs_and_does_nothing_twice(tmp_path, monkeypatch, capsys):
    path = Path(__file__).parents[2] / "examples" / "grpo.py"
    spec = importlib.util.spec_from_file_location("grpo", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "PROMPTS", 1)
    asked = ["--out", str(tmp_path), "--arm", "interval-4", "--steps", "2", "--questions", "9"]
    monkeypatch.setattr(sys, "argv", [str(path), *asked])
    example.main()
    first = capsys.readouterr().out
    record = Record.read(tmp_path / "interval-4" / "record")
    assert first.splitlines()[-1].startswith("| interval-4 |") and "step 1: weights 2" in first
    assert (record.status, len(record.samples), record.aggregates["steps"]) == ("complete", 2 + 2 * 9, 2)
    assert record.aggregates == json.loads(json.dumps(example.summary(record.samples)))
    monkeypatch.setattr(example, "train", None)
    example.main()
    assert capsys.readouterr().out.splitlines() == first.splitlines()[-3:]


# Planted faults: each of them would train on something else than what was sampled.


def test_full_depth_probabilities_are_noticed(folder, tmp_path, monkeypatch):
    def at_full_depth(model, answers):
        return replay(model, [replace(answer, depths=(4,) * len(answer.depths)) for answer in answers])

    monkeypatch.setattr(adapter, "replay", at_full_depth)
    with pytest.raises(RuntimeError, match=r"differ by .*, allowed: 0\.0001"):
        make_trainer(folder, tmp_path).train()


@pytest.mark.parametrize("off, done", [((5e-5, 0), 0), ((0, 5e-5), 2), ((0, 5e-4), 1)])
def test_the_limit_holds_before_the_first_update_and_ten_times_it_later(folder, tmp_path, monkeypatch, off, done):
    """The replay is `off` by so much in the first and in the second step; the limit is 2e-5."""

    def a_little_off(model, answers):
        said = replay(model, answers)
        return replace(said, returned_NT=said.returned_NT + off[trainer.state.global_step] * said.mask_NT)

    monkeypatch.setattr(adapter, "replay", a_little_off)
    trainer = make_trainer(folder, tmp_path)
    trainer.limit = 2e-5
    with pytest.raises(RuntimeError, match="allowed") if done < 2 else contextlib.nullcontext():
        trainer.train()
    assert trainer.state.global_step == done


def test_weights_that_are_not_pushed_are_noticed(folder, tmp_path, monkeypatch):
    trainer = make_trainer(folder, tmp_path)
    monkeypatch.setattr(trainer.llm, "update_weights", lambda state: None)
    with pytest.raises(RuntimeError, match="replay and rollout of the same weights differ"):
        trainer.train()
    assert trainer.state.global_step == 1  # the first step began with equal weights


def test_answers_beside_the_wrong_rows_are_noticed(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path)
    compute = trainer._compute_loss
    trainer._compute_loss = lambda model, inputs: compute(model, inputs | {"answers": inputs["answers"][::-1]})
    with pytest.raises(AssertionError, match="not in the same order"):
        trainer.train()


@pytest.mark.parametrize(
    "settings",
    [{"bf16": True}, {"gradient_checkpointing": True}, {"beta": 0.1}, {"top_entropy_quantile": 0.5}, {"min_p": 0.1}],
)
def test_settings_under_which_the_two_cannot_agree_are_refused(folder, tmp_path, settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"GRPOConfig has {name}"):
        make_trainer(folder, tmp_path, **settings)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.3), Sampling(n=2), Sampling(seed=1, depth=2)])
def test_what_grpoconfig_says_is_refused_in_the_sampling(folder, tmp_path, sampling):
    with pytest.raises(ValueError, match=r"sampling has .*, which is set by GRPOConfig's"):
        make_trainer(folder, tmp_path, sampling=sampling)


def test_names_are_no_models():
    with pytest.raises(ValueError, match=r"model is a str and llm a LLM; give Trainable\.load"):
        adapter.RolloutGRPOTrainer("nano", llm=LLM("nano"), args=None)


def test_without_a_tokenizer_the_checkpoints_own_is_taken(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path, processing_class=None)
    assert trainer.processing_class(PROMPTS)["input_ids"] == [list(trainer.llm.tokenizer.encode(p)) for p in PROMPTS]


@pytest.mark.parametrize("kind, tied", [("looped", False), ("layered", False), ("layered", True)])
def test_gradients_reach_the_released_parameters(tmp_path, kind, tied):
    """Along a random direction, against the difference of two forward passes, in float64."""
    folder = write_random_nano(tmp_path, kind=kind)
    if tied:
        from safetensors.torch import load_file, save_file

        config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        save_file(tensors, folder / "model.safetensors")
    model = adapter.Trainable.load(folder, dtype="float64")
    llm = LLM(folder, dtype="float64", fill="full")
    ask = Sampling(temperature=1.0, logprobs="processed", max_tokens=6, seed=3)
    answers = list(Rollout(llm).answers(PROMPTS, ask))
    assert model(answers).max_difference < 1e-9
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]
    model(answers).logprobs_NT.sum().backward()
    slope = sum(float((p.grad * d).sum()) for p, d in zip(model.parameters(), direction) if p.grad is not None)
    sums = []
    with torch.no_grad():
        for step in (1e-5, -2e-5):
            for p, d in zip(model.parameters(), direction):
                p.add_(d, alpha=step)
            sums.append(float(model(answers).logprobs_NT.sum()))
    assert slope == pytest.approx((sums[0] - sums[1]) / 2e-5, rel=1e-5)
