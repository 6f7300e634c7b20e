"""Exit heads and profiles for a checkpoint that is loaded: what `LLM(heads=, profile=)` means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from anydepth.models.heads import check_backbone, load_heads
from anydepth.models.heads_about import read_about
from anydepth.models.llama import Llama
from anydepth.models.load import Checkpoint, load_checkpoint, open_weights, weights_hash
from anydepth.models.locate import locate
from anydepth.profile import Profile, profile_path


def load_with_heads(
    name: str | Path, heads: str | Path | None, *, segments: int | Sequence[int] | None, **options: Any
) -> tuple[Checkpoint, str | None]:
    """`load_checkpoint`, and with `heads` a model that is read through them, whose segments end where they read unless
    `segments` says more; the hash of the heads' file. ValueError for a looped model."""
    if heads is None:
        return load_checkpoint(name, segments=segments, **options), None
    about = read_about(heads)
    exits = sorted(map(int, about["exits"]))
    try:
        checkpoint = load_checkpoint(name, segments=exits if segments is None else segments, **options)
    except ValueError as error:
        weights = open_weights(locate(name, revision=options.get("revision")).path)
        layers = weights.config.get("num_hidden_layers")
        if isinstance(layers, int) and exits[-1] > layers:  # of a deeper model: that is what to say
            check_backbone(heads, about, weights_hash(weights.files))
        raise ValueError(f"with the exit heads in {heads}: {error}") from error
    model = checkpoint.model
    assert isinstance(model, Llama), "segments= is refused for all others"
    found = load_heads(
        heads, model_hash=checkpoint.model_hash, shape=model.shape, unembedding_dV=model.head, dtype=model.dtype
    )
    model.attach(found)
    return checkpoint, found.hash


def read_profiles(
    names: str | Path | Sequence[str | Path],
    heads: str | Path | None,
    *,
    model_hash: Callable[[], str],
    head_hash: str | None,
) -> list[Profile]:
    """Profiles by path, or by name in the folder of the heads. ValueError for ones of another model or other heads."""
    found = []
    for name in [names] if isinstance(names, str | Path) else names:
        profile = Profile.read(profile_path(name, heads))
        if profile.model_hash is not None or profile.head_hash is not None:
            profile.check_hashes(model_hash=model_hash(), head_hash=head_hash)
        found.append(profile)
    return found
