import pytest
import torch

from anydepth.reference.fills import FILLS, LastExited, deferred_depths
from anydepth.reference.generate import generate, score
from anydepth.reference.model import Model
from anydepth.reference.policies import Row, make_policy
from anydepth.reference.weights import random_weights, tiny_config

PROMPT = [5, 33, 12, 7]
SAMPLED = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 11}
ADAPTIVE = {"exit_threshold": 0.5}
LOOPED = [name for name in FILLS if name != "project"]


def make(kind="looped", seed=2, dtype=torch.float64, segments=None, **changes):
    config = tiny_config(kind, **changes)
    return Model(config, random_weights(config, seed, dtype), segments=segments)


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def same(a, b):
    """Two reference results agree in everything but how the work was counted."""
    assert (a.token_ids, a.depths, a.finish_reason) == (b.token_ids, b.depths, b.finish_reason)
    assert a.logprobs == pytest.approx(b.logprobs, abs=1e-9)
    close(a.logits, b.logits)
    close(a.planes, b.planes)


@pytest.mark.parametrize("kind, segments", [("looped", None), ("layered", [1, 3, 4])])
def test_full_reads_the_truncated_model_at_the_recorded_depth(kind, segments):
    model = make(kind, segments=segments)
    policy = ADAPTIVE if kind == "looped" else {"trace": [3, 1, 2, 3, 1, 1, 2, 2]}
    result = generate(model, PROMPT, max_tokens=8, **policy, **SAMPLED)
    assert len(set(result.depths)) > 1
    ids = PROMPT + result.token_ids
    for n, (logits, depth) in enumerate(zip(result.logits, result.depths, strict=True)):
        close(logits, model.truncated_logits(ids[: len(PROMPT) + n], depth)[-1])
    close(result.planes, model.dense(ids[:-1])[1])


def test_full_depth_makes_last_exited_equal_full():
    for seed in (1, 2):
        model = make(seed=seed, tie_word_embeddings=seed == 2, num_key_value_heads=2 * seed)
        settings = {"max_tokens": 10, **SAMPLED}
        same(generate(model, PROMPT, fill="last_exited", **settings), generate(model, PROMPT, **settings))


def test_one_loop_makes_every_fill_equal():
    model = make(total_ut_steps=1)
    results = [generate(model, PROMPT, fill=fill, max_tokens=6, **SAMPLED) for fill in LOOPED]
    for result in results[1:]:
        same(result, results[0])


@pytest.mark.parametrize("fill", LOOPED)
def test_the_fills_differ_where_they_should(fill):
    model = make()
    first, second = (generate(model, PROMPT, fill=f, max_tokens=12, **ADAPTIVE) for f in ("full", fill))
    assert (first.token_ids == second.token_ids) == (fill in ("full", "deferred"))


@pytest.mark.parametrize("fill", ["full", "last_exited"])
def test_teacher_forced_at_one_depth_equals_the_truncated_model(fill):
    model = make()
    ids = [(7 * n * n + 3 * n) % 61 for n in range(65)]
    for depth in range(1, 5):
        truncated = model.truncated_logits(ids[:-1], depth)
        if fill == "full":  # dense at every token: three positions are enough
            for position in (0, 5, 63):
                one = score(model, ids[: position + 1], [ids[position + 1]], depth=depth)
                close(one.logits[0], truncated[position])
        else:
            result = score(model, ids[:1], ids[1:], depth=depth, fill=fill)
            close(torch.stack(result.logits), truncated)


def test_layered_teacher_forced_at_one_depth_equals_the_truncated_model():
    model = make("layered", segments=[1, 2, 4])
    ids = [*PROMPT, 1, 2, 3, 4]
    for fill in ("full", "project"):
        for depth in (1, 2, 3):
            result = score(model, ids[:3], ids[3:], depth=depth, fill=fill)
            close(torch.stack(result.logits), model.truncated_logits(ids[:-1], depth)[2:])


def test_project_makes_keys_and_values_of_the_state_that_was_read():
    """By hand, of the position read at depth 1; one that goes deep after it reads other numbers than under `full`."""
    model = make("layered", segments=[1, 2, 4])
    settings = {"trace": [3, 1, 3], "max_tokens": 3}
    projected, full = (generate(model, PROMPT, fill=fill, **settings) for fill in ("project", "full"))
    at = len(PROMPT)  # of the token read at depth 1, the first that is fed back
    h = model.dense([*PROMPT, projected.token_ids[0]])[0][0][-1]
    for plane, layers in enumerate(model.layers_of[1:], start=1):
        for n, layer in enumerate(layers):
            _, k, v = model.qkv(layer, h[None], [at])
            close((projected.planes[plane][0][n, at], projected.planes[plane][1][n, at]), (k[0], v[0]))
    assert projected.token_ids[:2] == full.token_ids[:2]
    assert not torch.allclose(projected.logits[2], full.logits[2], atol=1e-3)


def test_last_exited_copies_the_exit_plane_layer_by_layer():
    model = make()
    result = generate(model, PROMPT, fill="last_exited", max_tokens=10, **ADAPTIVE)
    first = len(PROMPT)
    close([(k[:, :first], v[:, :first]) for k, v in result.planes], model.dense(PROMPT)[1])
    assert len(set(result.depths[1:])) > 1
    for position, depth in enumerate(result.depths[1:], start=first):
        for x in (0, 1):
            here = [plane[x][:, position] for plane in result.planes]
            assert all(torch.equal(here[r - 1], here[depth - 1]) for r in range(depth, 5))
            assert all(not torch.allclose(here[r - 1], here[depth - 1]) for r in range(1, depth))
            assert not torch.allclose(here[0][0], here[0][1])  # the layers differ


def test_shared_by_hand():
    """The second position of a one-layer model of two loops, from the first one's last K/V."""
    model = make(total_ut_steps=2, num_hidden_layers=1)
    result = score(model, [9], [4, 8], fill="shared", exit_policy="never")
    (states, planes) = model.dense([9])
    close(result.logits[0], model.readout(states[1][0]))  # a lone position sees only itself
    (k0, v0), h = planes[1], model.embed([4])
    close((result.planes[0][0][:, :1], result.planes[0][1][:, :1]), (k0, v0))
    for _ in range(2):
        q, k, v = model.qkv(0, h, [1])
        h = model.end_of_segment(
            model.after_attention(0, h, model.attend(q, torch.cat([k0[0], k]), torch.cat([v0[0], v])))
        )
    close(result.logits[1], model.readout(h[0]))
    close((result.planes[0][0][0, 1:], result.planes[0][1][0, 1:]), (k, v))
    assert len(result.planes) == 1


def test_shared_at_depth_one_is_the_one_loop_model():
    model, ids = make(), [*PROMPT, 1, 2, 3]
    result = score(model, ids[:1], ids[1:], fill="shared", depth=1)
    close(torch.stack(result.logits), model.truncated_logits(ids[:-1], 1))


def test_never_scores_like_one_dense_pass():
    model, ids = make(), [*PROMPT, 1, 2, 3]
    whole = model.readout(model.dense(ids)[0][-1]).log_softmax(-1)
    for fill in ("full", "last_exited"):
        result = score(model, PROMPT, ids[4:], fill=fill)
        assert result.logprobs == pytest.approx([float(whole[3 + t, ids[4 + t]]) for t in range(3)], abs=1e-9)
        assert result.depths == [4, 4, 4] and result.greedy is False
    best = generate(model, PROMPT, max_tokens=5).token_ids
    assert score(model, PROMPT, best).greedy is True


@pytest.mark.parametrize("fill", LOOPED)
@pytest.mark.parametrize("prompt", [PROMPT, [5]])
def test_first_token_by_policy_is_a_decode_row_as_in_score(fill, prompt):
    model = make()
    settings = {"fill": fill, **ADAPTIVE}
    made = generate(model, prompt, max_tokens=8, first_token="policy", **SAMPLED, **settings)
    scored = score(model, prompt, made.token_ids, **settings)
    assert made.depths == scored.depths and made.logprobs == scored.logprobs
    close(made.planes, scored.planes)
    assert made.usage.decode_tokens == made.usage.output_tokens == 8
    assert made.usage.segments_read == sum(made.depths)
    assert made.usage.segments_prefill == 4 * (len(prompt) - 1)
    traced = generate(model, prompt, max_tokens=8, first_token="policy", trace=made.depths, fill=fill, **SAMPLED)
    same(traced, made)  # the first entry is free


@pytest.mark.parametrize("fill", LOOPED)
def test_a_recorded_trace_reproduces_an_adaptive_run(fill):
    model = make()
    adaptive = generate(model, PROMPT, max_tokens=8, fill=fill, **ADAPTIVE)
    same(generate(model, PROMPT, max_tokens=8, fill=fill, trace=adaptive.depths), adaptive)
    for row, depth in zip(adaptive.decisions[1:], adaptive.depths[1:], strict=True):
        assert len(row.cdf) == depth
        assert all(c < 0.5 for c in row.cdf[:-1]) and (row.cdf[-1] >= 0.5 or depth == 4)


def test_usage_counts_decode_rows_apart_from_the_prompt():
    model = make()
    for fill, executed in (("full", 4 * 6), ("last_exited", None), ("shared", None)):
        result = generate(model, PROMPT, max_tokens=7, fill=fill, **ADAPTIVE)
        usage, read = result.usage, sum(result.depths[1:])
        assert result.depths[0] == 4 and result.decisions[0] is None
        assert (usage.prompt_tokens, usage.output_tokens, usage.decode_tokens) == (4, 7, 6)
        assert (usage.segments_read, usage.segments_executed) == (read, executed or read)
        assert (usage.segments_prefill, usage.segments_wasted) == (16, 0)
        assert result.planes[0][0].shape == (2, len(PROMPT) + 6, 2, 8)
    assert deferred_depths([1, 3, 2]) == [3, 3, 2] and deferred_depths([]) == []
    assert deferred_depths([1, 1, 2, 1, 1], most=3, deepest=4) == [4, 4, 4, 1, 1]
    assert deferred_depths([1, 1, 1], most=3, deepest=4) == [1, 1, 1]  # no token comes after the last one


def test_endings():
    model = make()
    ids = generate(model, PROMPT, max_tokens=6).token_ids
    stop = ids[2]
    cut = ids[: ids.index(stop) + 1]

    def end(**settings):
        result = generate(model, PROMPT, max_tokens=6, **settings)
        return result.token_ids, result.finish_reason

    assert end() == (ids, "length")
    assert end(eos_ids=[stop]) == (cut, "stop")
    assert end(stop_token_ids=[stop], ignore_eos=True) == (cut, "stop")
    assert end(eos_ids=[stop], ignore_eos=True) == (ids, "length")
    short = make(max_position_embeddings=6)
    result = generate(short, PROMPT, max_tokens=50)  # positions 0..5 are fed; the third output is not
    assert (result.token_ids, result.finish_reason) == (ids[:3], "length")
    assert len(generate(short, [*PROMPT, 1, 2], max_tokens=50).token_ids) == 1
    with pytest.raises(ValueError, match="prompt tokens"):
        generate(short, [*PROMPT, 1, 2, 3])
    assert len(score(short, PROMPT, [1, 2, 3]).logprobs) == 3
    with pytest.raises(ValueError, match="positions"):
        score(short, PROMPT, [1, 2, 3, 4])


def test_traces_are_checked():
    model = make()
    with pytest.raises(ValueError, match="starts with depth 4"):
        generate(model, PROMPT, max_tokens=2, trace=[1, 1])
    with pytest.raises(ValueError, match="up to 3 outputs"):
        generate(model, PROMPT, max_tokens=3, trace=[4, 1])
    assert score(model, PROMPT, [1, 2], trace=[1, 2]).depths == [1, 2]
    with pytest.raises(ValueError, match="looped"):
        LastExited(make("layered"))


def test_random_gates_leave_at_every_depth():
    for seed in range(3):
        model = make(seed=seed)
        assert set(generate(model, PROMPT, max_tokens=40, fill="last_exited", **ADAPTIVE).depths) == {1, 2, 3, 4}


def test_float32_gate_state_is_of_the_model_dtype():
    """Hazards of a float32 model are float32 sigmoids of float32 logits."""
    model = make(dtype=torch.float32)
    logit = model.gate_logit(model.dense(PROMPT)[0][0][-1])
    assert logit.dtype == torch.float32 and logit.shape == ()
    row = Row(make_policy(4, True, **ADAPTIVE), 0)
    row.leaves(1, logit)
    assert row.cdf == [1.0 - (1.0 - float(torch.sigmoid(logit)))]
