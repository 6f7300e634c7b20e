"""Files that are either whole or absent: a training state to resume from, and the folder that others load."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from anydepth.models.ouro import Ouro


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state of tensors and plain values; a kill at any moment leaves the old file or the new one."""
    temporary = path.with_suffix(".partial")
    with temporary.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote. ValueError where the file is none of ours."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} is not a training state ({error}); give one written by `anydepth train`, or "
            "an empty output folder to start anew"
        ) from error
    assert isinstance(state, dict)
    return state


def write_json(path: Path, value: object) -> None:
    """Write JSON, whole or not at all."""
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)


def write_weights(model: Ouro, path: Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write the model's tensors under their released names and shapes as safetensors, whole or not at all."""
    from safetensors.torch import save_file

    tensors = {name: view.detach().contiguous().clone() for name, view in model.slots().items()}
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary, metadata={"format": "pt", **(metadata or {})})
    temporary.replace(path)


def read_model(folder: Path) -> tuple[Ouro, dict[str, Any]]:
    """The looped model of a checkpoint folder in float32 on the CPU, and its config."""
    from safetensors.torch import load_file

    if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
        raise ValueError(
            f"{folder} has no config.json and model.safetensors; give a folder written by `anydepth train loop`"
        )
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") != "ouro":
        raise ValueError(
            f"{folder} holds a model of type {config.get('model_type')!r}; allowed: 'ouro', the only one "
            "with a gate to train"
        )
    model = Ouro(config, dtype=torch.float32, device=torch.device("cpu"))
    tensors = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, view in model.slots().items():
            if name not in tensors or tensors[name].shape != view.shape:
                raise ValueError(f"{folder}/model.safetensors lacks {name} of shape {tuple(view.shape)}")
            view.copy_(tensors[name])
    return model, config
