"""A tiny layered model with trained heads, and tables of made-up numbers."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np

from anydepth.calibrate.table import Table
from anydepth.models.load import load_checkpoint
from anydepth.train.head_data import Source, prepare
from anydepth.train.head_recipe import HeadRecipe
from anydepth.train.heads import train_heads
from tests.models.checkpoints import WORDS, write_folder, write_tokenizer

EXITS = (1, 2, 3)
RECIPE = HeadRecipe(
    exits=EXITS, kinds=("shortlist", "low_rank", "norm"), fit=0, rank=4, shortlist=9, tokens=200, steps=4, warmup=2
)


def quiet(line: str) -> None:
    """Report nothing."""


def write_prompts(path: Path, count: int, seed: int = 0, **response: str) -> Path:
    draw = Random(seed)
    prompts = {" ".join(draw.choices("abcdefghi", k=4 + draw.randrange(6))) for _ in range(2 * count)}
    path.write_text("".join(json.dumps({"prompt": prompt, **response}) + "\n" for prompt in sorted(prompts)[:count]))
    return path


def write_model(folder: Path) -> Path:
    """A model folder, with heads in folder/heads that were trained on folder/rows.jsonl."""
    write_folder(folder, vocab_size=len(WORDS), max_position_embeddings=64, num_hidden_layers=4)
    write_tokenizer(folder)
    write_prompts(folder / "rows.jsonl", 120, response="a b c d e f g")
    checkpoint = load_checkpoint(folder)
    data = prepare(folder / "data", [Source(path=folder / "rows.jsonl")], checkpoint, max_tokens=60, report=quiet)
    train_heads(folder / "heads", checkpoint, data, RECIPE, report=quiet)
    return folder


def table(seed: int = 0, *, rows: int = 400, exits: int = 3, questions: int = 20) -> Table:
    """Random scores, coarse enough for ties, that say something about agreement."""
    draw = np.random.default_rng(seed)
    size = (rows, exits)
    agrees = draw.random(size) < np.linspace(0.5, 0.9, exits)

    def score(skill: float) -> np.ndarray:
        return np.round(draw.normal(size=size) + skill * agrees, 1)

    return Table(
        layers=tuple(range(5, 5 * exits + 1, 5)),
        temperature=1.0,
        questions=questions,
        question_R=np.sort(draw.integers(0, questions, rows)),
        logit_RE=score(1.0),
        margin_RE=score(2.0),
        entropy_RE=-score(1.5),
        probe_RE=1 / (1 + np.exp(-score(2.0))),
        agrees_RE=agrees,
        answers_RE=draw.random(size) < 0.9,
    )
