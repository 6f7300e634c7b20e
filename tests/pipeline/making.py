"""Tiny checkpoints with heads, manifests over them, and what one engine answers to the same requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from anydepth.engine.engine import Engine
from anydepth.models.attach import load_with_heads
from anydepth.models.heads import ExitHeads, Head, Probe
from anydepth.models.load import weights_hash
from anydepth.pipeline.export import export_segments
from anydepth.pipeline.manifest import Manifest, Stage, read_manifest
from anydepth.pipeline.router import Router
from anydepth.profile import Exit, Profile
from anydepth.types import Output, Sampling
from tests.models.checkpoints import write_folder

VOCABULARY, LAYERS = 61, 4
PROFILE = Profile(
    name="tiny",
    exits=tuple(Exit(layer=n, logit=1.0, margin=0.4, entropy=3.0, probe=0.6) for n in range(1, LAYERS)),
    gate_temperature=2.0,
)
Ask = tuple[list[int], dict[str, Any]]


def made(
    folder: Path, *stages: tuple[Sequence[int], str], heads: bool = False, replicas: int = 1, **options: Any
) -> Manifest:
    """A manifest of (segments, place) stages over a checkpoint of one layer a segment, whose artifacts are in
    folder/parts."""
    last = stages[-1][0][-1]
    changes = {"num_hidden_layers": last, "eos_token_id": [7, 11, 13, 17], **options.pop("changes", {})}
    write_folder(folder / "model", dtype=options.pop("stored", torch.float64), **changes)
    if heads:
        write_heads(folder / "heads", folder / "model", last)
    device = ("cpu",) * replicas
    manifest = Manifest(
        model=str(folder / "model"),
        segments=tuple(range(1, last + 1)),
        readouts=options.pop("readouts", tuple(range(1, last + 1))),
        stages=tuple(Stage(segments=tuple(own), place=place, device=device) for own, place in stages),
        heads=str(folder / "heads") if heads else None,
        replicas=replicas,
        dtype="float64",
        **{"page_size": 4, "kv_pages": 64, "max_batch": 6, "micro_batch": 3, "max_batched_tokens": 8} | options,
    )
    export_segments(manifest, folder / "parts")
    return manifest


def written(path: Path, text: str) -> Manifest:
    path.write_text(text)
    return read_manifest(path)


def write_heads(folder: Path, model: Path, layers: int, *, kept: torch.dtype | None = None) -> None:
    """One head of each kind in turn, and probes, after all layers but the last."""
    draw = torch.Generator().manual_seed(5)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*size, generator=draw, dtype=torch.float64) * scale

    heads = {}
    for layer in range(1, layers):
        kind = ("low_rank", "shortlist", "norm")[layer % 3]
        tensors = {"norm": 1 + normal(32, scale=0.1)}
        if kind != "norm":
            tensors |= {"a": normal(32, 4, scale=0.3), "b": normal(4, 32, scale=0.5)}
        if kind == "shortlist":
            tensors |= {"ids": torch.randperm(61, generator=draw)[:40], "other": normal(32, scale=0.3)}
        heads[layer] = Head(kind, tensors)
    probes = {layer: Probe(normal(32, scale=0.3), normal(1, scale=0.1)) for layer in range(1, layers)}
    model_hash = weights_hash(model.glob("*.safetensors"))
    ExitHeads(model_hash=model_hash, heads=heads, probes=probes, about={}).save(folder, kept)


def asks(rng: Random, count: int, *, segments: int = LAYERS, heads: bool = False, longest: int = 12) -> list[Ask]:
    """Prompts and settings of every kind."""
    found = []
    for _ in range(count):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest))]
        settings: dict[str, Any] = {"max_tokens": rng.randint(1, 8), "logprobs": rng.choice([None, "raw", "processed"])}
        if rng.random() < 0.5:
            settings |= {"temperature": rng.choice([0.7, 1.5]), "seed": rng.getrandbits(60)}
            settings |= {"top_k": rng.choice([None, 3]), "top_p": rng.choice([1.0, 0.9])}
        kinds = ["never", "fixed", "interval", "trace", *(["probe", "confidence"] * 2 if heads else [])]
        match rng.choice(kinds):
            case "fixed":
                settings["depth"] = rng.randint(1, segments)
            case "interval":
                settings |= {"interval": rng.randint(2, 4), "shallow_depth": rng.randint(1, segments - 1)}
            case "trace":
                settings["trace"] = [segments, *(rng.randint(1, segments) for _ in range(7))]
            case "probe" | "confidence" as name:
                low = rng.randint(1, segments)
                settings |= {"exit_policy": name, "min_depth": low, "max_depth": rng.randint(low, segments)}
        if "trace" not in settings and rng.random() < 0.3:
            settings["first_token"] = "policy"
        found.append((prompt, settings))
    return found


def engine_answers(manifest: Manifest, asked: Sequence[Ask], tokenizer: Any = None) -> dict[str, Output]:
    """By id, "0" onwards."""
    segments = list(manifest.segments)
    checkpoint, _ = load_with_heads(manifest.model, manifest.heads, dtype="float64", segments=segments)
    profiles = [PROFILE] if manifest.heads is not None else []
    options = {"fill": manifest.fill, "profiles": profiles, "prefix_sharing": False}  # which a pipeline has not
    engine = Engine(checkpoint.model, tokenizer=tokenizer, eos_ids=checkpoint.eos_ids, **options)
    return outputs_of(engine.run(prepared(engine, asked)))


def router_of(manifest: Manifest, folder: Path, **options: Any) -> Router:
    profiles = [PROFILE] if manifest.heads is not None else []
    return Router(manifest, folder / "parts", profiles=profiles, **options)


def prepared(server: Any, asked: Sequence[Ask]) -> list[Any]:
    return [server.prepare(prompt, Sampling(**ask), id=str(n)) for n, (prompt, ask) in enumerate(asked)]


def outputs_of(chunks: Iterable[Any]) -> dict[str, Output]:
    """Last words by id; each request has one."""
    found: dict[str, Output] = {}
    for chunk in chunks:
        if chunk.output is not None:
            assert chunk.request_id not in found, "answered twice"
            found[chunk.request_id] = chunk.output
    return found


def assert_same(got: Output, wanted: Output) -> None:
    for name in ("token_ids", "depths", "finish_reason", "usage", "text", "logprobs_mode", "prompt_ids"):
        assert getattr(got, name) == getattr(wanted, name), (name, got, wanted)
    assert (got.logprobs is None) == (wanted.logprobs is None)
    if wanted.logprobs is not None:
        assert got.logprobs == pytest.approx(wanted.logprobs, rel=1e-9, abs=1e-9)


def assert_nothing_held(router: Router) -> None:
    """No request, page, slot or waiting position anywhere, once the workers that died are back."""
    router.settle()
    while not router.idle:
        router.step()
    for held in router.stats():
        assert (held["pages"], held["slots"], held["waiting"]) == (0, 0, 0), held
    for replica in router.replicas:
        assert (replica.free_slots, replica.free_pages) == (replica.manifest.max_batch, replica.manifest.pages)
