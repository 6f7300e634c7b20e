"""From a name to a model in memory: `load_checkpoint`. Everything that can be checked is, before weights are read."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import anydepth.models
from anydepth.dtypes import DTYPES
from anydepth.models.base import Model
from anydepth.models.locate import locate
from anydepth.models.safetensors_file import SafetensorsFolder
from anydepth.models.tokenizer import Tokenizer
from anydepth.models.weights import (
    EMBEDDING,
    HEAD,
    Weights,
    all_eos,
    check_names,
    check_sizes,
    check_vocabulary,
    shapes_of,
)
from anydepth.record import files_hash
from anydepth.types import unknown

TILE_ROWS, TILE_COLUMNS = 128, 256


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded model and what came with it.

    `name` is what was asked for, `path` the folder or .gguf file it was found at. `eos_ids` joins those of config,
    generation config and tokenizer. `tokenizer` is None for a checkpoint that has none.
    """

    model: Model
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    name: str
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    weight_files: tuple[Path, ...]
    revision: str | None = None

    @cached_property
    def model_hash(self) -> str:
        """sha256 (hex) over the weight files' bytes, in order of name. Read on first use, 0.5 s or so a GB."""
        return weights_hash(self.weight_files)

    @property
    def tokenizer_hash(self) -> str | None:
        return self.tokenizer.hash if self.tokenizer else None


def load_checkpoint(
    name: str | Path,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    segments: int | Sequence[int] | None = None,
    revision: str | None = None,
    tokenizer: str | Path | None = None,
) -> Checkpoint:
    """Find, check and load a checkpoint; 1 s for SmolLM2-135M (98 MB quantised, 538 MB in float32).

    name: "nano", "nano-plain", "smollm2-135m", a folder of safetensors, a .gguf file, or a hub id (then `revision`
    names a branch, tag or commit). dtype: a string; None is float32 on the CPU and the checkpoint's own elsewhere.
    segments: layers a segment or the exit layers, for layered models. tokenizer: a folder or tokenizer.json that
    replaces the checkpoint's. Weights go piece by piece into the model: the peak is the model and a few MB.

    Raises ValueError for a name nobody knows, a pickle, corrupt files, tensors missing, extra or misshapen, a
    tokenizer that is too large for the model, and options that are unknown or do not fit it.
    """
    place = locate(name, revision=revision)
    weights = open_weights(place.path)
    build = model_class(weights.config, allow_own=place.local, path=place.path)
    target = pick_device(device)
    words = Tokenizer.from_folder(Path(tokenizer).expanduser()) if tokenizer else weights.tokenizer()
    number = pick_dtype(dtype, target, weights.stored_dtype)
    check_sizes(weights, path=place.path)
    try:
        model = build(weights.config, dtype=number, device=target, segments=segments)
    except RuntimeError as error:  # torch's for memory, on any device
        raise ValueError(
            f"{place.path}: no room for this model in {number} on {device} ({error}); check its config, "
            f"or give a smaller dtype"
        ) from error
    check_vocabulary(words, vocab=model.shape.vocab, path=place.path)
    eos_ids = all_eos(weights, words, vocab=model.shape.vocab, path=place.path)
    slots = dict(model.slots())
    check_names(weights.shapes, shapes_of(slots), source=place.path)
    fill(slots, weights, path=place.path)
    del slots  # its views would keep what is packed
    model.pack()
    return Checkpoint(
        model=model,
        tokenizer=words,
        eos_ids=eos_ids,
        name=str(name),
        path=place.path,
        config=weights.config,
        generation_config=weights.generation_config,
        weight_files=weights.files,
        revision=place.revision,
    )


def weights_hash(files: Iterable[Path]) -> str:
    """sha256 (hex) over the bytes of weight files, in order of name."""
    return files_hash(sorted(files))


def open_weights(path: Path) -> Weights:
    if path.is_dir():
        return SafetensorsFolder(path)
    from anydepth.models.gguf_file import GGUFFile  # its library is slow to import and rarely needed

    return GGUFFile(path)


def model_class(config: Mapping[str, Any], *, allow_own: bool, path: Path) -> Callable[..., Model]:
    """The class that a config's model_type names: `anydepth.models.<model_type>.Model`, or `pkg.module:Class`."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ValueError(f"{path}: model_type is {kind!r}; allowed: {', '.join(known_models())} or pkg.module:Class")
    module, colon, name = kind.partition(":")
    if colon:
        if not allow_own:
            raise ValueError(
                f"{path}: model_type {kind!r} names a class of its own; that is allowed in a local "
                f"folder's config.json only, not in a downloaded one"
            )
        try:
            own: Callable[..., Model] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: model_type {kind!r} cannot be imported ({error}); allowed: pkg.module:Class "
                f"of an importable module"
            ) from error
        return own
    if found := model_of(kind):
        return found
    raise ValueError(f"{path}: {unknown('model_type', kind, known_models())}")


def model_of(module: str) -> Callable[..., Model] | None:
    """The class `Model` that a module of this package defines, if there is such a module and class."""
    if module not in (info.name for info in pkgutil.iter_modules(anydepth.models.__path__)):
        return None
    found = getattr(importlib.import_module(f"anydepth.models.{module}"), "Model", None)
    return found if isinstance(found, type) and found is not Model else None


def known_models() -> list[str]:
    return [info.name for info in pkgutil.iter_modules(anydepth.models.__path__) if model_of(info.name)]


def pick_device(device: str) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; allowed: 'cpu', 'cuda', 'cuda:0', ...") from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {device!r}, but {torch.cuda.device_count()} CUDA devices are visible; use 'cpu'")
    return target


def pick_dtype(dtype: str | None, device: torch.device, stored: str) -> torch.dtype:
    if dtype is None:
        dtype = "float32" if device.type == "cpu" else stored
    if dtype not in DTYPES:
        raise unknown("dtype", str(dtype), DTYPES)
    return DTYPES[dtype]


@torch.no_grad()
def fill(slots: Mapping[str, Tensor], weights: Weights, *, path: Path) -> None:
    """Copy every tensor into its slot, in the order of the files; a tied LM head is compared instead."""
    for name in weights.shapes:
        if name in slots:
            for start, rows in weights.rows(name):
                copy(rows, slots[name][start : start + len(rows)])
    if HEAD in weights.shapes and HEAD not in slots:
        for start, rows in weights.rows(HEAD):
            embedded = slots[EMBEDDING][start : start + len(rows)]
            if not torch.equal(rows.to(embedded), embedded):
                raise ValueError(
                    f"{path} says tie_word_embeddings, but {HEAD} differs from {EMBEDDING} (rows "
                    f"{start} to {start + len(rows) - 1}); set tie_word_embeddings: false in config.json"
                )


def copy(source: Tensor, target: Tensor) -> None:
    """target = source, on the CPU in tiles.

    A tile is below the size from which torch splits a copy over threads: that costs more than it gains here, and a
    hundredfold on a busy machine. It also keeps a transposed store in cache, three times as fast as row by row.
    """
    if target.device.type != "cpu" or target.dim() != 2:
        target.copy_(source)
        return
    for row in range(0, target.shape[0], TILE_ROWS):
        for column in range(0, target.shape[1], TILE_COLUMNS):
            tile = slice(row, row + TILE_ROWS), slice(column, column + TILE_COLUMNS)
            target[tile].copy_(source[tile])
