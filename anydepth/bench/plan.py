"""What a bench runs, checked: cells, prompts and answer lengths, concurrencies, a load of arrivals."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from anydepth.bench.arrivals import Load
from anydepth.bench.drive import closed_loop, settle_on
from anydepth.bench.throughput import PAGE_SIZE, Cell, matched_requests
from anydepth.dtypes import dtype_name
from anydepth.engine.engine import Engine
from anydepth.engine.philox import derive
from anydepth.engine.signals import load_mode
from anydepth.exits.load import policy_name
from anydepth.models.load import Checkpoint
from anydepth.ops.fill import load_fill
from anydepth.provenance import provenance
from anydepth.types import Sampling

LEAST_REPETITIONS = 3
REQUESTS_PER_SLOT, LEAST_REQUESTS = 4, 16
OPEN = "arrivals"  # the open loop's block


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that decides what is run. `lengths`: tokens of each prompt's answer in every cell. `heads`: folder and hash
    of the exit heads through which the model is read."""

    checkpoint: Checkpoint
    cells: tuple[Cell, ...]
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...] = ()
    concurrency: tuple[int, ...]
    requests: int | None
    repetitions: int
    load: Load | None
    max_batch: int
    seed: int
    heads: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        names = [cell.name for cell in self.cells]
        if not names or policy_name(self.cells[0].sampling) != "never":
            raise ValueError(
                f"the first cell is {names[0] if names else 'missing'}; speed-ups and bounds are over never: "
                f"put a cell first whose policy is never"
            )
        if len(set(names)) < len(names):
            raise ValueError(f"the cells are {', '.join(names)}; give each a name of its own")
        if not self.prompts:
            raise ValueError("there are no prompts; give at least one")
        if any(c < 1 for c in self.concurrency) or len(set(self.concurrency)) < len(self.concurrency):
            raise ValueError(f"concurrency is {list(self.concurrency)}; allowed: different whole numbers from 1")
        if not self.concurrency and self.load is None:
            raise ValueError("there is nothing to run; give a concurrency, or arrivals")
        if self.requests is not None and self.requests < 1:
            raise ValueError(f"requests is {self.requests}; allowed: whole numbers from 1")
        if self.repetitions < LEAST_REPETITIONS:
            raise ValueError(f"repetitions is {self.repetitions}; allowed: whole numbers from {LEAST_REPETITIONS}")

    @property
    def blocks(self) -> list[tuple[str, int | None]]:
        """(name, concurrency) of every block; the open loop comes last."""
        return [(f"closed-{c}", c) for c in self.concurrency] + [(OPEN, None)] * (self.load is not None)

    def requests_at(self, concurrency: int) -> int:
        """Requests of a run: where nothing is said 16, 32, 128 at 1, 8, 32."""
        return self.requests or max(LEAST_REQUESTS, REQUESTS_PER_SLOT * concurrency)

    def indices(self, concurrency: int) -> list[int]:
        """Which prompt each request of a run has: the prompts in turn."""
        return [i % len(self.prompts) for i in range(self.requests_at(concurrency))]

    def shuffle(self, block: str) -> random.Random:
        return random.Random(f"{self.seed} {block}")

    @property
    def timed(self) -> int:
        """How many of the prompts a closed loop asks."""
        return max((min(len(self.prompts), self.requests_at(c)) for c in self.concurrency), default=0)

    @property
    def prompts_hash(self) -> str:
        ids = json.dumps([list(prompt) for prompt in self.prompts], separators=(",", ":"))
        return hashlib.sha256(ids.encode()).hexdigest()

    def settings(self) -> dict[str, Any]:
        model = self.checkpoint.model
        return {
            "model": self.checkpoint.name,
            "dtype": dtype_name(model.dtype),
            "device": model.device.type,
            "threads": torch.get_num_threads(),
            "segments": model.shape.segments,
            **({} if self.heads is None else {"heads": self.heads[0], "head_hash": self.heads[1]}),
            "cells": [self._cell(cell) for cell in self.cells],
            "baseline": self.cells[0].name,
            "concurrency": list(self.concurrency),
            "requests": [self.requests_at(c) for c in self.concurrency],
            "repetitions": self.repetitions,
            "prompts": len(self.prompts),
            "prompt_ids_sha256": self.prompts_hash,
            "lengths": list(self.lengths),
            "arrivals": None if self.load is None else {**self.load.facts(), "max_batch": self.max_batch},
            "seed": self.seed,
        }

    def _cell(self, cell: Cell) -> dict[str, Any]:
        """Name, fill, signals that are late, policy, and what else of its Sampling is not a default."""
        plain = Sampling()
        used = {f.name: getattr(cell.sampling, f.name) for f in fields(Sampling) if f.name != "exit_policy"}
        shape = self.checkpoint.model.shape
        fill = load_fill(cell.fill, shape)
        mode, lateness = load_mode(cell.signals, cell.lateness, fill, shape)
        return {
            "name": cell.name,
            "fill": fill.name,
            **({} if mode.name == "sync" else {"signals": mode.name, "lateness": lateness}),
            "policy": policy_name(cell.sampling),
            **{name: value for name, value in used.items() if value != getattr(plain, name)},
            **({} if cell.profile is None else {"profile": cell.profile.name, "profile_hash": cell.profile.hash}),
        }

    def provenance(self, task: Mapping[str, Any] | None) -> dict[str, Any]:
        checkpoint, heads = self.checkpoint, {} if self.heads is None else {"head_hash": self.heads[1]}
        return provenance(
            threads=torch.get_num_threads(),
            seed=self.seed,
            model={"name": checkpoint.name, "hash": checkpoint.model_hash, **heads},
            tokenizer={"hash": checkpoint.tokenizer_hash},
            task=None if task is None else dict(task),
        )


def natural_lengths(plan: Plan) -> tuple[int, ...]:
    """Tokens of the first cell's own answer to each prompt that is timed, the ending one included."""
    checkpoint, cell, slots = plan.checkpoint, plan.cells[0], max(plan.concurrency)
    engine = Engine(
        checkpoint.model,
        tokenizer=checkpoint.tokenizer,
        eos_ids=checkpoint.eos_ids,
        **cell.options,
        max_batch=slots,
        page_size=PAGE_SIZE,
    )
    own = plan.seed if cell.sampling.seed is None else cell.sampling.seed
    requests = [
        engine.prepare(prompt, replace(cell.sampling, n=1), seed=derive(own, index, 0), streaming=False)
        for index, prompt in enumerate(plan.prompts[: plan.timed])
    ]
    seen = closed_loop(engine, requests, concurrency=slots, settle=settle_on(checkpoint.model.device))
    return tuple(len(seen.outputs[request.id].token_ids) for request in requests)


def check_requests(plan: Plan) -> None:
    """ValueError for a cell that cannot answer what will be asked."""
    asks = list(zip(plan.prompts[: plan.timed], plan.lengths, strict=True))
    if plan.load is not None:
        asks += [((0,) * arrival.prompt_tokens, arrival.output_tokens) for arrival in plan.load.arrivals]
    pages = max(len(prompt) + length for prompt, length in asks) // PAGE_SIZE + 1
    for cell in plan.cells:
        try:
            engine = Engine(plan.checkpoint.model, **cell.options, max_batch=1, page_size=PAGE_SIZE, kv_pages=pages)
            matched_requests(engine, cell, *zip(*asks, strict=True), seed=plan.seed)
        except ValueError as error:
            raise ValueError(f"cell {cell.name!r}: {error}") from error
