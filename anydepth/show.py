"""What commands print: streamed answers, tokens coloured by depth, and facts of a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from anydepth.certificate import describe
from anydepth.engine.llm import LLM
from anydepth.models.attach import load_with_heads
from anydepth.models.base import Part
from anydepth.models.heads_about import read_about
from anydepth.profile import profiles_beside
from anydepth.types import Chunk, Output, Sampling

# Shallow to deep, light to dark: told apart by lightness, without colour vision too.
DEPTH_COLOURS = ("#fde725", "#90d743", "#35b779", "#21918c", "#31688e", "#443983", "#440154")


def depth_style(depth: int, segments: int) -> str:
    """Style of a depth among `segments`: the whole scale is used whatever R is, with text that can be read on it."""
    at = round((depth - 1) * (len(DEPTH_COLOURS) - 1) / max(1, segments - 1))
    return f"{'black' if at < len(DEPTH_COLOURS) // 2 else 'white'} on {DEPTH_COLOURS[at]}"


def stream_answers(
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    model: str,
    options: Mapping[str, Any],
    chat: bool,
    show_depth: bool,
) -> list[dict[str, Any]]:
    """Print answers as they come, one after the other; several of them are announced. Returns the outputs as dicts."""
    llm = LLM(model, **options)
    if llm.certificate is not None:
        print(describe(llm.certificate), file=sys.stderr)
    asked: Sequence[Any] = prompts
    if chat:
        asked = llm.chat_ids([[{"role": "user", "content": prompt}] for prompt in prompts])
    console = Console(highlight=False, soft_wrap=True)
    segments = llm.checkpoint.model.shape.segments
    if show_depth and console.is_terminal:
        console.print(_legend(segments))
    _warn_of_unknown(llm, asked)
    several = len(prompts) * sampling.n > 1
    done: list[dict[str, Any]] = []
    held: dict[str, list[Chunk]] = {}
    for chunk in llm.stream(asked, sampling):
        # Answers run together but are printed one after the other: the first unfinished one streams.
        held.setdefault(chunk.request_id, []).append(chunk)
        if chunk.request_id == next(iter(held)):
            _flush(console, held, segments, show_depth, sampling, several, done)
    return done


def _warn_of_unknown(llm: LLM, prompts: Sequence[Any]) -> None:
    """A word-level model answers anything; say so when it has never seen the words."""
    unknown_id = llm.tokenizer.id_of("<unk>") if llm.tokenizer else None
    for prompt in prompts:
        ids = llm.engine.requests.prompt_ids(prompt)
        if count := sum(token == unknown_id for token in ids):
            print(f"anydepth: {count} of {len(ids)} prompt tokens are unknown to this model", file=sys.stderr)


def _flush(
    console: Console,
    held: dict[str, list[Chunk]],
    segments: int,
    show_depth: bool,
    sampling: Sampling,
    several: bool,
    done: list[dict[str, Any]],
) -> None:
    while held:
        request_id, chunks = next(iter(held.items()))
        for chunk in chunks:
            _print_chunk(console, chunk, segments, show_depth, sampling)
            if chunk.output is not None:
                console.print(_footer(chunk.output, several))
                done.append(asdict(chunk.output))
        ended = bool(chunks) and chunks[-1].finish_reason is not None
        held[request_id] = []
        if not ended:
            return
        del held[request_id]


def _print_chunk(console: Console, chunk: Chunk, segments: int, show_depth: bool, sampling: Sampling) -> None:
    piece = chunk.text if chunk.text is not None else f"{chunk.token_id} "
    if piece:
        shown = show_depth and chunk.depth is not None
        style = depth_style(chunk.depth, segments) if shown else ""  # type: ignore[arg-type]
        # Where there are no colours (a file, a pipe) the depth stands behind the token.
        mark = f"/{chunk.depth}" if shown and not console.is_terminal else ""
        console.print(Text(piece + mark, style=style), end="")
    if sampling.logprobs and chunk.logprob is not None:
        console.print(Text(f"[{chunk.logprob:.3f}]", style="dim"), end="")
    sys.stdout.flush()


def _footer(output: Output, several: bool) -> Text:
    usage = output.usage
    # The first token is read off the prompt's full-depth prefill and is not counted.
    mean = f", mean depth {usage.segments_read / usage.decode_tokens:.2f}" if usage.decode_tokens else ""
    tokens = f"{usage.output_tokens} token{'s' * (usage.output_tokens != 1)}"
    name = f"prompt {output.prompt_index}, answer {output.answer_index}: " if several else ""
    return Text(f"\n[{name}{tokens}{mean}, {output.finish_reason}]", style="dim")


def _legend(segments: int) -> Text:
    legend = Text("depth ")
    for depth in range(1, segments + 1):
        legend.append(f" {depth} ", style=depth_style(depth, segments))
    return legend


def print_info(model: str, heads: Path | None = None) -> dict[str, Any]:
    """Print and return the facts of a checkpoint, and of exit heads for it."""
    checkpoint, head_hash = load_with_heads(model, heads, segments=None)
    shape = checkpoint.model.shape
    costs: list[tuple[Part, int]] = [("embed", 1), ("segment", 1), ("readout", shape.segments), ("copy", 1)]
    costs += [("signal", 1)] if shape.has_gate else []
    exits = {k: str(shape.segment_layers[k - 1].stop) for k in sorted(shape.headed | shape.probed)}
    parts = {str(part): checkpoint.model.cost(part, k, 256)._asdict() for part, k in costs}
    for k in sorted(shape.headed):
        parts[f"exit {exits[k]}"] = checkpoint.model.cost("readout", k, 256)._asdict()
    for k in sorted(shape.probed):
        parts[f"probe {exits[k]}"] = checkpoint.model.cost("signal", k, 256)._asdict()
    facts: dict[str, Any] = {
        "name": checkpoint.name,
        "kind": "looped" if shape.shared_weights else "layered",
        "segments": shape.segments,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": f"{shape.heads} query, {shape.kv_heads} key/value, size {shape.head_dim}",
        "vocabulary": shape.vocab,
        "length": shape.max_positions,
        "exit gate": shape.has_gate,
        "weights": sum(slot.numel() for slot in checkpoint.model.slots().values()),
        "stop ids": sorted(checkpoint.eos_ids),
        "model sha256": checkpoint.model_hash,
        "tokenizer sha256": checkpoint.tokenizer_hash,
    }
    if heads is not None:
        kinds = read_about(heads)["exits"].items()
        facts["exit heads"] = [f"{kind} after {layer}" for layer, kind in kinds if kind is not None]
        facts["probes after"] = [int(exits[k]) for k in sorted(shape.probed)]
        facts["profiles"] = profiles_beside(heads)
        facts["heads sha256"] = head_hash
    console = Console(highlight=False, soft_wrap=True)
    for name, value in facts.items():
        said = ", ".join(map(str, value)) if isinstance(value, list) else value
        console.print(f"{name:18} {said}")
    console.print("cost of a row at 256 positions of context (FLOPs, bytes, weight bytes a turn):")
    for part, cost in parts.items():
        console.print(f"  {part:16} " + "  ".join(f"{value:12,.0f}" for value in cost.values()))
    return facts | {"cost_at_256": parts}
