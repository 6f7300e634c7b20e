"""Which prompts thresholds are fitted on, and which they are certified on."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from anydepth.record import files_hash
from anydepth.train.head_data import Source
from anydepth.train.prepared import held_out


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Two sets of prompts that share none, in one fixed order, and the files they are from."""

    fit: tuple[str, ...]
    certify: tuple[str, ...]
    sources: tuple[dict[str, Any], ...]


def prompt_id(prompt: str) -> str:
    """sha256 (hex) of a prompt: the id of its question."""
    return hashlib.sha256(prompt.encode()).hexdigest()


def choose_prompts(
    sources: Sequence[Source],
    *,
    trained_on: Collection[str],
    seed: int = 0,
    fit_share: float = 1 / 3,
    limit: int | None = None,
) -> Prompts:
    """Prompts of JSONL files on which no head was trained, split by a hash of (seed, prompt).

    `trained_on`: sha256 of the files that the heads were trained on; of such a file only the prompts that training held
    out are taken, other files wholly. `limit`: the first n of them all by hash ranking.
    ValueError: no prompt left, or a share that leaves one of the sets empty. (A Source refuses test questions.)
    """
    if not 0 < fit_share < 1:
        raise ValueError(f"fit_share is {fit_share}; allowed: numbers above 0 and below 1")
    kept, described = dict[str, str](), []
    for source in sources:
        sha256 = files_hash([source.path]) if source.path.is_file() else None
        prompts = [prompt for prompt, _ in source.read()]
        if sha256 in trained_on:
            prompts = [prompt for prompt in prompts if held_out(prompt)]
        new = {prompt_id(prompt): prompt for prompt in prompts} | kept
        described.append(
            {"file": source.path.name, "sha256": sha256, "rows": source.rows, "usable": len(new) - len(kept)}
        )
        kept = new
    chosen = [kept[id] for id in sorted(sorted(kept, key=_rank)[:limit])]
    fit = [prompt for prompt in chosen if _place(seed, prompt) < fit_share]
    certify = [prompt for prompt in chosen if _place(seed, prompt) >= fit_share]
    if not fit or not certify:
        raise ValueError(
            f"{len(chosen)} prompts are left that the heads were not trained on, {len(fit)} to fit on and "
            f"{len(certify)} to certify on; give more data"
        )
    return Prompts(fit=tuple(fit), certify=tuple(certify), sources=tuple(described))


def question_ids(prompts: Iterable[str]) -> list[str]:
    return [prompt_id(prompt) for prompt in prompts]


def _rank(id: str) -> str:
    """By a hash of its own: which prompts training held out goes by the lowest ids."""
    return hashlib.sha256(f"limit:{id}".encode()).hexdigest()


def _place(seed: int, prompt: str) -> float:
    """Where in [0, 1) a prompt falls under a seed."""
    return int.from_bytes(hashlib.sha256(f"calibrate {seed} {prompt}".encode()).digest()[:8], "big") / 2**64
