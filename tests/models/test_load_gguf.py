"""Loading GGUF files: every quantisation against the library's own, llama.cpp's row order, and damaged files."""

from __future__ import annotations

import random

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from anydepth.models import gguf_file
from anydepth.models.gguf_file import GGUFFile
from anydepth.models.load import load_checkpoint
from anydepth.reference.weights import tiny_config
from tests.models.checkpoints import assert_loaded, bpe_metadata, write_gguf

# Rows of 256 and 512 weights: K-quants have blocks of 256.
CONFIG = tiny_config("layered", hidden_size=256, intermediate_size=512, num_hidden_layers=2, head_dim=64,
                     tie_word_embeddings=True)  # fmt: skip


@pytest.mark.parametrize("pieces", ["one", "many"])
@pytest.mark.parametrize("kind", gguf_file.KINDS, ids=lambda kind: kind.name)
def test_quantisations(tmp_path, monkeypatch, kind, pieces):
    if pieces == "many":
        monkeypatch.setattr(gguf_file, "CACHED_WEIGHTS", 1024)
    weights = write_gguf(tmp_path / "m.gguf", CONFIG, kind=kind)
    checkpoint = load_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.model.dtype == torch.float32
    assert_loaded(checkpoint, weights)
    assert any(weight.abs().max() > 0 for weight in weights.values())


def test_untied_with_factors_and_segments(tmp_path):
    factors = torch.linspace(1, 8, 32)
    path = tmp_path / "m.gguf"
    weights = write_gguf(path, CONFIG | {"tie_word_embeddings": False}, factors=factors)
    checkpoint = load_checkpoint(str(path), segments=1)
    assert_loaded(checkpoint, weights)
    assert checkpoint.model.shape.segments == 2
    frequencies = 10000.0 ** (-torch.arange(0, 64, 2) / 64) / factors
    cos, _ = checkpoint.model.rotary.turn(torch.tensor([5]))
    torch.testing.assert_close(cos[0, 0, :32], (5 * frequencies).cos())
    write_gguf(path, CONFIG, factors=factors[:-1])
    with pytest.raises(ValueError, match=r"rope_freqs.weight has the shape \[31\]"):
        load_checkpoint(path)


def test_config_and_eos(tmp_path):
    metadata = bpe_metadata(eot_token_id=1)
    tokens = metadata["tokenizer.ggml.tokens"]
    path = tmp_path / "m.gguf"
    config = CONFIG | {"vocab_size": len(tokens) + 3}
    write_gguf(path, config, metadata=metadata)
    checkpoint = load_checkpoint(path)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"):  # fmt: skip
        assert checkpoint.config[key] == config[key], key
    assert checkpoint.eos_ids == {0, 1, 2}  # eos, eot and <|im_end|>
    assert len(checkpoint.tokenizer) == len(tokens)
    write_gguf(path, CONFIG, metadata=metadata)
    with pytest.raises(ValueError, match=f"tokenizer has {len(tokens)} ids, but the model embeds 61"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8; allowed: 0"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn'; allowed: 'none'"),
        ({"llama.rope.dimension_count": 32}, "llama.rope.dimension_count = 32, but heads of 64"),
        ({"llama.attention.key_length": 0}, "key_length = 0; a positive whole number"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'; allowed: 'gpt2'"),
        (bpe_metadata(pre="smolm"), "unknown tokenizer.ggml.pre 'smolm'; did you mean 'smollm'"),
        (bpe_metadata(eos_token_id=999), "eos_token_id is 999"),
        (bpe_metadata(merges=["h e", "x q"]), "merges and tokens .* contradict"),
        (bpe_metadata(merges=None), "are incomplete"),
        (bpe_metadata(token_type=[1, 1]), "are incomplete"),
    ],
)
def test_unsupported_variants(tmp_path, metadata, message):
    write_gguf(tmp_path / "m.gguf", CONFIG, metadata=metadata)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "m.gguf")


def test_other_architectures_and_quantisations(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'bert'; allowed: 'llama'"):
        load_checkpoint(path)
    write_gguf(path, CONFIG, kind=Kind.Q8_0)
    whole = path.read_bytes()
    entry = b"token_embd.weight" + (2).to_bytes(4, "little") + (256).to_bytes(8, "little")
    spot = whole.index(entry) + len(entry) + 8
    assert whole[spot] == Kind.Q8_0
    path.write_bytes(whole[:spot] + bytes([Kind.IQ4_NL]) + whole[spot + 1 :])
    with pytest.raises(ValueError, match=r"token_embd.weight is stored as IQ4_NL; allowed: F32"):
        load_checkpoint(path)


def test_wrong_tensors(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, CONFIG, tensors={"model.layers.2.input_layernorm.weight": torch.ones(256)})
    with pytest.raises(ValueError, match=r"has 1 tensor \(model.layers.2.input_layernorm.weight\) that its config"):
        load_checkpoint(path)
    write_gguf(path, CONFIG, tensors={"model.layers.1.self_attn.q_proj.weight": torch.ones(128, 256)})
    with pytest.raises(ValueError, match=r"q_proj.weight has the shape \[128, 256\], its config asks for \[256, 256\]"):
        load_checkpoint(path)


def test_damaged_files_are_refused(tmp_path):
    """Every truncation is an error that a user understands; so is any changed bit of the header, if it is noticed."""
    path = tmp_path / "m.gguf"
    write_gguf(path, CONFIG | {"num_hidden_layers": 1, "vocab_size": 300}, kind=Kind.Q4_0, metadata=bpe_metadata())
    whole = path.read_bytes()
    start = min(t.data_offset for t in gguf.GGUFReader(path).tensors)
    draw = random.Random(0)
    for length in [0, 1, 4, 8, 23, 24, start - 1, start, len(whole) - 40, *draw.choices(range(start), k=40)]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"truncated or no GGUF|download it again"):
            GGUFFile(path)
    refused = 0
    for _ in range(300):
        spot = draw.randrange(start)
        path.write_bytes(whole[:spot] + bytes([whole[spot] ^ 1 << draw.randrange(8)]) + whole[spot + 1 :])
        try:
            load_checkpoint(path)
        except ValueError as error:
            refused += 1
            assert str(path) in str(error) or "config" in str(error)
    assert 50 < refused < 300


def test_a_file_that_shrinks(tmp_path):
    """Truncated after it was opened: named, not filled with whatever was in memory."""
    path = tmp_path / "m.gguf"
    write_gguf(path, CONFIG)
    opened = GGUFFile(path)
    path.write_bytes(path.read_bytes()[:100_000])
    with pytest.raises(ValueError, match="ends inside tensor"):
        for name in opened.shapes:
            list(opened.rows(name))
