"""Looped pretraining of nano in one run: curriculum (A), the full task (B), robustness to copied K/V (C).

Phases change by accuracy and step counts, never by the clock, and every micro-batch is a function of (seed, phase,
step, index): a run that was killed resumes to the weights it would have had.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from anydepth.models.nano.tokenizer import VOCABULARY, write_tokenizer
from anydepth.train import checkpoint, data
from anydepth.train.card import card, token_ratios
from anydepth.train.muon import Muon
from anydepth.train.objective import stage_one, token_weights
from anydepth.train.parallel import Peers, with_peers
from anydepth.train.recipe import Recipe, initial_model, matrices, others, parameters
from anydepth.train.schedule import Progress, lr_factor, next_place, steps_left

MICRO_BATCHES = 2
_REPORT_EVERY = 10


def train_loop(
    out: Path,
    *,
    seed: int = 0,
    copied_kv: bool = True,
    processes: int = 2,
    recipe: Recipe | None = None,
    start_from: Path | None = None,
    resume: bool = True,
    report: Callable[[str], None] = print,
) -> Path:
    """Train a nano into the folder `out` and return it; the gate is Stage I's, `train_gate` fits the real one.

    `copied_kv=False` replaces phase C's random exits by the same number of ordinary steps (nano-plain). Phases A and B
    do not read that flag, so `start_from` may name the `state-b.pt` that another run of the same seed left behind.
    `processes` 1 or 2 decides who computes the two micro-batches of a step, not what comes out. With `resume` a state
    in `out` is continued. Progress lines go to `report`.

    ValueError: a bad argument, or a state in `out` of another seed or recipe. RuntimeError: the curriculum did not
    leave its first level in time; another seed will.
    """
    if processes not in (1, MICRO_BATCHES):
        raise ValueError(f"processes is {processes}; allowed: 1 or {MICRO_BATCHES}, the micro-batches of a step")
    out.mkdir(parents=True, exist_ok=True)
    job = Job(
        out=str(out),
        seed=seed,
        copied_kv=copied_kv,
        recipe=recipe or Recipe(),
        resume=resume,
        start_from=None if start_from is None else str(start_from),
    )
    if not resume:
        # Or a kill before the first save would bring the old run back.
        (out / "state.pt").unlink(missing_ok=True)
    # Fails here, before a second process starts, where the state cannot be continued.
    progress = Trainer(job).progress
    if progress.tokens:
        report(f"going on from phase {progress.phase}, step {progress.step}")
    with_peers(_run, job, processes=processes, report=report)
    return out


@dataclass(frozen=True, kw_only=True)
class Job:
    """The arguments of a run, as every process gets them."""

    out: str
    seed: int
    copied_kv: bool
    recipe: Recipe
    resume: bool
    start_from: str | None


def _run(job: Job, peers: Peers, report: Callable[[str], None]) -> None:
    trainer = Trainer(job)
    peers.wait()
    if trainer.progress.phase == "done" and (Path(job.out) / "model.safetensors").exists():
        # Writing it again would undo a gate that was fitted since.
        report(f"{job.out} holds the finished model already")
        return
    began, before = time.monotonic(), trainer.progress.seconds
    while trainer.progress.phase != "done":
        phase, started, tokens = trainer.progress.phase, time.monotonic(), trainer.progress.tokens
        trainer.step(peers)
        now = trainer.progress = replace(trainer.progress, seconds=before + time.monotonic() - began)
        if peers.rank:
            continue
        if now.step % _REPORT_EVERY == 0 or now.phase != phase:
            rate = (now.tokens - tokens) / (time.monotonic() - started)
            report(trainer.line(tokens_per_s=rate))
        if now.phase != phase or now.step % job.recipe.save_every == 0:
            trainer.save(Path(job.out) / "state.pt")
            if (phase, now.phase) == ("B", "C"):
                trainer.save(Path(job.out) / "state-b.pt")
    if peers.rank == 0:
        trainer.export()


class Trainer:
    """One process's model, optimisers and position in the run."""

    def __init__(self, job: Job) -> None:
        self.job, self.recipe = job, job.recipe
        self.model = initial_model(self.recipe, seed=job.seed)
        self.parameters = parameters(self.model)
        self.muon = Muon(matrices(self.model), lr=0.0)
        self.adam = torch.optim.AdamW(others(self.model), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
        self.progress = Progress(accuracy=(0.0,) * self.recipe.loops)
        self.loss = 0.0
        state, start = Path(job.out) / "state.pt", job.start_from
        if job.resume and state.exists():
            self.load(state)
        elif start is not None:
            self.load(Path(start))

    def step(self, peers: Peers) -> None:
        """One optimiser step over two micro-batches, and the move to the next level or phase where it is due."""
        flat = torch.stack([self._micro(index) for index in range(peers.rank, MICRO_BATCHES, peers.count)]).sum(0)
        peers.sum(flat)
        sizes = [tensor.numel() for tensor in self.parameters]
        gradient, stats = flat.split([sum(sizes), len(flat) - sum(sizes)])
        gradient /= MICRO_BATCHES
        gradient *= min(1.0, self.recipe.clip / (float(gradient.norm()) + 1e-6))
        for tensor, grad in zip(self.parameters, gradient.split(sizes), strict=True):
            tensor.grad = grad.view(tensor.shape)
        self._optimise()
        self._advance(stats)

    def _micro(self, index: int) -> Tensor:
        """Gradient of one micro-batch and its counts, one flat tensor: [weights + tokens, loss, asked_R, right_R]."""
        r, now = self.recipe, self.progress
        rng = Random(f"{self.job.seed} {now.phase} {now.step} {index}")
        rows = (
            data.curriculum_rows(rng, rows=r.rows, level=now.level)
            if now.phase == "A"
            else data.mixed_rows(rng, rows=r.rows, why_rows=r.why_rows, asked=r.asked)
        )
        leave_early = now.phase == "C" and self.job.copied_kv and rng.random() < 0.5
        chunks = data.collate_sorted(rows, rows_per_chunk=r.rows_per_chunk)
        weight = sum(float(token_weights(chunk, computed_weight=r.computed_weight).sum()) for chunk in chunks)
        answers = sum(len(chunk.answer_A) for chunk in chunks)
        for tensor in self.parameters:
            tensor.grad = None
        stats = torch.zeros(2 + 2 * r.loops)
        for chunk in chunks:
            depths = random_exits(chunk, rng, loops=r.loops, full_depth=r.full_depth) if leave_early else None
            # Weights are normalised to a mean of 1; the entropy term is a plain mean, hence the two divisors.
            loss = stage_one(
                self.model,
                chunk,
                computed_weight=r.computed_weight,
                entropy=r.entropy * weight / answers,
                exit_depths_BT=depths,
            )
            (loss.total / weight).backward()
            stats += torch.cat(
                (torch.tensor([chunk.tokens, float(loss.total.detach()) / weight]), loss.asked_R, loss.right_R)
            )
        grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in self.parameters]
        return torch.cat([*(grad.reshape(-1) for grad in grads), stats])

    def _optimise(self) -> None:
        factor = lr_factor(self.recipe, self.progress)
        self.muon.lr = self.recipe.muon_lr * factor
        for group in self.adam.param_groups:
            group["lr"] = self.recipe.adam_lr * factor
        self.muon.step()
        self.adam.step()

    def _advance(self, stats: Tensor) -> None:
        loops = self.recipe.loops
        tokens, loss, asked, right = stats[0], stats[1], stats[2 : 2 + loops], stats[2 + loops :]
        self.loss = float(loss) / MICRO_BATCHES
        accuracy = tuple(
            0.9 * old + 0.1 * float(r / n) if n > 0 else old
            for old, r, n in zip(self.progress.accuracy, right, asked, strict=True)
        )
        now = replace(
            self.progress,
            step=self.progress.step + 1,
            level_steps=self.progress.level_steps + 1,
            accuracy=accuracy,
            tokens=self.progress.tokens + int(tokens),
        )
        self.progress = next_place(self.recipe, now)

    def line(self, *, tokens_per_s: float) -> str:
        """One line of progress."""
        p = self.progress
        depths = " ".join(f"{100 * a:.1f}" for a in p.accuracy)
        left = steps_left(self.recipe, p) * p.seconds / max(1, sum(p.steps) + p.step)
        return (
            f"phase {p.phase} step {p.step} level {p.level} | loss {self.loss:.4f} | numbers right by depth, %: "
            f"{depths} | {tokens_per_s:.0f} tokens/s | {p.seconds / 60:.1f} min, at most {left / 60:.0f} to go"
        )

    def save(self, path: Path) -> None:
        """Write everything a resumed run needs; random state is none of it, batches depend on the step alone."""
        checkpoint.save_state(
            path,
            {
                "version": 1,
                "seed": self.job.seed,
                "copied_kv": self.job.copied_kv,
                "recipe": self.recipe.as_json(),
                "progress": asdict(self.progress),
                "weights": [tensor.detach() for tensor in self.parameters],
                "muon": self.muon.state_dict(),
                "adam": self.adam.state_dict(),
            },
        )

    def load(self, path: Path) -> None:
        """Continue from a state. ValueError where it belongs to another run."""
        state = checkpoint.load_state(path)
        self._check(path, state)
        self.progress = Progress(**state["progress"])
        with torch.no_grad():
            for tensor, saved in zip(self.parameters, state["weights"], strict=True):
                tensor.copy_(saved)
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])

    def _check(self, path: Path, state: dict[str, Any]) -> None:
        wanted = {"seed": self.job.seed, "recipe": self.recipe.as_json()}
        # Before phase C the flag has had no influence, so a state of either kind will do.
        if state["progress"]["phase"] in ("C", "done") and state["progress"]["step"] > 0:
            wanted["copied_kv"] = self.job.copied_kv
        for name, value in wanted.items():
            if state[name] != value:
                raise ValueError(
                    f"{path} was made with {name} = {state[name]!r}, this run has {value!r}; give the "
                    "same, or another output folder"
                )

    def export(self) -> None:
        """Write the folder that models are loaded from, and the facts of the run beside it."""
        out, p = Path(self.job.out), self.progress
        checkpoint.write_json(out / "config.json", self.recipe.config())
        checkpoint.write_json(
            out / "generation_config.json", {"eos_token_id": self.recipe.config()["eos_token_id"], "do_sample": False}
        )
        write_tokenizer(out)
        checkpoint.write_weights(self.model, out / "model.safetensors")
        packages = {name: importlib.metadata.version(name) for name in ("torch", "safetensors", "tokenizers")}
        facts = {
            "seed": self.job.seed,
            "copied_kv": self.job.copied_kv,
            "phase_steps": dict(zip("ABC", p.steps, strict=True)),
            "level_steps": list(p.levels),
            "tokens": p.tokens,
            "minutes": round(p.seconds / 60, 1),
            "parameters": sum(tensor.numel() for tensor in self.parameters),
            "packages": packages,
            "recipe": self.recipe.as_json(),
        }
        checkpoint.write_json(out / "training.json", facts)
        (out / "README.md").write_text(card(facts, vocab=len(VOCABULARY), ratios=token_ratios()))


def random_exits(batch: data.Batch, rng: Random, *, loops: int, full_depth: float) -> Tensor:
    """[B, T] int64: `loops`, but at answer positions with probability 1 - `full_depth` uniform in 1..loops."""
    random = torch.Generator().manual_seed(rng.getrandbits(62))
    count = len(batch.answer_A)
    drawn = torch.randint(1, loops + 1, (count,), generator=random)
    keep = torch.rand(count, generator=random) < full_depth
    depths = torch.full(batch.ids_BT.shape, loops)
    depths.view(-1)[batch.answer_A] = torch.where(keep, loops, drawn)
    return depths
