"""Tiny checkpoints on disk: folders of safetensors, GGUF files and a tokenizer, for the loader's tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor

from anydepth.models.load import Checkpoint
from anydepth.reference.weights import random_weights, tiny_config

WORDS = ["<s>", "</s>", "<end>", "[user]", "[bot]", "\n", *"abcdefghij"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[bot]"
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_folder(
    path: Path, kind: str = "layered", *, dtype: torch.dtype = torch.float32, shards: int = 1, **changes: Any
) -> dict[str, Tensor]:
    """A released checkpoint folder, without a tokenizer; its weights."""
    path.mkdir(exist_ok=True)
    config = tiny_config(kind, **changes)
    (path / "config.json").write_text(json.dumps(config))
    weights = random_weights(config, dtype=dtype)
    write_weights(path, weights, shards=shards)
    return weights


def write_weights(path: Path, weights: Mapping[str, Tensor], *, shards: int = 1) -> None:
    if shards == 1:
        save_file(dict(weights), path / "model.safetensors")
        return
    index = {}
    for n in range(shards):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in list(weights)[n::shards]}
        save_file(part, path / file)
        index |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def write_tokenizer(path: Path, *, adds_bos: bool = False, words: list[str] | None = None, **config: Any) -> None:
    """Words split on spaces; `adds_bos` lets the post-processor put "<s>" in front, as released files do."""
    path.mkdir(exist_ok=True)
    words = words or WORDS
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="j"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>", "<end>", "[user]", "[bot]"])
    backend.enable_truncation(4)  # what released files sometimes leave on
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(named | config))


def quantized(weight: Tensor, kind: Kind, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Stored rows of a matrix. K-quants, which gguf cannot write, get random blocks with scales of a sane size."""
    array = weight.numpy().astype(np.float32)
    if kind in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (array.size // block, block_bytes), dtype=np.uint8)
        scales = rng.uniform(1e-4, 1e-3, (len(blocks), 2)).astype(np.float16).view(np.uint8)
        if kind == Kind.Q6_K:
            blocks[:, -2:] = scales[:, :2]
        else:
            blocks[:, :4] = scales
        return blocks.reshape(array.shape[0], -1)
    return gguf.quants.quantize(array, kind)


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    *,
    kind: Kind = Kind.F32,
    metadata: Mapping[str, Any] | None = None,
    factors: Tensor | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """A GGUF file of a tiny Llama with its matrices stored as `kind`; the weights it means, under released names."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    for key, value in (metadata or {}).items():
        writer.add_array(key, value) if isinstance(value, list) else writer.add_key_value(key, value, value_type(value))
    meant = {}
    for name, weight in (random_weights(config, dtype=torch.float32) | dict(tensors or {})).items():
        stem = name.removesuffix(".weight")
        _, _, layer, *rest = [*stem.split("."), "", ""]
        inner = ".".join(rest).rstrip(".")
        prefix = f"blk.{layer}." if inner else ""
        store = Kind.F32 if weight.dim() == 1 else kind
        rows = quantized(weight, store, rng)
        meant[name] = torch.from_numpy(gguf.quants.dequantize(rows, store).copy())
        if inner in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if "q_proj" in inner else "num_key_value_heads"]
            # As llama.cpp's converter does it: rows i and i + D/2 of a head become neighbours.
            rows = rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)
        writer.add_tensor(f"{prefix}{GGUF_NAMES[inner or stem]}.weight", np.ascontiguousarray(rows), raw_dtype=store)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def value_type(value: Any) -> gguf.GGUFValueType:
    return gguf.GGUFValueType.BOOL if isinstance(value, bool) else gguf.GGUFValueType.get_type(value)


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    """Tokenizer keys of a GGUF file: all bytes, a few merges, three control tokens, and a token no merge reaches."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "he", "ll", "hell", "hello", "Ġhello"]
    tokens += ["12", ".Ċ", "Ġ.", "xyz"]
    keys = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "merges": ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2", ". Ċ", "Ġ ."],
        "eos_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items() if value is not None}


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


def assert_loaded(checkpoint: Checkpoint, weights: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    """The model holds exactly these weights, rounded to dtype."""
    slots = checkpoint.model.slots()
    assert slots.keys() == weights.keys()
    for name, slot in slots.items():
        assert torch.equal(slot, weights[name].to(dtype)), name
