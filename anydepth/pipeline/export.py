"""One artifact a segment: `segment-N.safetensors` has what its worker needs, `segment-N.json` says what that is.

| segment | holds |
|---|---|
| first | the embedding |
| every one | its layers |
| inner, read through a head | the head as it is kept, and of the model's LM head all, or a shortlist's columns |
| the last, and inner ones that are read without a head | the model's final norm and LM head |

Heads go in as they are kept and are made ready in the worker's dtype, as one process makes them in its own. With tied
embeddings the LM head is the embedding, and stands in the artifact of each segment that needs it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anydepth.models.heads import PROBE, ExitHeads, load_heads
from anydepth.models.llama import Llama
from anydepth.models.load import model_class, open_weights, weights_hash
from anydepth.models.locate import locate
from anydepth.models.weights import EMBEDDING, HEAD, Weights, all_eos, check_names, check_sizes, shapes_of
from anydepth.pipeline.manifest import Manifest
from anydepth.record import files_hash, read_versioned, write_atomically

NORM, VERSION = "model.norm.weight", 2
COLUMNS = "head.columns"  # of the LM head, those of a shortlist's tokens, [d, S]
SAME = ("model_hash", "head_hash", "config", "segments", "readouts", "eos_ids", "dtype")  # in all of a pipeline


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """What the JSON of one segment says. `segments` and `readouts` are layers, of the whole model; `head` is the kind
    of the segment's own head, `probe` whether it has a probe."""

    path: Path  # of the safetensors file
    segment: int
    segments: tuple[int, ...]
    readouts: tuple[int, ...]
    config: Mapping[str, Any]
    model_hash: str
    head_hash: str | None
    head: str | None
    probe: bool
    eos_ids: tuple[int, ...]
    dtype: str
    tensors: tuple[str, ...]
    sha256: str

    def read(self) -> dict[str, Tensor]:
        """Its tensors. ValueError for a file that is not the one that was written."""
        if not self.path.is_file() or files_hash([self.path]) != self.sha256:
            raise ValueError(f"{self.path} is not the file that its JSON describes; export the segments again")
        try:
            with safe_open(self.path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.path} cannot be read ({error}); export the segments again") from error


def export_segments(manifest: Manifest, out: str | Path) -> Path:
    """Write the artifacts of a manifest's segments into a folder; tensors keep the dtype they are stored in.

    Raises ValueError for a model that is not layered, segments that do not end with its last layer, and heads that are
    another backbone's or read where no segment ends.
    """
    place = locate(manifest.model)
    weights = open_weights(place.path)
    if model_class(weights.config, allow_own=place.local, path=place.path) is not Llama:
        raise ValueError(f"{manifest.model} is no layered model; segments are of the Llama family")
    check_sizes(weights, path=place.path)
    model = outline(weights.config, manifest.segments)
    if model.shape.layers != manifest.segments[-1]:
        raise ValueError(f"segments end after layer {manifest.segments[-1]}; the model has {model.shape.layers} layers")
    check_names(weights.shapes, shapes_of(model.slots()), source=place.path)
    model_hash = weights_hash(weights.files)
    heads = None
    if manifest.heads is not None:
        heads = load_heads(
            manifest.heads,
            model_hash=model_hash,
            shape=model.shape,
            unembedding_dV=None,
            dtype=None,
        )
        model.attach(heads)
    try:
        json.dumps(weights.config)
    except TypeError as error:
        raise ValueError(
            f"{place.path}: its config holds what JSON cannot ({error}), RoPE factors of a GGUF file; give the "
            f"checkpoint as safetensors"
        ) from error
    folder = Path(out).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "version": VERSION,
        "model_hash": model_hash,
        "head_hash": heads.hash if heads else None,
        "config": dict(weights.config),
        "segments": manifest.segments,
        "readouts": manifest.readouts,
        "eos_ids": sorted(all_eos(weights, weights.tokenizer(), vocab=model.shape.vocab, path=place.path)),
        "dtype": weights.stored_dtype,
    }
    columns = _columns(weights, EMBEDDING if model.tied else HEAD, heads) if heads is not None else {}
    for segment in range(1, model.shape.segments + 1):
        _write(folder, segment, model, weights, heads, columns, about)
    return folder


def outline(config: Mapping[str, Any], segments: tuple[int, ...]) -> Llama:
    """The model without its numbers: shapes and names."""
    return Llama(config, dtype=torch.float32, device=torch.device("meta"), segments=list(segments))


def names_of(segment: int, model: Llama, readouts: tuple[int, ...], heads: Mapping[int, str]) -> list[str]:
    """Released names of the tensors that a segment needs; `heads` are kinds by segment."""
    layers = model.shape.segment_layers[segment - 1]
    names = [EMBEDDING] if segment == 1 else []
    names += [name for layer in layers for name, _ in model.layers[layer].slots(f"model.layers.{layer}.")]
    if layers.stop in readouts:
        if segment not in heads:
            names.append(NORM)
        if heads.get(segment) != "shortlist" and not (model.tied and segment == 1):
            names.append(HEAD)
    return names


def _columns(weights: Weights, name: str, heads: ExitHeads) -> dict[int, Tensor]:
    """By layer, the columns [d, S] of the LM head for the tokens of each shortlist; it is read once for all."""
    listed = {layer: head.tensors["ids"] for layer, head in heads.heads.items() if head.kind == "shortlist"}
    if not listed:
        return {}
    whole = _whole(weights, name)
    return {layer: whole.index_select(0, ids).t() for layer, ids in listed.items()}


def _write(
    folder: Path,
    segment: int,
    model: Llama,
    weights: Weights,
    heads: ExitHeads | None,
    columns: Mapping[int, Tensor],
    about: Mapping[str, Any],
) -> None:
    kinds = {k: head.kind for k, head in model.heads.items()}
    layer, readouts = model.shape.segment_layers[segment - 1].stop, tuple(about["readouts"])
    tensors = {}
    for name in names_of(segment, model, readouts, kinds):
        tensors[name] = _whole(weights, EMBEDDING if name == HEAD and model.tied else name)
    if heads is not None and layer in readouts:
        if layer in heads.heads:
            tensors |= {f"head.{name}": tensor for name, tensor in heads.heads[layer].tensors.items()}
        if layer in columns:
            tensors[COLUMNS] = columns[layer]
        if layer in heads.probes:
            tensors |= {f"probe.{name}": getattr(heads.probes[layer], name) for name in PROBE}
    path = folder / f"segment-{segment}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
    content = {
        **about,
        "segment": segment,
        "head": kinds.get(segment) if layer in readouts else None,
        "probe": segment in model.probes and layer in readouts,
        "tensors": sorted(tensors),
        "sha256": files_hash([path]),
    }
    write_atomically(path.with_suffix(".json"), json.dumps(content, indent=1).encode() + b"\n")


def _whole(weights: Weights, name: str) -> Tensor:
    return torch.cat([rows.clone() for _, rows in weights.rows(name)])


def read_artifact(folder: str | Path, segment: int) -> Artifact:
    """What was written of a segment. ValueError for what is missing or of another version."""
    path = Path(folder).expanduser() / f"segment-{segment}.json"
    if not path.is_file():
        raise ValueError(f"there is no {path}; make it with: anydepth export --segments manifest.toml FOLDER")
    content = read_versioned(path, what="no description of a segment", version=VERSION)
    listed = ("segments", "readouts", "eos_ids", "tensors")
    values: dict[str, Any] = {
        key: tuple(value) if key in listed else value for key, value in content.items() if key != "version"
    }
    return Artifact(path=path.with_suffix(".safetensors"), **values)


def read_artifacts(folder: str | Path, manifest: Manifest) -> list[Artifact]:
    """Those of all segments. ValueError unless they are of one export, and the manifest's."""
    artifacts = [read_artifact(folder, segment) for segment in range(1, len(manifest.segments) + 1)]
    for artifact in artifacts:
        for key in SAME:
            if getattr(artifact, key) != getattr(artifacts[0], key):
                raise ValueError(f"{artifact.path} is of another export than segment 1's ({key} differs)")
    for key in ("segments", "readouts"):
        asked, found = getattr(manifest, key), getattr(artifacts[0], key)
        if asked != found:
            raise ValueError(f"{folder}: exported with {key} {list(found)}, the manifest has {list(asked)}")
    return artifacts
