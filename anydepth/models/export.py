"""A checkpoint as a folder that transformers loads: `export_hf`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import processors
from torch import Tensor

from anydepth.models.base import Shape
from anydepth.models.config import read_json, rope_settings
from anydepth.models.decoder import LayerShape
from anydepth.models.load import copy, model_class, open_weights
from anydepth.models.locate import Place, locate
from anydepth.models.safetensors_file import INDEX, SafetensorsFolder
from anydepth.models.tokenizer import Tokenizer
from anydepth.models.weights import HEAD, Weights, all_eos, check_names, check_sizes, check_vocabulary, shapes_of
from anydepth.provenance import source

MARKER = "anydepth_export.json"
CODE = Path(__file__).parent / "hf" / "modeling_ouro.py"
# What of a model_type transformers has to know; Llama it knows itself.
CLASSES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "ouro": {
        "architectures": ["OuroForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{CODE.stem}.OuroConfig",
            "AutoModel": f"{CODE.stem}.OuroModel",
            "AutoModelForCausalLM": f"{CODE.stem}.OuroForCausalLM",
        },
    },
}
SHARD_BYTES = 2 << 30


def export_hf(model: str | Path, out: str | Path, *, revision: str | None = None) -> Path:
    """Write a folder from which transformers (4.57 or later) loads and generates. 6 s for SmolLM2-135M (538 MB).

        export_hf("nano", "nano-hf")
        words = AutoTokenizer.from_pretrained("nano-hf", trust_remote_code=True)
        model = AutoModelForCausalLM.from_pretrained("nano-hf", trust_remote_code=True)
        model.generate(**words("Ann has 5 . How many has Ann ?", return_tensors="pt"), exit_threshold=0.5)

    model, revision: as for `load_checkpoint`. A looped model brings its code (`modeling_ouro.py`, which says what its
    `exit_at_step` and `exit_threshold` mean); a Llama is a plain LlamaForCausalLM. Safetensors are copied as they are,
    GGUF files dequantised to float32. The tokenizer gives the ids that anydepth gives, the generation config stops at
    every token at which anydepth stops. `LLM(out)` holds equal tensors and answers with the same tokens.

    Two things are lost: a byte that a GGUF's vocabulary lacks is dropped before merging, not after; of several chat
    templates the default one is kept.

    `out` may be new, empty or an earlier export; the folder appears whole or not at all. Raises ValueError for a model
    that `load_checkpoint` refuses or transformers cannot express, any other folder at `out`, and where writing fails.
    Returns the folder's absolute path.
    """
    target = Path(out).expanduser().resolve()
    check_free(target)
    place = locate(model, revision=revision)
    weights = open_weights(place.path)
    words = weights.tokenizer()
    shape, config, generation_config = configs(weights, words, place.path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        write_json(partial / "config.json", config)
        write_weights(weights, partial)
        write_json(partial / "generation_config.json", generation_config)
        if "auto_map" in config:
            shutil.copyfile(CODE, partial / CODE.name)
        if words:
            write_tokenizer(weights, words, partial, max_positions=shape.max_positions)
        write_json(partial / MARKER, marker(str(model), place, partial))
        check_free(target)
        put(partial, target)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{target} could not be written ({error}); nothing there was changed. Free some space or give a folder "
            f"where you may write"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def check_free(target: Path) -> None:
    """ValueError unless the folder is absent, empty, or an earlier export with nothing added to it."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"{target} is a file; give a new folder, an empty one or an earlier export")
    written = read_json(target / MARKER).get("files", [])
    if others := sorted({path.name for path in target.iterdir()} - {MARKER, *written}):
        raise ValueError(
            f"{target} holds {others[0]} and is not (only) an earlier export; give a new or empty folder, or remove "
            f"what is there"
        )


def put(partial: Path, target: Path) -> None:
    """Rename the finished folder, in the place of an earlier one if there is one."""
    earlier = partial.with_suffix(".earlier")
    if target.exists():
        target.rename(earlier)
    try:
        partial.rename(target)
    except OSError:
        if earlier.exists():
            earlier.rename(target)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


def marker(name: str, place: Place, folder: Path) -> dict[str, Any]:
    """What tells an earlier export: where it comes from, without local paths, and its files."""
    return {
        "version": 1,
        "format": "hf",
        "anydepth": source(),
        "model": Path(name).name if place.local else name,
        "revision": place.revision,
        "files": sorted(path.name for path in folder.iterdir()),
    }


def configs(weights: Weights, words: Tokenizer | None, path: Path) -> tuple[Shape, dict[str, Any], dict[str, Any]]:
    """The model's shape, config.json and generation_config.json. ValueError for what cannot be exported."""
    config = weights.config
    kind = str(config.get("model_type"))
    if kind not in CLASSES:
        raise ValueError(f"{path}: model_type is {kind!r}; transformers can be given {' and '.join(sorted(CLASSES))}")
    build = model_class(config, allow_own=False, path=path)
    check_sizes(weights, path=path)
    model = build(config, dtype=torch.float32, device=torch.device("meta"), segments=None)
    slots, shape = model.slots(), model.shape
    check_names(weights.shapes, shapes_of(slots), source=path)
    check_vocabulary(words, vocab=shape.vocab, path=path)
    layer = LayerShape.from_config(config, sandwich=shape.has_gate)
    gguf = not isinstance(weights, SafetensorsFolder)
    ids = special_ids(weights, words, shape, path)
    written = CLASSES[kind] | {
        "model_type": kind,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": layer.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": layer.eps,
        **rope_config(config, path),
        "tie_word_embeddings": HEAD not in slots,
        **ids,
        "torch_dtype": "float32" if gguf else weights.stored_dtype,
    }
    if shape.has_gate:
        written["total_ut_steps"] = shape.segments
        written["early_exit_threshold"] = config.get("early_exit_threshold", 1.0)
    return shape, written, weights.generation_config | ids


def rope_config(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, the keys that every release of transformers reads."""
    settings = rope_settings(config, kinds=("default", "llama3", "factors"))
    theta, kind = settings["rope_theta"], settings["rope_type"]
    if kind == "factors":
        raise ValueError(
            f"{path} holds RoPE factors (rope_freqs.weight), which no config.json can say; export the model's "
            f"safetensors folder instead"
        )
    if kind == "default":
        return {"rope_theta": theta}
    keys = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {"rope_theta": theta, "rope_scaling": {key: settings[key] for key in keys}}


def special_ids(weights: Weights, words: Tokenizer | None, shape: Shape, path: Path) -> dict[str, Any]:
    """bos, eos and pad of both configs: eos as one id or the list of all that stop anydepth, pad as the tokenizer's."""
    eos = sorted(all_eos(weights, words, vocab=shape.vocab, path=path))
    given = weights.config | weights.generation_config
    bos, pad = given.get("bos_token_id"), given.get("pad_token_id")
    if words:
        bos = words.bos_id if words.bos_id is not None else bos
        named = words.id_of(words.named_tokens.get("pad_token", words.named_tokens.get("eos_token", "")))
        pad = named if named is not None else pad
    return {
        "bos_token_id": bos,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": eos[0] if pad is None and eos else pad,
    }


def write_weights(weights: Weights, folder: Path) -> None:
    """Safetensors as they are; anything else in float32, in shards of at most SHARD_BYTES and an index."""
    if isinstance(weights, SafetensorsFolder):
        for path in weights.files:
            shutil.copyfile(path, folder / path.name)
        if [path.name for path in weights.files] != ["model.safetensors"]:
            shutil.copyfile(weights.folder / INDEX, folder / INDEX)
        return
    shards = list(split(weights.shapes))
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: whole(weights, name) for name in names}, folder / file, metadata={"format": "pt"})
        (folder / file).chmod((folder / "config.json").stat().st_mode)  # it is the owner's alone otherwise
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(map(float32_bytes, weights.shapes.values()))
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def float32_bytes(shape: tuple[int, ...]) -> int:
    return 4 * torch.Size(shape).numel()


def split(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Names in order, as many together as fit into a shard."""
    names: list[str] = []
    size_bytes = 0
    for name, shape in shapes.items():
        if names and size_bytes + float32_bytes(shape) > SHARD_BYTES:
            yield names
            names, size_bytes = [], 0
        names.append(name)
        size_bytes += float32_bytes(shape)
    yield names


def whole(weights: Weights, name: str) -> Tensor:
    tensor = torch.empty(weights.shapes[name], dtype=torch.float32)
    for start, rows in weights.rows(name):
        copy(rows, tensor[start : start + len(rows)])
    return tensor


def write_tokenizer(weights: Weights, words: Tokenizer, folder: Path, *, max_positions: int) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template, so that AutoTokenizer gives anydepth's ids."""
    config: dict[str, Any] = {"model_max_length": max_positions}
    if isinstance(weights, SafetensorsFolder):
        text = (weights.folder / "tokenizer.json").read_bytes().decode()
        config |= read_json(weights.folder / "special_tokens_map.json")
        config |= read_json(weights.folder / "tokenizer_config.json")
    else:
        text = words.to_json()
    for key in ("auto_map", "chat_template"):
        config.pop(key, None)
    # Other classes rebuild the tokenizer after a pattern of their own; this one takes tokenizer.json as it is.
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": words.add_bos, "padding_side": "left"}
    config.setdefault("clean_up_tokenization_spaces", False)
    config |= words.named_tokens
    if not config.get("pad_token") and "eos_token" in words.named_tokens:
        config["pad_token"] = words.named_tokens["eos_token"]
    (folder / "tokenizer.json").write_bytes(tokenizer_json(text, words).encode())
    write_json(folder / "tokenizer_config.json", config)
    if words.chat_template:
        (folder / "chat_template.jinja").write_text(words.chat_template, encoding="utf-8")


def tokenizer_json(text: str, words: Tokenizer) -> str:
    """The tokenizer's JSON, changed only where it has ids that the model lacks, or its own mind about a BOS."""
    content = json.loads(text)
    vocabulary = content["model"].get("vocab")
    if isinstance(vocabulary, dict) and any(index >= words.vocab_size for index in vocabulary.values()):
        content["model"]["vocab"] = {token: i for token, i in vocabulary.items() if i < words.vocab_size}
        text = json.dumps(content, ensure_ascii=False)
    backend = tokenizers.Tokenizer.from_str(text)
    if backend.encode("", add_special_tokens=True).ids == ([words.bos_id] if words.add_bos else []):
        return text
    backend.post_processor = None
    if words.add_bos:
        assert words.bos_id is not None
        bos = words.named_tokens["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, words.bos_id)]
        )
    edited: str = backend.to_str()
    return edited


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
