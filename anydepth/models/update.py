"""Other weights for a model in memory: everything that can be wrong is found before the first of them is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from anydepth.dtypes import dtype_name
from anydepth.models.base import Model
from anydepth.models.load import TILE_ROWS, copy
from anydepth.models.safetensors_file import SafetensorsFiles, shards
from anydepth.models.weights import BY_MODEL, EMBEDDING, HEAD, check_names, harmless, shapes_of

Source = Mapping[str, Tensor] | str | Path


class _Tensors(Protocol):
    shapes: dict[str, tuple[int, ...]]

    def rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of a tensor, in order; a piece is valid until the next one is asked for."""


class NewWeights:
    """Weights that fit `model`, read from `source` but not written yet.

    source: a state dict by the released names (`model.slots()` has them; `lm_head.weight` may be there where it is tied
    to the embedding), a .safetensors file, or a folder of them. It must not change until `write` was called.

    Raises ValueError, with model and source as they were, for names that are missing or unknown, other shapes, what is
    no plain float tensor, numbers that are not finite in the model's dtype, and a tied LM head unlike the embedding.
    """

    def __init__(self, source: Source, model: Model) -> None:
        self._model = model
        self._name, self._source = _opened(source)
        expected = shapes_of(model.slots())
        model.pack()
        check_names(self._source.shapes, expected, source=self._name, by=BY_MODEL)
        self._names = [name for name in self._source.shapes if name in expected]
        for name in self._names:
            self._check_numbers(name)
        if HEAD in self._source.shapes and HEAD not in expected:
            self._check_tied()

    @torch.no_grad()
    def write(self) -> None:
        """Write all of them, where the old ones stand."""
        slots = dict(self._model.slots())
        try:
            if isinstance(self._source, _StateDict):
                self._source.leave(slots)
            for name in self._names:
                for start, rows in self._source.rows(name):
                    copy(rows.to(slots[name].device), slots[name][start : start + len(rows)])
        finally:
            del slots  # its views would keep what is packed
            self._model.pack()

    def _check_numbers(self, name: str) -> None:
        dtype = self._model.dtype
        for start, rows in self._source.rows(name):
            for at in range(0, len(rows), TILE_ROWS):
                if not rows[at : at + TILE_ROWS].to(dtype).isfinite().all():
                    raise ValueError(
                        f"{self._name}: tensor {name} has numbers that are not finite in {dtype_name(dtype)} (rows "
                        f"from {start + at} on); nothing was changed"
                    )

    def _check_tied(self) -> None:
        dtype = self._model.dtype
        for (start, head), (_, embedded) in zip(self._source.rows(HEAD), self._source.rows(EMBEDDING), strict=True):
            if not torch.equal(head.to(dtype), embedded.to(head.device, dtype)):
                raise ValueError(
                    f"{self._name}: {HEAD} differs from {EMBEDDING} (rows from {start} on), which this model ties; "
                    f"leave {HEAD} out"
                )


class _StateDict:
    """Tensors that are in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name in tensors:
            if not isinstance(name, str):
                raise ValueError(f"the state dict has a key {name!r}; allowed: the released names of tensors")
        tensors = {name: tensor for name, tensor in tensors.items() if not harmless(name)}
        for name, tensor in tensors.items():
            plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type != "meta"
            if not plain or not tensor.is_floating_point() or not tensor.dim():
                said = repr(type(tensor))
                if isinstance(tensor, Tensor):
                    said = f"{dtype_name(tensor.dtype)} on {tensor.device}"
                raise ValueError(
                    f"the state dict has {name} as {said}; allowed: plain float tensors of one or more axes"
                )
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._tensors = tensors

    def rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        yield 0, self._tensors[name].detach()

    def leave(self, slots: Mapping[str, Tensor]) -> None:
        """Copy what stands where the model keeps other weights: it would be written over before it is read."""
        theirs = {slot.untyped_storage().data_ptr() for slot in slots.values()}
        for name, tensor in self._tensors.items():
            slot = slots.get(name)
            stays = slot is not None and (tensor.data_ptr(), tensor.stride()) == (slot.data_ptr(), slot.stride())
            if not stays and tensor.untyped_storage().data_ptr() in theirs:
                self._tensors[name] = tensor.clone()


def _opened(source: Source) -> tuple[str, _Tensors]:
    """What to call the source, and its tensors."""
    if isinstance(source, Mapping):
        return "the state dict", _StateDict(source)
    if not isinstance(source, str | Path):
        raise ValueError(f"the weights are {source!r}; allowed: a state dict, a .safetensors file or a folder of them")
    path = Path(source).expanduser()
    if path.is_dir():
        return str(path), SafetensorsFiles(shards(path)[0])
    if not path.is_file():
        raise ValueError(f"there are no weights {path}; give a .safetensors file, a folder of them, or a state dict")
    return str(path), SafetensorsFiles((path,))
