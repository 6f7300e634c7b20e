"""A random looped model in nano's vocabulary: everything around the weights is real."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from anydepth.models.nano.tokenizer import EOS, IDS, VOCABULARY, write_tokenizer
from tests.reference.weights import random_weights, tiny_config


def write_random_nano(folder: Path, *, seed: int = 0, loops: int = 4) -> Path:
    """A checkpoint folder that `LLM` loads; its answers are nonsense."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(
        vocab_size=len(VOCABULARY), eos_token_id=IDS[EOS], total_ut_steps=loops, max_position_embeddings=160
    )
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config, seed=seed, dtype=torch.float32), folder / "model.safetensors")
    write_tokenizer(folder)
    return folder
