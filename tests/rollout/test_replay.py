"""Replayed log-probabilities are the rollout's, have the right gradients, and are wrong where a fault is planted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from anydepth import LLM, Sampling
from anydepth.engine.engine import Engine
from anydepth.models.nano.questions import questions
from anydepth.rollout.answers import answer_of
from anydepth.rollout.logprobs import replay
from anydepth.train.recipe import parameters
from tests.helpers import drain, twins

LIMITS = {"float32": (2e-5, 2e-6), "float64": (1e-9, 1e-9)}
DRAWS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "logprobs": "processed"},
    {"temperature": 1.0, "top_k": 5, "logprobs": "processed"},
    {"temperature": 1.3, "top_p": 0.9, "logprobs": "processed"},
    {"temperature": 0.7, "top_k": 7, "top_p": 0.8, "logprobs": "processed"},
    {"temperature": 0.9, "top_k": 3, "top_p": 0.95, "logprobs": "raw"},
    {"temperature": 0.0, "logprobs": "processed"},
]
POLICIES = [{}, {"depth": 2}, {"interval": 4, "shallow_depth": 1}, {"exit_threshold": 0.5}, {"exit_threshold": 0.97}]


def asks(policies, *, tokens=16, beyond_end=True, **more):
    """Every way to draw under every policy; `beyond_end` lets half of the answers go on after their end."""
    settings = [{"logprobs": "raw"} | draw | policy for policy in policies for draw in DRAWS]
    return [
        Sampling(max_tokens=tokens + i % 5, seed=i, ignore_eos=beyond_end and i % 2 == 0, **setting, **more)
        for i, setting in enumerate(settings)
    ]


def nano_answers(llm, samplings):
    prompts = [question.prompt for question in questions("validation", n=len(samplings))]
    outputs = llm.generate(prompts, samplings)
    return [
        answer_of(output, sampling=sampling, fill=llm.engine.fill.name)
        for output, sampling in zip(outputs, samplings, strict=True)
    ]


def engine_answers(model, samplings, *, fill):
    engine = Engine(model, fill=fill, max_batch=4, page_size=4)
    requests = [engine.submit(list(range(3 + i % 4)), sampling) for i, sampling in enumerate(samplings)]
    outputs = drain(engine)
    return [
        answer_of(outputs[request.id], sampling=sampling, fill=fill)
        for request, sampling in zip(requests, samplings, strict=True)
    ]


def assert_same(model, answers, dtype="float64"):
    with torch.no_grad():
        found = replay(model, answers)
    largest, mean = LIMITS[dtype]
    assert found.max_difference < largest and found.mean_difference < mean, found
    assert found.mask_NT.sum(1).tolist() == [len(answer.token_ids) for answer in answers]
    return found


def caught(model, answers, **options):
    with torch.no_grad():
        return replay(model, answers, **options).mean_difference > 1e-3


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("fill", ["full", "last_exited"])
def test_nano_says_what_its_rollout_said(fill, dtype):
    """float32 on answers that end where nano ends them: in what it babbles after that it is ill-conditioned, and the
    engine's own rounding errors reach 1e-4."""
    llm = LLM("nano", fill=fill, dtype=dtype)
    how = {"tokens": 40, "beyond_end": dtype == "float64"}
    answers = nano_answers(llm, asks(POLICIES, **how) + asks(POLICIES[1:], first_token="policy", **how))
    assert {depth for answer in answers for depth in answer.depths} == {1, 2, 3, 4}
    assert {answer.depths[0] for answer in answers if answer.sampling.first_token == "policy"} > {2}
    assert_same(llm.checkpoint.model, answers, dtype)


@pytest.mark.parametrize("signals", ["exact", "delayed", "resident"])
def test_late_signals_replay_at_the_depths_that_were_read(signals):
    llm = LLM("nano", fill="last_exited", dtype="float64", signals=signals)
    answers = nano_answers(llm, asks(POLICIES[2:]))
    assert len({depth for answer in answers for depth in answer.depths}) > 2
    assert_same(llm.checkpoint.model, answers)


@pytest.mark.parametrize("first_token", ["prefill", "policy"])
def test_a_layered_model_is_read_at_every_depth(first_token):
    model, _ = twins("layered", segments=[1, 2, 3, 4])
    trace = [4, *(1 + i * i % 4 + i % 3 % 2 for i in range(19))]
    policies = [{"depth": 3}, {"interval": 2, "shallow_depth": 1}, {"trace": [min(4, d) for d in trace]}]
    answers = engine_answers(model, asks(policies, tokens=12, first_token=first_token), fill="full")
    assert {depth for answer in answers for depth in answer.depths} == {1, 2, 3, 4}
    assert_same(model, answers)
    assert caught(model, at_full_depth(answers, 4))


def at_full_depth(answers, segments):
    return [replace(answer, depths=(segments,) * len(answer.depths)) for answer in answers]


@pytest.fixture(scope="module")
def looped():
    """A tiny looped model and its answers under `last_exited`."""
    model, _ = twins("looped")
    answers = engine_answers(model, asks(POLICIES[1:], tokens=8, first_token="policy"), fill="last_exited")
    assert_same(model, answers)
    return model, answers


def test_full_depth_instead_of_the_returned_ones_is_caught(looped):
    assert caught(looped[0], at_full_depth(looped[1], 4))


def test_copied_planes_replayed_as_computed_ones_are_caught(looped):
    model, answers = looped
    assert caught(model, answers, fill="full")
    assert caught(model, [replace(answer, fill="deferred") for answer in answers])
    computed = engine_answers(model, asks(POLICIES[1:]), fill="full")
    assert caught(model, computed, fill="last_exited")


def test_fills_may_be_mixed_and_deferred_is_full(looped):
    model, copied = looped
    computed = engine_answers(model, asks(POLICIES[1:], tokens=8), fill="full")
    deferred = [replace(answer, fill="deferred") for answer in computed]
    mixed = [answer for pair in zip(copied, deferred, strict=True) for answer in pair]
    assert_same(model, mixed)


def test_one_pass_and_logits_of_answer_tokens_only(looped, monkeypatch):
    model, answers = looped
    read, run = [], []
    readout, segment = model.readout, model.segment
    monkeypatch.setattr(model, "readout", lambda k, h: read.extend([k] * len(h)) or readout(k, h))
    monkeypatch.setattr(model, "segment", lambda k, h, kv: run.append(k) or segment(k, h, kv))
    assert_same(model, answers)
    assert sorted(read) == sorted(depth for answer in answers for depth in answer.depths)
    assert run == [1, 2, 3, 4]


def weights_of(model):
    if model.shape.has_gate and not model.tied:
        return parameters(model)
    layers = [tensor for layer in model.layers for tensor in layer.parameters()]
    embedding = [] if model.tied else [model.embedding]  # else a view of the head
    return [*embedding, model.head, model.norm, *layers]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind, fill", [("looped", "last_exited"), ("looped", "full"), ("layered", "full")])
def test_gradients_are_those_of_finite_differences(kind, fill, tied):
    model, _ = twins(kind, segments=[1, 2, 4] if kind == "layered" else None, tie_word_embeddings=tied)
    answers = engine_answers(model, asks([{"interval": 3, "shallow_depth": 2}], tokens=5), fill=fill)
    weights = [tensor.requires_grad_() for tensor in weights_of(model)]
    replay(model, answers).logprobs_NT.sum().backward()
    generator = torch.Generator().manual_seed(0)
    for tensor in weights:
        if tensor.grad is None:  # the exit gate decides nothing here
            assert any(tensor is gate for gate in (model.gate_weight, model.gate_bias))
            continue
        direction = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        sums = []
        with torch.no_grad():
            for step in (1e-5, -1e-5):
                tensor.add_(direction, alpha=step)
                sums.append(float(replay(model, answers).logprobs_NT.sum()))
                tensor.sub_(direction, alpha=step)
        slope, expected = float((tensor.grad * direction).sum()), (sums[0] - sums[1]) / 2e-5
        assert slope == pytest.approx(expected, rel=1e-5, abs=1e-5), tensor.shape


def test_a_token_that_can_no_longer_be_drawn_is_minus_infinity_without_a_gradient(looped):
    model, _ = twins("looped")
    kept, changed = (
        engine_answers(
            model, [Sampling(max_tokens=4, temperature=1.0, top_k=2, logprobs="processed", seed=seed)], fill="full"
        )[0]
        for seed in (1, 2)
    )
    alone = replay(model, [replace(changed, token_ids=(*changed.token_ids[:-1], 60))])
    assert alone.logprobs_NT[0, :-1].isfinite().all() and alone.logprobs_NT[0, -1] == -torch.inf
    assert alone.max_difference == torch.inf
    weights = [tensor.requires_grad_() for tensor in weights_of(model)]
    found = replay(model, [kept, replace(changed, token_ids=(*changed.token_ids[:-1], 60))])
    ratio = (found.logprobs_NT - found.returned_NT).exp()
    assert ratio[1, -1] == 0
    ratio.sum().backward()
    assert all(tensor.grad is None or tensor.grad.isfinite().all() for tensor in weights)
    assert float(model.head.grad.abs().sum()) > 0


def test_answers_without_tokens_and_aborted_ones(looped):
    model, answers = looped
    empty = replace(answers[0], token_ids=(), depths=(), logprobs=(), finish_reason="abort")
    found = assert_same(model, [empty, answers[1], empty, answers[2]])
    assert not found.mask_NT[[0, 2]].any() and not found.logprobs_NT[[0, 2]].any()
    engine = Engine(model, fill="last_exited")
    sampling = Sampling(max_tokens=20, temperature=1.0, logprobs="raw", depth=2)
    request = engine.submit([5, 6, 7], sampling)
    for _ in range(15):
        engine.step()
    engine.abort(request.id)
    aborted = answer_of(drain(engine)[request.id], sampling=sampling, fill="last_exited")
    assert aborted.finish_reason == "abort" and 2 < len(aborted.token_ids) < 20
    assert_same(model, [aborted])


@pytest.mark.parametrize("count", [0, 2])
def test_nothing_to_replay(looped, count):
    model, answers = looped
    empty = replace(answers[0], token_ids=(), depths=(), logprobs=())
    found = replay(model, [empty] * count)
    assert found.logprobs_NT.shape == found.mask_NT.shape == found.returned_NT.shape == (count, 0)
    assert found.mean_difference == found.max_difference == found.summed_difference == 0


def test_differences_are_over_tokens_only(looped):
    model, answers = looped
    two = sorted(answers, key=lambda answer: len(answer.token_ids))[:: len(answers) - 1]
    logprobs = list(two[0].logprobs)
    logprobs[1] -= 0.5
    found = replay(model, [replace(two[0], logprobs=tuple(logprobs)), two[1]])
    count = len(two[0].token_ids) + len(two[1].token_ids)
    assert found.summed_difference == pytest.approx(0.5) and found.max_difference == pytest.approx(0.5)
    assert found.mean_difference == pytest.approx(0.5 / count)


def test_packed_weights_replay_as_they_are_and_learn_after_slots():
    model, _ = twins("looped", dtype=torch.float32, gentle=True, hidden_size=256, intermediate_size=512, head_dim=64)
    model.pack()
    assert model.layers[0].down.is_mkldnn or model.layers[0].gate_up.is_mkldnn
    answers = engine_answers(model, asks([{"depth": 2}]), fill="last_exited")
    assert_same(model, answers, "float32")
    replay(model, answers)  # no weight asks for a gradient
    model.slots()
    for tensor in parameters(model):
        tensor.requires_grad_()
    found = replay(model, answers)
    assert found.max_difference < LIMITS["float32"][0]
    found.logprobs_NT.sum().backward()
    assert all(float(layer.gate_up.grad.abs().sum()) > 0 for layer in model.layers)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"fill": "shared"}, "'shared' has no replay.*no single pass"),
        ({"fill": "last_exit"}, "unknown fill 'last_exit'; did you mean 'last_exited'"),
        ({"depths": (1,)}, "2 tokens, 1 depths, 2 logprobs"),
        ({"depths": (1, 5)}, "depth 5; allowed: 1 .. 4"),
        ({"depths": (0, 1)}, "depth 0; allowed: 1 .. 4"),
        ({"prompt_ids": (61,)}, "token id 61; allowed: 0 .. 60"),
        ({"token_ids": (1, -1)}, "token id -1; allowed: 0 .. 60"),
        ({"depths": (3, 1), "sampling": Sampling()}, "first depth is 3.*must be 4"),
        ({"prompt_ids": ()}, "0 prompt tokens"),
        ({"prompt_ids": (1,) * 128}, "128 prompt tokens and 2 of the answer; allowed.* 128 positions"),
        ({"logprobs_mode": "processed", "sampling": Sampling(first_token="policy")}, "'processed' at temperature 0"),
    ],
)
def test_what_no_rollout_gives_is_refused(looped, changes, said):
    model, answers = looped
    good = replace(answers[0], token_ids=(1, 2), depths=(1, 2), logprobs=(-1.0, -1.0))
    with pytest.raises(ValueError, match=f"answer 1: .*{said}"):
        replay(model, [good, replace(good, **changes)])


def test_copies_are_refused_on_a_layered_model(looped):
    model, _ = twins("layered")
    with pytest.raises(ValueError, match=r"answer 0: fill 'last_exited' is for looped models.*allowed: full, deferred"):
        replay(model, looped[1])
