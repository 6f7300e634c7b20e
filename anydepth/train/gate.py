"""Stage II: fit the exit gate of a frozen looped model, so that it says whether another loop would still help.

Shape suffixes: A answer positions, R depths, d hidden size.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from anydepth.models.ouro import Ouro
from anydepth.train import checkpoint, data
from anydepth.train.kv import all_depths
from anydepth.train.parallel import one_thread


@dataclass(frozen=True, kw_only=True)
class GateRecipe:
    """Hyperparameters of the fit; the defaults are those of the shipped nano.

    A position should go on from depth r with probability sigmoid(steepness (I_r - least_gain)), where the gain
    I_r = max(0, CE_r - min_{j>r} CE_j) is what the best deeper readout would save, in nats. Looking at the next depth
    only misses gains behind a plateau, and with Ouro's least gain of 0.005 a token without any gain still goes on
    with probability 0.44, where 0.1 gives 0.007.
    """

    batches: int = 24
    rows: int = 64
    why_rows: int = 14
    asked: int = 5
    rows_per_chunk: int = 16
    steepness: float = 50.0
    least_gain: float = 0.1
    iterations: int = 120


def train_gate(
    model: Path,
    *,
    out: Path | None = None,
    seed: int = 0,
    recipe: GateRecipe | None = None,
    report: Callable[[str], None] = print,
) -> Path:
    """Fit the gate of the checkpoint folder `model` on fresh training questions and write the folder `out`.

    `out` None replaces the gate in place. Only the gate's weight and bias change. Returns the folder written.
    ValueError where `model` is no looped checkpoint.
    """
    recipe, out = recipe or GateRecipe(), out or model
    looped, _ = checkpoint.read_model(model)
    with one_thread():
        features_Ard, goal_Ar = collect(looped, seed=seed, recipe=recipe)
        loss = fit(looped, features_Ard, goal_Ar, iterations=recipe.iterations)
    report(
        f"{len(goal_Ar)} answer tokens; going on is worth it at depths 1, 2, ... for "
        + ", ".join(f"{100 * share:.1f} %" for share in goal_Ar.mean(0).tolist())
    )
    report(f"fitted: cross-entropy {loss:.4f}")
    if out != model:
        out.mkdir(parents=True, exist_ok=True)
        for path in model.iterdir():
            if path.suffix in (".json", ".md"):
                shutil.copyfile(path, out / path.name)
    checkpoint.write_weights(looped, out / "model.safetensors")
    _record(out / "training.json", seed=seed, recipe=recipe, tokens=len(goal_Ar), loss=loss)
    return out


def gate_goals(losses_AR: Tensor, *, steepness: float, least_gain: float) -> Tensor:
    """[A, R] cross-entropies -> [A, R - 1] probabilities of going on. Example: (3, 3, 0) -> (1, 1)."""
    best_later = losses_AR.flip(1).cummin(1).values.flip(1)[:, 1:]
    gain = (losses_AR[:, :-1] - best_later).clamp(min=0.0)
    return torch.sigmoid(steepness * (gain - least_gain))


@torch.no_grad()
def collect(model: Ouro, *, seed: int, recipe: GateRecipe) -> tuple[Tensor, Tensor]:
    """What the gate reads, h_1 .. h_{R-1} as [A, R - 1, d], and what it should say, [A, R - 1]."""
    features, goals = [], []
    for batch in _batches(seed, recipe):
        states = all_depths(model, batch)
        losses_AR = torch.stack(
            [
                torch.nn.functional.cross_entropy(model.readout(k, h), batch.targets_A, reduction="none")
                for k, h in enumerate(states, start=1)
            ],
            1,
        )
        features.append(torch.stack(states[:-1], 1))
        goals.append(gate_goals(losses_AR, steepness=recipe.steepness, least_gain=recipe.least_gain))
    return torch.cat(features), torch.cat(goals)


def _batches(seed: int, recipe: GateRecipe) -> Iterator[data.Batch]:
    for index in range(recipe.batches):
        rows = data.mixed_rows(
            Random(f"gate {seed} {index}"), rows=recipe.rows, why_rows=recipe.why_rows, asked=recipe.asked
        )
        yield from data.collate_sorted(rows, rows_per_chunk=recipe.rows_per_chunk)


def fit(model: Ouro, features_Ard: Tensor, goal_Ar: Tensor, *, iterations: int) -> float:
    """Logistic regression of the hazard, 1 - goal, by L-BFGS from zero in float64. Sets the gate, returns the loss."""
    x, hazard = features_Ard.flatten(0, 1).double(), 1.0 - goal_Ar.flatten().double()
    weight = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=iterations, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(x @ weight + bias, hazard)
        loss.backward()
        return loss

    optimiser.step(closure)
    loss = float(closure().detach())
    with torch.no_grad():
        model.gate_weight.copy_(weight[None])
        model.gate_bias.copy_(bias[None])
    return loss


def _record(path: Path, *, seed: int, recipe: GateRecipe, tokens: int, loss: float) -> None:
    """Add the fit to the facts of the run."""
    facts = json.loads(path.read_text()) if path.is_file() else {}
    facts["gate"] = {"seed": seed, "answer_tokens": tokens, "cross_entropy": round(loss, 6), "recipe": asdict(recipe)}
    checkpoint.write_json(path, facts)
