"""What the loader refuses: wrong tensors, damaged files, pickles. Most of it before any weight is read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from anydepth.models import safetensors_file
from anydepth.models.load import load_checkpoint
from tests.models.checkpoints import WORDS, assert_loaded, edit_json, write_folder, write_tokenizer, write_weights


@pytest.fixture
def unread(monkeypatch):
    """Fails the test when tensor data is read."""

    def read(self, name):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(safetensors_file.SafetensorsFolder, "rows", read)


@pytest.mark.parametrize("eos", [61, -1, "2", [1, 61], True])
def test_eos_out_of_range(tmp_path, unread, eos):
    write_folder(tmp_path, eos_token_id=eos)
    with pytest.raises(ValueError, match=r"eos id of the config is .* 0 to 60"):
        load_checkpoint(tmp_path)


def test_tokenizer_of_another_model(tmp_path, unread):
    write_folder(tmp_path)
    write_tokenizer(tmp_path, words=[*WORDS, *map(str, range(61 - len(WORDS))), "one too many"])
    with pytest.raises(ValueError, match="tokenizer has 62 ids, but the model embeds 61"):
        load_checkpoint(tmp_path)


def test_missing_and_extra(tmp_path, unread):
    weights = write_folder(tmp_path)
    write_weights(tmp_path, {n: w for n, w in weights.items() if "layers.1." not in n})
    with pytest.raises(ValueError, match=r"lacks 9 tensors \(model.layers.1.self_attn.q_proj.weight, .* and 5 more"):
        load_checkpoint(tmp_path)
    write_weights(tmp_path, weights | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    with pytest.raises(
        ValueError, match=r"has 1 tensor \(model.layers.0.self_attn.q_proj.bias\) that its config does not ask"
    ):
        load_checkpoint(tmp_path)
    write_weights(tmp_path, {n: w for n, w in weights.items() if n != "lm_head.weight"})
    with pytest.raises(ValueError, match="tie_word_embeddings: true"):
        load_checkpoint(tmp_path)


def test_rotary_buffers_are_passed_over(tmp_path):
    weights = write_folder(tmp_path)
    write_weights(tmp_path, weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert_loaded(load_checkpoint(tmp_path), weights)


def test_misshapen(tmp_path, unread):
    weights = write_folder(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    write_weights(tmp_path, weights | {name: weights[name].t().contiguous()})
    with pytest.raises(ValueError, match=rf"{name} has the shape \[32, 48\], its config asks for \[48, 32\]"):
        load_checkpoint(tmp_path)


def test_tied_head_must_equal_the_embedding(tmp_path):
    weights = write_folder(tmp_path, tie_word_embeddings=True)
    head = weights["model.embed_tokens.weight"].clone()
    write_weights(tmp_path, weights | {"lm_head.weight": head})
    assert_loaded(load_checkpoint(tmp_path), weights)
    head[60, 31] += 1e-3
    write_weights(tmp_path, weights | {"lm_head.weight": head})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_checkpoint(tmp_path)


def test_shards(tmp_path, unread):
    weights = write_folder(tmp_path, shards=2)
    first, second = (tmp_path / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    index = tmp_path / "model.safetensors.index.json"
    whole = json.loads(index.read_text())["weight_map"]
    save_file(load_file(second) | {"model.embed_tokens.weight": weights["model.embed_tokens.weight"]}, second)
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight is in model-00001.* and again in model-00002"):
        load_checkpoint(tmp_path)
    write_folder(tmp_path, shards=2)
    edit_json(index, weight_map=whole | {"model.norm.weight": first.name, "lm_head.weight": second.name})
    with pytest.raises(ValueError, match=r"says tensor .* is in .*, but it is in"):
        load_checkpoint(tmp_path)
    edit_json(index, weight_map=whole | {"model.norm.weight": "../model.safetensors"})
    with pytest.raises(ValueError, match="plain file names"):
        load_checkpoint(tmp_path)
    edit_json(index, weight_map=whole | {"model.norm.weight": "model.bin"})
    with pytest.raises(ValueError, match=r"model.bin is a pickle"):
        load_checkpoint(tmp_path)
    edit_json(index, weight_map=whole)
    second.unlink()
    with pytest.raises(ValueError, match=r"names the shard model-00002-of-00002.safetensors, which is missing"):
        load_checkpoint(tmp_path)
    edit_json(index, weight_map=[])
    with pytest.raises(ValueError, match="no weight_map"):
        load_checkpoint(tmp_path)


def test_damaged_files_are_refused(tmp_path):
    """Every truncation, and bytes changed anywhere in the header: an error that a user understands, or the weights."""
    write_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    header = int.from_bytes(whole[:8], "little") + 8
    generator = torch.Generator().manual_seed(0)
    lengths = [0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1]
    spots = torch.randint(0, header, (150,), generator=generator).tolist()
    damaged = [whole[:n] for n in lengths] + [whole + b"x"]
    for length in damaged:
        file.write_bytes(length)
        with pytest.raises(ValueError, match="truncated or no safetensors"):
            load_checkpoint(tmp_path)
    for spot in spots:
        file.write_bytes(whole[:spot] + bytes([whole[spot] ^ (1 << spot % 8)]) + whole[spot + 1 :])
        try:
            load_checkpoint(tmp_path)
        except ValueError as error:
            assert str(tmp_path) in str(error)


@pytest.mark.parametrize("content", ["[]", "{", '"x"', b"\xff\xfe"])
def test_damaged_config(tmp_path, content):
    write_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"config.json (is not valid JSON|holds a)"):
        load_checkpoint(tmp_path)


def test_incomplete_folders(tmp_path):
    weights = write_folder(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"has no config.json"):
        load_checkpoint(tmp_path)
    (tmp_path / "away").rename(tmp_path / "config.json")
    write_weights(tmp_path, {name: weight.to(torch.float8_e4m3fn) for name, weight in weights.items()})
    with pytest.raises(ValueError, match="stored as F8_E4M3; allowed: F32"):
        load_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config={"bits": 4})
    with pytest.raises(ValueError, match="quantization_config"):
        load_checkpoint(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=None)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model.safetensors nor"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("sizes", [{"num_hidden_layers": 10**9}, {"max_position_embeddings": 10**12}])
def test_absurd_sizes(tmp_path, sizes):
    write_folder(tmp_path)
    edit_json(tmp_path / "config.json", **sizes)
    with pytest.raises(ValueError, match=r"config says .* allowed: up to"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["looped", "layered"])
@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias", "use_sliding_window", "hidden_act"])
def test_variants_of_the_decoder(tmp_path, unread, kind, key):
    write_folder(tmp_path, kind, **{key: "gelu" if key == "hidden_act" else True})
    with pytest.raises(ValueError, match=f"config has {key} = .*; allowed: "):
        load_checkpoint(tmp_path)


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("zipped", [False, True])
def test_pickles_are_refused_unopened(tmp_path, zipped):
    sprung = tmp_path / "sprung"
    pickled = tmp_path / "pytorch_model.bin"
    torch.save({"x": Trap(str(sprung))}, pickled, _use_new_zipfile_serialization=zipped)
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps(Trap(str(sprung))))
    folder = tmp_path / "model"
    write_folder(folder)
    for file in (pickled, plain):
        with pytest.raises(ValueError, match="pickle checkpoint"):
            load_checkpoint(file)
        with pytest.raises(ValueError, match="pickle checkpoint"):
            load_checkpoint(str(file))
        for name in ("model.safetensors", "x.gguf"):
            (folder / name).write_bytes(file.read_bytes())
            with pytest.raises(ValueError, match="pickle checkpoint"):
                load_checkpoint(folder if "safe" in name else folder / name)
    (folder / "model.safetensors").unlink()
    pickled.rename(folder / pickled.name)
    with pytest.raises(ValueError, match=r"pytorch_model.bin is a pickle checkpoint"):
        load_checkpoint(folder)
    write_folder(folder)
    load_checkpoint(folder)  # a pickle beside safetensors is never looked at
    assert not sprung.exists()


def test_a_header_of_640_bytes_is_no_pickle(tmp_path):
    """Its length bytes, 80 02, are a pickle's first."""
    weights = write_folder(tmp_path, num_hidden_layers=1)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    padded = min(n for n in (0x280, 0x380, 0x480, 0x580) if n >= length)
    header = whole[8 : 8 + length].ljust(padded)
    file.write_bytes(padded.to_bytes(8, "little") + header + whole[8 + length :])
    assert file.read_bytes()[0] == 0x80
    assert_loaded(load_checkpoint(tmp_path), weights)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 10000.0}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "factors", "factors": [1.0]}},
        {"rope_scaling": [1]},
        {"rope_theta": 0},
        {"rms_norm_eps": "4"},
        {"rms_norm_eps": -1},
        {"num_key_value_heads": 1.5},
        {"head_dim": "4"},
    ],
)
def test_a_config_that_is_not_computed_as_written_is_refused(tmp_path, changes):
    write_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=r"config|RoPE"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("segments", [1.5, "2", [1.5, 2], True, [], 0, 3])
def test_segments_that_split_nothing_are_refused(tmp_path, segments):
    write_folder(tmp_path)
    with pytest.raises(ValueError, match="segments"):
        load_checkpoint(tmp_path, segments=segments)
