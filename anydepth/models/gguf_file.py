"""A GGUF file: Llama weights in llama.cpp's names, layout and quantisations, and its tokenizer's metadata.

Dequantisation and the file format are the `gguf` library's; this module reads in pieces and renames.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Value
from torch import Tensor

from anydepth.models.gguf_tokenizer import tokenizer_from_gguf
from anydepth.models.safetensors_file import refuse_magic
from anydepth.models.tokenizer import Tokenizer

KINDS = (
    Kind.F32,
    Kind.F16,
    Kind.BF16,
    Kind.Q8_0,
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q5_0,
    Kind.Q5_1,
    Kind.Q4_K,
    Kind.Q5_K,
    Kind.Q6_K,
)
# Weights dequantised by one call: its float32 temporaries stay in the second-level cache.
CACHED_WEIGHTS = 1 << 16
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
Array = np.ndarray[Any, Any]
FACTORS = "rope_freqs.weight"


class Header(gguf.GGUFReader):
    """gguf's reader with arrays taken whole: a vocabulary's 100,000 strings in 0.05 s instead of 1.5 s."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Value]]:
        if raw_type != Value.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = Value(int(self._get(orig_offs, np.uint32)[0]))
        count, start = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
        if kind == Value.STRING:
            items, stop = self._strings(start, count)
        elif kind in self.gguf_scalar_to_np:
            numbers = self._get(start, self.gguf_scalar_to_np[kind], count)
            if len(numbers) != count:
                raise ValueError(f"an array of {count} numbers runs past the end")
            items, stop = numbers, start + numbers.nbytes
        else:
            raise ValueError(f"arrays of {kind.name} are not supported")
        return stop - orig_offs, [items], [0], [Value.ARRAY, kind]

    def _strings(self, start: int, count: int) -> tuple[Any, int]:
        buffer, length_at, strings = self.data.data, struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            end = start + 8 + length_at(buffer, start)[0]
            if end > len(buffer):
                raise ValueError("a string runs past the end")
            strings.append(str(buffer[start + 8 : end], "utf-8"))
            start = end
        return np.array(strings, dtype=object), start


class GGUFFile:
    """Weights of a .gguf file of architecture llama. Opening checks the header; `rows` alone reads tensor data.

    `metadata`: every key's value, arrays as lists. `config`: the same as a released config.json would say it.
    `shapes`: released tensor name -> shape. Raises ValueError for a corrupt or unsupported file.
    """

    def __init__(self, path: Path) -> None:
        self.files: tuple[Path, ...] = (path,)
        self.generation_config: dict[str, Any] = {}
        self.stored_dtype = "bfloat16"  # what a quantised weight is worth, for devices that compute in it
        refuse_magic(path)
        try:
            header = Header(path)
            self.metadata = {name: value_of(field) for name, field in header.fields.items()}
        except (ValueError, KeyError, IndexError, OverflowError, MemoryError, struct.error, OSError) as error:
            raise ValueError(
                f"{path} is truncated or no GGUF file of version 2 or 3 ({error}); download it again"
            ) from error
        if header.byte_order != "I":
            raise ValueError(f"{path} is big-endian; allowed: little-endian. Convert it with gguf-convert-endian")
        refuse_variants(path, self.metadata)
        self._tensors = {released_name(t.name): t for t in sorted(header.tensors, key=lambda t: t.data_offset)}
        if len(self._tensors) != len(header.tensors):
            raise ValueError(f"{path} has two tensors that mean the same weights; download it again")
        self._check_tensors(path)
        self.shapes = {name: tuple(int(n) for n in t.shape[::-1]) for name, t in self._tensors.items()}
        self.config = config_of(path, self.metadata, self.shapes)
        if (shape := self.shapes.pop(FACTORS, None)) is not None:
            if shape != (self.config["head_dim"] // 2,):
                raise ValueError(
                    f"{path}: tensor {FACTORS} has the shape {list(shape)}; allowed: one number for "
                    f"every two of a head's {self.config['head_dim']}"
                )
            factors = np.concatenate([part.copy() for _, part in self._pieces(FACTORS, 1)])
            self.config["rope_scaling"] = {"rope_type": "factors", "factors": torch.from_numpy(factors)}
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self._heads = {"self_attn.q_proj.weight": heads, "self_attn.k_proj.weight": kv_heads}

    def _check_tensors(self, path: Path) -> None:
        end = 0
        for t in self._tensors.values():
            if t.tensor_type not in KINDS:
                raise ValueError(
                    f"{path}: tensor {t.name} is stored as {t.tensor_type.name}; allowed: "
                    f"{', '.join(kind.name for kind in KINDS)}. Use another quantisation of this model"
                )
            if t.data_offset < end:
                raise ValueError(
                    f"{path} is corrupt: the data of tensor {t.name} overlaps another's; download it again"
                )
            end = t.data_offset + t.n_bytes

    def rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(first row, float32 rows) of a tensor, piece by piece and in order, on the CPU.

        A piece is valid until the next one is asked for. Rows of q and k come in the halves order of RoPE.
        """
        shape = self.shapes[name]
        heads = next((n for suffix, n in self._heads.items() if name.endswith(suffix)), 0)
        head_rows = shape[0] // heads if heads and shape[0] % heads == 0 else 1
        for start, part in self._pieces(name, head_rows):
            if heads:
                # llama.cpp pairs neighbours (2i, 2i+1) and stores rows so; the released order pairs i with i + D/2.
                part = part.reshape(-1, head_rows // 2, 2, shape[1]).swapaxes(1, 2).reshape(-1, shape[1])
            yield start, torch.from_numpy(part)

    def tokenizer(self) -> Tokenizer | None:
        """The one in the metadata, None where there is none."""
        return tokenizer_from_gguf(self.metadata, path=self.files[0])

    def _pieces(self, name: str, multiple: int) -> Iterator[tuple[int, Array]]:
        """Stored rows in float32, a multiple of `multiple` at a time and never many: one buffer is used again."""
        t = self._tensors[name]
        shape = tuple(int(n) for n in t.shape[::-1])
        count, row_bytes = shape[0], t.n_bytes // shape[0]
        width = t.n_elements // count
        # 64 rows or more: storing few rows into a transposed matrix would touch each cache line again and again.
        step = -(-max(64, CACHED_WEIGHTS // width) // multiple) * multiple
        buffer = np.empty(min(step, count) * width, np.float32)
        with self.files[0].open("rb") as file:
            file.seek(t.data_offset)
            for start in range(0, count, step):
                rows = min(step, count - start)
                data = np.fromfile(file, np.uint8, rows * row_bytes)
                if len(data) != rows * row_bytes:
                    raise ValueError(f"{self.files[0]} ends inside tensor {t.name}; download it again")
                dequantize(data, t.tensor_type, buffer[: rows * width])
                yield start, buffer[: rows * width].reshape(rows, *shape[1:])


def dequantize(data: Array, kind: Kind, out: Array) -> None:
    """Bytes of whole blocks -> float32 `out`, a cache-sized part at a time."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    step = max(1, CACHED_WEIGHTS // block)
    for start in range(0, len(out) // block, step):
        part = data[start * block_bytes : (start + step) * block_bytes].reshape(1, -1)
        out[start * block : (start + step) * block] = gguf.quants.dequantize(part, kind)[0]


def value_of(field: gguf.ReaderField) -> Any:
    """A metadata field as a Python value."""
    if field.types[:1] == [Value.ARRAY]:
        return field.parts[field.data[0]].tolist()
    return field.contents()


def released_name(name: str) -> str:
    """blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight; a name without counterpart stays."""
    stem, dot, suffix = name.rpartition(".")
    if stem in TOP:
        return TOP[stem] + dot + suffix
    match stem.split("."):
        case ["blk", layer, part] if part in IN_LAYER:
            return f"model.layers.{layer}.{IN_LAYER[part]}{dot}{suffix}"
    return name


def refuse_variants(path: Path, metadata: dict[str, Any]) -> None:
    """ValueError for what the llama architecture's files can also hold and this Llama is not."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{path} has the architecture {architecture!r}; allowed: 'llama'")
    if metadata.get("split.count", 1) > 1:
        raise ValueError(
            f"{path} is one of {metadata['split.count']} parts; allowed: whole files. "
            f"Join them with llama-gguf-split --merge"
        )
    for key, allowed in (("llama.expert_count", (0,)), ("llama.rope.scaling.type", ("none",))):
        if metadata.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{path} has {key} = {metadata[key]!r}; allowed: {allowed[0]!r}")


def config_of(path: Path, metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The keys of a released config.json, from GGUF metadata."""

    def whole(key: str, default: int | None = None) -> int:
        value = metadata.get(f"llama.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{path} has llama.{key} = {value!r}; a positive whole number is needed")
        return value

    heads, hidden = whole("attention.head_count"), whole("embedding_length")
    head_dim = whole("attention.key_length", hidden // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if whole(key, head_dim) != head_dim:
            raise ValueError(f"{path} has llama.{key} = {whole(key)}, but heads of {head_dim}; they must be equal")
    embedding = shapes.get("model.embed_tokens.weight", (0,))
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.get("llama.attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "vocab_size": embedding[0],
        "max_position_embeddings": whole("context_length"),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
    }
