"""A released checkpoint folder: config.json and safetensors, one file or shards with an index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from anydepth.models.config import read_json
from anydepth.models.locate import PICKLES, pickle_refused
from anydepth.models.tokenizer import Tokenizer
from anydepth.models.weights import harmless

FLOATS = {"F32": "float32", "F64": "float64", "BF16": "bfloat16", "F16": "float16"}
INDEX = "model.safetensors.index.json"
# A mapped file's pages count as this process's memory until it is unmapped: so it is mapped afresh this often.
MAPPED_BYTES = 16 << 20


class SafetensorsFiles:
    """Tensors of one or several files. Opening checks every header; tensor data is read by `rows` alone.

    `shapes`: tensor name -> shape, over all files. `first_dtype`: of the first tensor, None where there is none. Raises
    ValueError for what is corrupt, stored twice, no plain float or a pickle.
    """

    def __init__(self, files: tuple[Path, ...]) -> None:
        self.files = files
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        self._mapped_bytes = 0
        self.first_dtype = next(filter(None, [self._read_header(path) for path in files]), None)

    def _read_header(self, path: Path) -> str | None:
        """Names and shapes of one file; its first tensor's dtype."""
        refuse_magic(path)
        first = None
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    part = file.get_slice(name)
                    if part.get_dtype() not in FLOATS and not harmless(name):
                        raise ValueError(
                            f"{path}: tensor {name} is stored as {part.get_dtype()}; allowed: {', '.join(FLOATS)}"
                        )
                    if name in self._file_of:
                        raise ValueError(
                            f"tensor {name} is in {self._file_of[name].name} and again in {path.name}; "
                            f"each tensor belongs in one shard, download the checkpoint again"
                        )
                    self._file_of[name], self.shapes[name] = path, tuple(part.get_shape())
                    first = first or FLOATS.get(part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or no safetensors file ({error}); download it again") from error
        return first

    def rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of a tensor, piece by piece and in order, on the CPU in the stored dtype.

        A piece is a view of the mapped file: drop it before asking for the next, and the memory goes back.
        """
        shape = self.shapes[name]
        if not shape:
            raise ValueError(f"tensor {name} has no axes; allowed: one or more")
        row_bytes = max(1, 8 * torch.Size(shape[1:]).numel())
        step = max(1, MAPPED_BYTES // row_bytes)
        for start in range(0, shape[0], step):
            part = self._slice(name, start, min(start + step, shape[0]))
            self._mapped_bytes += part.nbytes
            yield start, part
        self._release()

    def _slice(self, name: str, start: int, stop: int) -> Tensor:
        path = self._file_of[name]
        if self._open is None or self._open[0] != path or self._mapped_bytes >= MAPPED_BYTES:
            self._open, self._mapped_bytes = (path, safe_open(path, framework="pt")), 0
        part: Tensor = self._open[1].get_slice(name)[start:stop]
        return part

    def _release(self) -> None:
        if self._mapped_bytes >= MAPPED_BYTES:
            self._open = None


class SafetensorsFolder(SafetensorsFiles):
    """Weights of a folder with a config.json. `stored_dtype`: the config's, else the first tensor's. Raises ValueError
    for what is missing, corrupt, contradictory or a pickle.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder / "config.json", needed=True)
        self.generation_config = read_json(folder / "generation_config.json")
        if self.config.get("quantization_config"):
            raise ValueError(
                f"{folder}/config.json has a quantization_config; allowed: plain {', '.join(FLOATS)} "
                f"tensors. Use the unquantised checkpoint or a .gguf file"
            )
        files, index = shards(folder)
        super().__init__(files)
        if index is not None:
            self._check_index(folder, index)
        dtype = self.config.get("dtype") or self.config.get("torch_dtype") or self.first_dtype or "float32"
        self.stored_dtype = str(dtype).removeprefix("torch.")

    def tokenizer(self) -> Tokenizer | None:
        """The folder's, None where it has no tokenizer.json."""
        return Tokenizer.from_folder(self.folder) if (self.folder / "tokenizer.json").is_file() else None

    def _check_index(self, folder: Path, index: dict[str, str]) -> None:
        for name, shard in index.items():
            found = self._file_of.get(name)
            if found is None or found.name != shard:
                where = f"it is in {found.name}" if found else "no shard has it"
                raise ValueError(
                    f"{folder / INDEX} says tensor {name} is in {shard}, but {where}; download the checkpoint again"
                )


def shards(folder: Path) -> tuple[tuple[Path, ...], dict[str, str] | None]:
    """The folder's weight files and, where there are shards, the index (tensor name -> file name)."""
    single, index_path = folder / "model.safetensors", folder / INDEX
    if single.is_file():
        return (single,), None
    if not index_path.is_file():
        others = sorted(p for p in folder.iterdir() if p.suffix in PICKLES)
        if others:
            raise pickle_refused(others[0])
        raise ValueError(f"{folder} has neither model.safetensors nor {INDEX}; it needs one of them")
    index = read_json(index_path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{index_path} has no weight_map (tensor name -> file name); download it again")
    paths = []
    for shard in sorted({str(shard) for shard in index.values()}):
        path = folder / shard
        if path.suffix in PICKLES:
            raise pickle_refused(path)
        if Path(shard).name != shard:
            raise ValueError(f"{index_path} names the shard {shard!r}; allowed: plain file names of this folder")
        if not path.is_file():
            raise ValueError(
                f"{index_path} names the shard {shard}, which is missing from {folder}; download the checkpoint again"
            )
        paths.append(path)
    return tuple(paths), index


def refuse_magic(path: Path) -> None:
    """ValueError for a pickle under another name. Nine bytes are read, nothing is unpickled."""
    with path.open("rb") as file:
        head = file.read(9)
    pickled = head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"))
    # A safetensors header of 640 bytes also begins with 80 02: what follows its eight length bytes is a brace.
    if pickled and head[8:9] != b"{":
        raise pickle_refused(path)
