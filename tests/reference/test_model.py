import pytest
import torch

from anydepth.reference.model import Model
from anydepth.reference.weights import random_weights, tiny_config

IDS = [3, 17, 5, 5, 40, 2, 60, 11, 9]


def make(kind="looped", dtype=torch.float64, segments=None, **changes):
    config = tiny_config(kind, **changes)
    return Model(config, random_weights(config, 1, dtype), segments=segments)


@pytest.mark.parametrize("tied, kv_heads, head_dim", [(False, 4, None), (True, 2, 8), (False, 1, 12)])
def test_llama_equals_transformers(tied, kv_heads, head_dim):
    transformers = pytest.importorskip("transformers")
    changes = {"head_dim": head_dim, "rope_theta": 500.0}
    config = tiny_config("layered", num_key_value_heads=kv_heads, tie_word_embeddings=tied, **changes)
    weights = random_weights(config, 5)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config, attn_implementation="eager")).double()
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    with torch.no_grad():
        out = theirs(torch.tensor([IDS]), output_hidden_states=True, use_cache=True)
    model = Model(config, weights, segments=[1, 2, 3, 4])
    states, planes = model.dense(IDS)
    torch.testing.assert_close(model.readout(states[-1]), out.logits[0], atol=1e-5, rtol=1e-5)
    for k in (1, 2, 3):
        torch.testing.assert_close(states[k - 1], out.hidden_states[k][0], atol=1e-5, rtol=1e-5)
    for k in range(4):
        layer = out.past_key_values.layers[k]
        torch.testing.assert_close(planes[k][0][0], layer.keys[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(planes[k][1][0], layer.values[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_one_position_of_a_looped_model_in_closed_form():
    """A lone position attends to itself with weight 1, so that two loops fit in a few lines."""
    model = make(num_hidden_layers=1, num_key_value_heads=4)
    w = {name.removeprefix("model.layers.0."): value for name, value in model.weights.items()}

    def norm(x, name):
        return torch.nn.functional.rms_norm(x, x.shape, w[f"{name}.weight"], eps=1e-6)

    h = w["model.embed_tokens.weight"][7]
    for _ in range(2):
        value = w["self_attn.v_proj.weight"] @ norm(h, "input_layernorm")
        h = h + norm(w["self_attn.o_proj.weight"] @ value, "input_layernorm_2")
        x = norm(h, "post_attention_layernorm")
        inner = torch.nn.functional.silu(w["mlp.gate_proj.weight"] @ x) * (w["mlp.up_proj.weight"] @ x)
        h = norm(h + norm(w["mlp.down_proj.weight"] @ inner, "post_attention_layernorm_2"), "model.norm")
    states, _ = model.dense([7])
    torch.testing.assert_close(states[1][0], h)
    torch.testing.assert_close(model.readout(states[1])[0], w["lm_head.weight"] @ h)  # no second final norm
    gate = torch.nn.functional.linear(h, w["model.early_exit_gate.weight"], w["model.early_exit_gate.bias"])
    torch.testing.assert_close(model.gate_logit(h), gate[0])


@pytest.mark.parametrize("kind, segments", [("looped", None), ("layered", [1, 2, 4])])
def test_truncated_model_is_a_smaller_model(kind, segments):
    """The first k segments of a model, built as a model of its own, at full depth."""
    model = make(kind, segments=segments)
    for k in range(1, model.segments + 1):
        changes = {"total_ut_steps": k} if kind == "looped" else {"num_hidden_layers": segments[k - 1]}
        small = Model(model.config | changes, model.weights)
        assert torch.equal(small.readout(small.dense(IDS)[0][-1]), model.truncated_logits(IDS, k))
        torch.testing.assert_close(model.readout(model.dense(IDS)[0][k - 1]), model.truncated_logits(IDS, k))


@pytest.mark.parametrize("kind", ["looped", "layered"])
def test_causal_and_relative(kind):
    model = make(kind)
    whole = model.dense(IDS)[0][-1]
    torch.testing.assert_close(model.dense(IDS[:4])[0][-1], whole[:4])
    q, k, _ = model.qkv(0, model.embed([4, 4]), [2, 7])
    q_later, k_later, _ = model.qkv(0, model.embed([4, 4]), [12, 17])
    torch.testing.assert_close(q[0, 0] @ k[1, 0], q_later[0, 0] @ k_later[1, 0])  # only the distance counts
    assert not torch.allclose(k[0], k[1])


def test_random_models_spread_logits():
    for kind in ("looped", "layered"):
        for tied in (False, True):
            model = make(kind, tie_word_embeddings=tied)
            spread = model.readout(model.dense(IDS)[0][-1]).std(dim=-1)
            assert spread.min() > 1.0 and spread.max() < 6.0
            assert ("lm_head.weight" in model.weights) != tied


def test_refused():
    for settings in ({"segments": [2, 3]}, {"segments": [2, 2, 4]}):
        with pytest.raises(ValueError, match="exit layers"):
            make("layered", **settings)
    with pytest.raises(ValueError, match="looped"):
        make("looped", segments=[2])
    with pytest.raises(ValueError, match="float32"):
        make(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="rope_scaling"):
        make("layered", rope_scaling={"rope_type": "llama3"})
