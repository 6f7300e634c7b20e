"""Exit heads for a frozen layered model, distilled from its full depth, with probes beside them.

Every micro-batch is a function of (seed, index) and sums run in one order: a run that was killed goes on from its last
saved state to the heads it would have had.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anydepth.dtypes import DTYPES
from anydepth.models.heads_about import ABOUT, FILE, read_about
from anydepth.models.llama import Llama
from anydepth.models.load import Checkpoint
from anydepth.provenance import source
from anydepth.record import files_hash, write_atomically
from anydepth.train.head_card import head_card
from anydepth.train.head_log import Log
from anydepth.train.head_recipe import HeadRecipe
from anydepth.train.head_trainer import HeadTrainer, Step
from anydepth.train.parallel import Peers
from anydepth.train.prepared import Prepared

STATE, CARD = "state.pt", "README.md"
_REPORT_EVERY = 10
Peak = Callable[[Llama], float]  # FLOP/s of one process, measured now


def train_heads(
    out: Path,
    checkpoint: Checkpoint,
    data: Prepared,
    recipe: HeadRecipe,
    *,
    resume: bool = True,
    peak: Peak | None = None,
    peers: Peers | None = None,
    command: str = "",
    licence: str = "",
    report: Callable[[str], None] = print,
) -> Path:
    """Train heads and probes into the folder `out`, and return it: heads.safetensors, heads.json, README.md, and of the
    run state.pt, steps.csv and evaluations.csv. With `resume` a state in `out` is continued; a finished one is stored
    anew if it lies there with another `save_dtype`.

    `peak` measures what this machine can do; with it every step's bound (FLOPs / peak) stands beside its time.
    `command` and `licence` go into the card. ValueError: a model that is not layered, a recipe that does not fit it, a
    state of another run, a loss that is no number (the last saved state stays).
    """
    peers = peers or Peers(rank=0, count=1)
    trainer = HeadTrainer(checkpoint, data, recipe, peers)
    if peers.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        if not resume:
            (out / STATE).unlink(missing_ok=True)
    peers.wait()
    if (out / STATE).exists():
        trainer.load(out / STATE)
        report(f"going on from step {trainer.progress.step} of {recipe.steps}")
    finished = trainer.progress.step >= recipe.steps and _finished(out, recipe)
    peers.wait()  # the first process may write what the others still look at
    if finished:
        report(f"{out} holds the finished heads already")
        return out
    run = _Run(out, trainer, peak, report) if peers.rank == 0 else None
    while trainer.progress.step < trainer.recipe.steps:
        step = trainer.step()
        if run is not None:
            run.after(step)
    if run is not None:
        _export(out, trainer, run.evaluate(), command=command, licence=licence)
        run.log.close()
        report(f"heads of {len(recipe.exits)} exits are in {out}")
    peers.wait()
    return out


def _export(
    out: Path, trainer: HeadTrainer, evaluation: Sequence[Mapping[str, Any]], *, command: str, licence: str
) -> None:
    """Write the folder that engines load, with its card."""
    data, now, name = trainer.data, trainer.progress, trainer.checkpoint.name
    keys = ("sources", "documents", "tokens", "answer_tokens", "cut", "left_out", "max_tokens", "own_answers")
    packages = {name: importlib.metadata.version(name) for name in ("torch", "safetensors", "tokenizers")}
    about = {
        "base": Path(name).name if Path(name).exists() else name,
        "licence": licence,
        "data": {"hash": data.hash, **{key: data.manifest[key] for key in keys}},
        "training": {
            "command": command,
            "dtype": trainer.dtype,
            "recipe": trainer.recipe.as_json(),
            "steps": now.step,
            "tokens": now.tokens,
            "answer_tokens": now.answer_tokens,
            "minutes": round(now.seconds / 60, 1),
            "held_out_documents": min(len(data.documents(held_out=True)), trainer.recipe.evaluate_documents),
            "packages": packages,
            "made_by": source(),
            "evaluated_as": trainer.recipe.save_dtype,
            "evaluation": list(evaluation),
        },
    }
    made = trainer.exit_heads(about)
    made.save(out, DTYPES[trainer.recipe.save_dtype])
    card = head_card(
        about,
        model_hash=made.model_hash,
        kinds={layer: head.kind for layer, head in made.heads.items()},
        numbers=sum(tensor.numel() for tensor in trainer.parameters),
        file=out / FILE,
    )
    write_atomically(out / CARD, card.encode())


def _finished(out: Path, recipe: HeadRecipe) -> bool:
    """Whether the folder holds all that `_export` writes, in this `save_dtype`: it may have been killed, too."""
    if not all((out / name).is_file() for name in (FILE, ABOUT, CARD)):
        return False
    about = read_about(out)
    stored = about.get("training", {}).get("recipe", {}).get("save_dtype")
    return bool(stored == recipe.save_dtype and about["sha256"] == files_hash([out / FILE]))


class _Run:
    """What the first process does between steps: log, report, evaluate, save."""

    def __init__(self, out: Path, trainer: HeadTrainer, peak: Peak | None, report: Callable[[str], None]) -> None:
        self.out, self.trainer, self.report = out, trainer, report
        step = trainer.progress.step  # the last step is evaluated after its state is saved
        self.log = Log(out, step=step, evaluated=step - (step == trainer.recipe.steps), report=report)
        self._measure, self._peak = peak, math.nan
        self._steps: list[Step] = []
        self._evaluated: tuple[int, list[dict[str, Any]]] = (-1, [])
        self._look()

    def after(self, step: Step) -> None:
        """Log a step, and do what is due at its end."""
        now, recipe = self.trainer.progress, self.trainer.recipe
        self._steps.append(step)
        bound_s = step.flops / (self._peak * self.trainer.peers.count)
        self.log.step({"step": now.step, **asdict(step), "bound_s": bound_s, "share_of_bound": bound_s / step.seconds})
        if now.step % _REPORT_EVERY == 0 or now.step == recipe.steps:
            self.report(self._line())
            self._steps.clear()
        if now.step % recipe.evaluate_every == 0:
            self.evaluate()
            self._look()
        if now.step % recipe.save_every == 0 or now.step == recipe.steps:
            self.trainer.save(self.out / STATE)

    def evaluate(self) -> list[dict[str, Any]]:
        """Of this step; made, logged and told once."""
        if self._evaluated[0] != self.trainer.progress.step:
            self._evaluated = self.trainer.progress.step, self.trainer.evaluate()
            for row in self._evaluated[1]:
                self.log.evaluation(row)
                self.report(
                    f"  exit {row['exit']:3d}: KL {row['kl']:.3f}, agrees {100 * row['agreement']:.1f} %, probe right "
                    f"{100 * row['probe_accuracy']:.1f} %, AUC {row['probe_auc']:.3f}"
                )
        return self._evaluated[1]

    def _look(self) -> None:
        if self._measure is not None:  # the best seen: others on a shared machine only ever take from it
            self._peak = max(self._measure(self.trainer.model), 0.0 if math.isnan(self._peak) else self._peak)

    def _line(self) -> str:
        seconds, now = sum(step.seconds for step in self._steps), self.trainer.progress
        flops, tokens = sum(step.flops for step in self._steps), sum(step.tokens for step in self._steps)
        bound_s = flops / (self._peak * self.trainer.peers.count)
        left = (self.trainer.recipe.steps - now.step) * now.seconds / now.step
        loss = sum(step.loss for step in self._steps) / len(self._steps)
        each = len(self._steps)
        bound = "" if math.isnan(bound_s) else f" (bound {bound_s / each:.2f} s: {bound_s / seconds:.0%} of it)"
        return (
            f"step {now.step} | loss {loss:.4f} | {tokens / seconds:.0f} tokens/s | {flops / each / 1e9:.0f} GFLOP in "
            f"{seconds / each:.2f} s a step{bound} | {now.seconds / 60:.1f} min, {left / 60:.0f} to go"
        )
