"""Artifacts: one a segment, and a worker holds what is in its own."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from anydepth.cli import main
from anydepth.models.attach import load_with_heads
from anydepth.models.load import load_checkpoint
from anydepth.pipeline.export import export_segments, read_artifact, read_artifacts
from anydepth.pipeline.part import Part
from tests.models.checkpoints import write_folder
from tests.pipeline.making import made, router_of, write_heads

CUT = (((1,), "here"), ((2,), "here"), ((3, 4), "here"))
LAYER = ["input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm"]
LAYER += [f"self_attn.{n}_proj" for n in "koqv"]
SHORTLIST = {f"head.{name}" for name in ("norm", "a", "b", "other", "ids", "columns")}
OUTER = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


def layer_names(layer: int) -> set[str]:
    return {f"model.layers.{layer}.{name}.weight" for name in LAYER}


@pytest.mark.parametrize(
    ("heads", "readouts", "outer"),
    [
        (False, (1, 2, 3, 4), [OUTER, OUTER - {"model.embed_tokens.weight"}]),
        (False, (4,), [{"model.embed_tokens.weight"}, set()]),
        # Of the heads the first is a shortlist, for some columns of the LM head, and the second all of it after a norm.
        (
            True,
            (1, 2, 3, 4),
            [{"model.embed_tokens.weight", *SHORTLIST}, {"lm_head.weight", "head.norm"}],
        ),
    ],
)
def test_an_artifact_holds_its_segment(tmp_path, heads, readouts, outer):
    made(tmp_path, *CUT, heads=heads, readouts=readouts)
    probes = {"probe.weight", "probe.bias"} if heads else set()
    for segment in (1, 2):
        artifact = read_artifact(tmp_path / "parts", segment)
        assert set(artifact.tensors) == layer_names(segment - 1) | outer[segment - 1] | probes
        assert set(artifact.read()) == set(artifact.tensors)
    last = set(read_artifact(tmp_path / "parts", 4).tensors)
    assert last == layer_names(3) | {"model.norm.weight", "lm_head.weight"}


def test_tied_embeddings_are_the_head_where_it_is_read(tmp_path):
    made(tmp_path, *CUT, changes={"tie_word_embeddings": True}, readouts=(2, 4))
    found = [OUTER & set(read_artifact(tmp_path / "parts", n).tensors) for n in (1, 2, 3, 4)]
    reads = {"model.norm.weight", "lm_head.weight"}
    assert found == [{"model.embed_tokens.weight"}, reads, set(), reads]


@pytest.mark.parametrize("tied", [False, True])
def test_a_worker_holds_its_own_tensors_and_no_others(tmp_path, tied):
    """Loaded from a folder that has only its own files, bit for bit the model's."""
    manifest = made(tmp_path, *CUT, readouts=(1, 4), changes={"tie_word_embeddings": tied})
    whole = load_checkpoint(manifest.model, dtype="float64", segments=[1, 2, 3, 4]).model
    embedding_bytes = whole.embedding.nbytes
    with router_of(manifest, tmp_path) as router:
        held = [worker["tensors"] for worker in router.stats()]
    for stage, own in enumerate(((1,), (2,), (3, 4))):
        alone = tmp_path / f"alone{stage}"
        alone.mkdir()
        for segment in own:
            for suffix in ("json", "safetensors"):
                shutil.copy(tmp_path / "parts" / f"segment-{segment}.{suffix}", alone)
        part = Part([read_artifact(alone, segment) for segment in own], dtype="float64", device="cpu")
        assert part.held() == held[stage]
        layers = {int(name.split(".")[1]) for name in held[stage] if name.startswith("layers.")}
        assert layers == {segment - 1 for segment in own}
        for layer in layers:
            for mine, theirs in zip(part.layers[layer].parameters(), whole.layers[layer].parameters(), strict=True):
                assert torch.equal(mine, theirs)
        others = [tensor for n, layer in enumerate(part.layers) if n not in layers for tensor in layer.parameters()]
        assert all(tensor.is_meta for tensor in others)
    outer = [{name: size for name, size in h.items() if name in ("embedding", "head", "norm")} for h in held]
    assert outer[0].keys() == {"embedding", "head", "norm"} and outer[2].keys() == {"head", "norm"} and not outer[1]
    assert outer[0]["embedding"] == embedding_bytes


def test_a_packed_head_reads_what_the_models_does(tmp_path):
    """One large enough to be packed, in float32; and a shortlist beside it, which needs the vocabulary's size."""
    manifest = made(tmp_path, *CUT, heads=True, changes={"vocab_size": 8192})
    whole, _ = load_with_heads(manifest.model, manifest.heads, dtype="float32", segments=[1, 2, 3, 4])
    part = Part([read_artifact(tmp_path / "parts", n) for n in (1, 2, 3, 4)], dtype="float32", device="cpu")
    assert part.head.is_mkldnn == torch.backends.mkldnn.is_available()
    h_Nd = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        for k in (1, 2, 3, 4):
            assert torch.allclose(part.readout(k, h_Nd), whole.model.readout(k, h_Nd), atol=1e-5), k
            assert part.readout(k, h_Nd).shape == (5, 8192)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kept", [torch.float16, torch.float32])
def test_heads_are_those_of_one_process_whatever_dtype_they_and_the_model_are_kept_in(tmp_path, dtype, kept):
    """A checkpoint in bfloat16, which a CPU may run in float32: heads are rounded once, to what they are run in."""
    manifest = made(tmp_path, *CUT, stored=torch.bfloat16)
    write_heads(tmp_path / "heads", tmp_path / "model", 4, kept=kept)
    manifest = replace(manifest, heads=str(tmp_path / "heads"))
    export_segments(manifest, tmp_path / "parts")
    whole, _ = load_with_heads(manifest.model, manifest.heads, dtype=dtype, segments=[1, 2, 3, 4])
    part = Part([read_artifact(tmp_path / "parts", n) for n in (1, 2, 3, 4)], dtype=dtype, device="cpu")
    for k in (1, 2, 3):
        mine, theirs = part.heads[k].tensors, whole.model.heads[k].tensors
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert torch.equal(part.probes[k].weight, whole.model.probes[k].weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segments": (1, 2, 3), "readouts": (3,)}, "segments end after layer 3; the model has 4"),
        ({"segments": (1, 5), "readouts": (5,)}, "layer"),
        ({"heads": "nowhere"}, "no exit heads"),
    ],
)
def test_an_export_that_does_not_fit_is_refused(tmp_path, change, message):
    manifest = made(tmp_path, *CUT)
    with pytest.raises(ValueError, match=message):
        export_segments(replace(manifest, **change), tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_heads_read_where_segments_end(tmp_path):
    manifest = made(tmp_path, *CUT, heads=True)
    with pytest.raises(ValueError, match=r"the heads read after layers \[1, 2, 3\], but the segments end after"):
        export_segments(replace(manifest, segments=(2, 4), readouts=(2, 4)), tmp_path / "again")


def test_a_looped_model_has_no_segments_to_export(tmp_path):
    manifest = made(tmp_path, *CUT)
    write_folder(tmp_path / "looped", "looped")
    with pytest.raises(ValueError, match="no layered model"):
        export_segments(replace(manifest, model=str(tmp_path / "looped")), tmp_path / "again")


def test_artifacts_of_other_exports_or_manifests_are_refused(tmp_path):
    manifest = made(tmp_path, *CUT)
    (tmp_path / "other").mkdir()
    other = made(tmp_path / "other", *CUT, changes={"rope_theta": 500.0})
    with pytest.raises(ValueError, match="exported with readouts"):
        read_artifacts(tmp_path / "parts", replace(manifest, readouts=(4,)))
    for suffix in ("json", "safetensors"):
        shutil.copy(tmp_path / "other" / "parts" / f"segment-2.{suffix}", tmp_path / "parts")
    with pytest.raises(ValueError, match=r"segment-2.* another export .*\(config differs\)"):
        read_artifacts(tmp_path / "parts", manifest)
    (tmp_path / "other" / "parts" / "segment-4.json").unlink()
    with pytest.raises(ValueError, match="anydepth export --segments"):
        read_artifacts(tmp_path / "other" / "parts", other)


def test_the_command_writes_the_parts_of_a_manifest(tmp_path, monkeypatch, capsys):
    write_folder(tmp_path / "model", dtype=torch.float64, num_hidden_layers=2)
    (tmp_path / "m.toml").write_text(
        f'model = "{tmp_path / "model"}"\nsegments = [1, 2]\n[[stage]]\nsegments = [1]\n[[stage]]\nsegments = [2]\n'
    )
    ask = ["anydepth", "export", "--segments", str(tmp_path / "m.toml"), str(tmp_path / "parts")]
    monkeypatch.setattr("sys.argv", ask)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and "docs/pipeline.md" in capsys.readouterr().out
    assert read_artifact(tmp_path / "parts", 2).tensors
    monkeypatch.setattr("sys.argv", [*ask, "again"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code and "one folder too many" in capsys.readouterr().err
