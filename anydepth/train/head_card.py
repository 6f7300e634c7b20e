"""The model card of trained exit heads, from what heads.json says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_CARD = """---
tags: [early-exit, exit-heads, anydepth]
base_model: {base}
---
# Exit heads for {base}

Small readouts after inner layers of a frozen {base}, and linear probes beside them. They let an answer's easy tokens
leave after fewer layers; the model's own weights are neither changed nor contained.

{use}

## What is in the folder
`heads.safetensors` ({bytes:,} bytes, {numbers:,} numbers in {dtype}) and {others}. Backbone: {hash}; on another one
they are refused.

{table}
{kinds}
`KL`, `agrees` (same likeliest token as full depth) and the probe's figures are measured, teacher-forced, on {held_out}
held-out documents of the data below, after {evaluated}, {rounded}.

## Training
    {command}

Seed {seed}. Knowledge distillation from the model at full depth: forward KL at temperature {temperature:g}{ce}; probes
by logistic regression on whether the exit's likeliest token is full depth's. {steps:,} steps, {answers:,} answer
tokens, {minutes:.0f} minutes. Packages: {packages}, {made_by}.
A killed run goes on to the same numbers; another CPU or another torch may round differently.

## Data
{sources}
{documents:,} documents, {tokens:,} tokens, of which {answer_tokens:,} are answers; {cut} were cut at {max_tokens}
tokens, {left_out} left out. Manifest {data_hash}.

## Licence
The heads are distilled from {base} on the data above. Its licence and the data's apply: keep the attribution that they
ask for, and check that yours allows what you mean to do. {licence}

## Limits
An exit that agrees on this data need not agree on yours: measure it on your own prompts.
"""

_UNCALIBRATED = """    LLM("{base}", heads="FOLDER", profile="NAME", fill="project")

Thresholds at which a token may leave are not part of the heads: `anydepth calibrate` chooses them. Under `fill="full"`,
the default, every layer runs and no work is saved."""

_KINDS = {
    "norm": "`norm`: an RMSNorm of its own, then the model's own unembedding.",
    "low_rank": "`low_rank`: an RMSNorm of its own, a low-rank correction, then the model's own unembedding.",
    "shortlist": "`shortlist`: an RMSNorm of its own, a low-rank correction, then the model's own unembedding of the "
    'most frequent tokens of the data and a column for "any other"; where that is the largest, the head declines and '
    "the token goes on.",
}


def head_card(
    about: Mapping[str, Any],
    *,
    model_hash: str,
    kinds: Mapping[int, str],
    numbers: int,
    file: Path,
    use: str | None = None,
    others: str = "`heads.json`",
) -> str:
    """Markdown. `about` is what `train_heads` writes into heads.json; `numbers` how many the heads hold. `use`: how to
    load them and with which thresholds; `others`: what the folder has beside heads.safetensors."""
    made, data = about["training"], about["data"]
    recipe = made["recipe"]
    dtype = recipe.get("save_dtype", "float32")
    return _CARD.format(
        base=about["base"],
        bytes=file.stat().st_size,
        numbers=numbers,
        hash=model_hash[:16],
        table=_table(kinds, made["evaluation"]),
        kinds="\n".join(_KINDS[kind] for kind in sorted(set(kinds.values()))),
        held_out=made["held_out_documents"],
        evaluated=f"step {made['steps']:,}",
        rounded=_rounded(made, dtype),
        dtype=dtype,
        use=use or _UNCALIBRATED.format(base=about["base"]),
        others=others,
        command=made["command"],
        seed=recipe["seed"],
        temperature=recipe["temperature"],
        ce=f" and {recipe['ce_weight']:g} x cross-entropy" if recipe["ce_weight"] else "",
        steps=made["steps"],
        answers=made["answer_tokens"],
        minutes=made["minutes"],
        packages=", ".join(f"{name} {version}" for name, version in made["packages"].items()),
        made_by=_made_by(made.get("made_by") or {}),
        sources="\n".join(_source(source) for source in data["sources"]),
        data_hash=data["hash"][:16],
        licence=about.get("licence", ""),
        **{key: data[key] for key in ("documents", "tokens", "answer_tokens", "cut", "left_out", "max_tokens")},
    )


def _table(kinds: Mapping[int, str], evaluation: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| after layer | kind | KL, nats | agrees | may answer | probe right | probe AUC |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in evaluation:
        shares = " | ".join(f"{100 * row[key]:.1f} %" for key in ("agreement", "answers", "probe_accuracy"))
        lines.append(f"| {row['exit']} | {kinds[row['exit']]} | {row['kl']:.3f} | {shares} | {row['probe_auc']:.3f} |")
    return "\n".join(lines) + "\n"


def _rounded(made: Mapping[str, Any], dtype: str) -> str:
    """Of which numbers the evaluation is. Trainings of earlier versions did not say: theirs was before rounding."""
    if made.get("evaluated_as") == dtype or dtype == "float32":
        return f"of the numbers as they are stored, in {dtype}"
    return f"in float32, before the numbers were rounded to {dtype}"


def _source(source: Mapping[str, Any]) -> str:
    rows = "all rows" if source["rows"] is None else f"{source['rows']:,} rows by hash ranking"
    whose = "the model's own greedy answers" if source["own_answers"] else "its responses"
    return f"- `{source['path']}` (sha256 {source['sha256'][:16]}), {rows}, {whose}"


def _made_by(source: Mapping[str, Any]) -> str:
    version = f"anydepth {source.get('version', '')}".rstrip()
    if not source.get("commit"):
        return version
    return f"{version} at commit {source['commit'][:12]}{' with changes' if source['dirty'] else ''}"
