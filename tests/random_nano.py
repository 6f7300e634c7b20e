"""A random model in nano's vocabulary: everything around the weights is real."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from anydepth.models.nano.tokenizer import EOS, IDS, VOCABULARY, write_tokenizer
from anydepth.reference.weights import random_weights, tiny_config


def write_random_nano(folder: Path, *, kind: str = "looped", seed: int = 0, loops: int = 4) -> Path:
    """A checkpoint folder that `LLM` loads; its answers are nonsense. kind "layered": an ordinary model, no gate."""
    folder.mkdir(parents=True, exist_ok=True)
    depth = {"total_ut_steps": loops} if kind == "looped" else {}
    config = tiny_config(kind, vocab_size=len(VOCABULARY), eos_token_id=IDS[EOS], max_position_embeddings=160, **depth)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config, seed=seed, dtype=torch.float32), folder / "model.safetensors")
    write_tokenizer(folder)
    return folder
