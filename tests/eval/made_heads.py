"""A random layered model in nano's vocabulary, and a folder of random exit heads for it with two profiles."""

from __future__ import annotations

from pathlib import Path

import torch

from anydepth.models.heads import ExitHeads, Head, Probe
from anydepth.models.load import load_checkpoint

EXITS = (1, 2)  # of four layers, or as many as the model has
EAGER = {"logit": -99.0, "margin": 0.0, "entropy": 99.0, "probe": 0.0}
CAREFUL = {"logit": 1.2, "margin": 0.05, "entropy": 4.5, "probe": 0.5}


def write_profile(path: Path, numbers: dict[str, float], exits: tuple[int, ...] = EXITS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"[[exit]]\nlayer = {layer}\n" + "".join(f"{k} = {v}\n" for k, v in numbers.items()) for layer in exits]
    path.write_text("".join(lines))
    return path


def write_heads(
    folder: Path,
    model: Path,
    *,
    kind: str = "low_rank",
    listed: list[int] | None = None,
    exits: tuple[int, ...] = EXITS,
) -> Path:
    """Heads and probes at these exits, with the profiles `eager` and `careful`. listed: two ids or more of a
    shortlist, whose column "any other" is then never the largest."""
    checkpoint = load_checkpoint(model)
    shape, draw = checkpoint.model.shape, torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw) * 0.3

    def head() -> Head:
        tensors = {"norm": torch.ones(shape.hidden)}
        if kind != "norm":
            tensors |= {"a": normal(shape.hidden, 3), "b": normal(3, shape.hidden)}
        if kind == "shortlist":
            ids = torch.tensor(range(0, shape.vocab, 2) if listed is None else listed)
            columns = checkpoint.model.head[:, ids[:2]]
            tensors |= {"ids": ids, "other": normal(shape.hidden) if listed is None else columns.mean(1)}
        return Head(kind, tensors)

    heads = {layer: head() for layer in exits}
    probes = {layer: Probe(normal(shape.hidden), torch.zeros(1)) for layer in exits}
    ExitHeads(model_hash=checkpoint.model_hash, heads=heads, probes=probes, about={}).save(folder)
    write_profile(folder / "profiles/eager.toml", EAGER, exits)
    write_profile(folder / "profiles/careful.toml", CAREFUL, exits)
    return folder
