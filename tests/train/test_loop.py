"""Looped pretraining: killed runs resume to the same weights, and the parts do what they say."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file

from anydepth.models.nano.questions import split_of
from anydepth.train import data
from anydepth.train.gate import GateRecipe, gate_goals, train_gate
from anydepth.train.kv import DenseKV, all_depths
from anydepth.train.loop import random_exits, train_loop
from anydepth.train.muon import blocks, orthogonalise
from anydepth.train.objective import exit_log_probabilities
from anydepth.train.recipe import Recipe, initial_model
from anydepth.train.schedule import Progress, lr_factor, next_place

SCRIPT = """
import functools, sys
from pathlib import Path
from anydepth.train.loop import train_loop
from anydepth.train.recipe import Recipe
if __name__ == "__main__":
    train_loop(Path(sys.argv[1]), seed=3, processes=2, recipe=Recipe.tiny(cap_a=14, steps_b=8, steps_c=8),
               report=functools.partial(print, flush=True))
"""


def quiet(line: str) -> None:
    """Report nothing."""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: Path, two: Path) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(two).values(), strict=True))


def test_killed_run_resumes_to_the_same_weights(tmp_path) -> None:
    recipe = Recipe.tiny(cap_a=14, steps_b=8, steps_c=8)
    train_loop(tmp_path / "whole", seed=3, processes=1, recipe=recipe, report=quiet)
    script = tmp_path / "run.py"
    script.write_text(SCRIPT)
    run = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "killed")],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    state = tmp_path / "killed" / "state.pt"
    until = time.monotonic() + 60
    while not state.exists() and time.monotonic() < until and run.poll() is None:
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert state.exists() and not (tmp_path / "killed" / "model.safetensors").exists()
    train_loop(tmp_path / "killed", seed=3, processes=1, recipe=recipe, report=quiet)
    assert same(tmp_path / "whole", tmp_path / "killed")
    facts = json.loads((tmp_path / "killed" / "training.json").read_text())
    assert facts["phase_steps"] == {"A": 14, "B": 8, "C": 8}


def test_only_phase_c_reads_the_flag_and_may_start_from_the_end_of_b(tmp_path) -> None:
    recipe = Recipe.tiny()
    train_loop(tmp_path / "copied", seed=1, processes=1, recipe=recipe, report=quiet)
    train_loop(tmp_path / "plain", seed=1, processes=1, recipe=recipe, copied_kv=False, report=quiet)
    ends = [torch.load(tmp_path / name / "state-b.pt")["weights"] for name in ("copied", "plain")]
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert not same(tmp_path / "copied", tmp_path / "plain")
    train_loop(
        tmp_path / "continued",
        seed=1,
        processes=1,
        recipe=recipe,
        copied_kv=False,
        report=quiet,
        start_from=tmp_path / "copied" / "state-b.pt",
    )
    assert same(tmp_path / "plain", tmp_path / "continued")


def test_errors_say_what_was_given(tmp_path) -> None:
    with pytest.raises(ValueError, match="processes is 3; allowed: 1 or 2"):
        train_loop(tmp_path, processes=3)
    train_loop(tmp_path, processes=1, recipe=Recipe.tiny(), report=quiet)
    with pytest.raises(ValueError, match="seed = 0, this run has 1"):
        train_loop(tmp_path, seed=1, processes=1, recipe=Recipe.tiny(), report=quiet)
    (tmp_path / "state.pt").write_bytes(b"half")
    with pytest.raises(ValueError, match="not a training state"):
        train_loop(tmp_path, processes=1, recipe=Recipe.tiny(), report=quiet)
    with pytest.raises(RuntimeError, match="choose another seed"):
        train_loop(tmp_path / "stuck", processes=1, recipe=Recipe.tiny(escape_steps=2), report=quiet)


def test_gate_changes_the_gate_only(tmp_path) -> None:
    train_loop(tmp_path / "loop", processes=1, recipe=Recipe.tiny(), report=quiet)
    recipe = GateRecipe(batches=1, rows=4, why_rows=1)
    for name in ("once", "twice"):
        train_gate(tmp_path / "loop", out=tmp_path / name, recipe=recipe, report=quiet)
    assert same(tmp_path / "once", tmp_path / "twice")
    before, after = weights(tmp_path / "loop"), weights(tmp_path / "once")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}


def test_gate_goals_look_past_a_plateau() -> None:
    goals = gate_goals(torch.tensor([[3.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]]), steepness=50.0, least_gain=0.1)
    assert goals.shape == (2, 3)
    assert (goals[0] > 0.99).all() and (goals[1] < 0.01).all()


def test_muon_orthogonalises() -> None:
    matrices = torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices, steps=8))
    assert values.min() > 0.6 and values.max() < 1.3
    one = orthogonalise(matrices)
    assert torch.allclose(one, orthogonalise(matrices * 100), atol=1e-4)
    fused = torch.arange(12.0).view(2, 6)
    assert torch.equal(blocks(fused)[1], fused[:, 2:4]) and torch.equal(
        blocks(fused.t().contiguous())[1][:, 0], fused.t()[2:4, 0]
    )
    with pytest.raises(ValueError, match="20 x 48 cannot be cut"):
        blocks(torch.zeros(20, 48))


def test_copied_kv_equals_one_token_at_a_time() -> None:
    """Definition: a position that left at d holds, in every deeper plane, its own K/V of plane d, layer by layer."""
    recipe = Recipe.tiny(layers=2, loops=4)
    model = initial_model(recipe, seed=0)
    batch = data.collate(data.mixed_rows(Random(0), rows=2, why_rows=2, asked=1))
    depths = random_exits(batch, Random(1), loops=4, full_depth=0.3)
    assert set(depths.unique().tolist()) == {1, 2, 3, 4}
    with torch.no_grad():
        dense = all_depths(model, batch, exit_depths_BT=depths)
        for b in range(2):
            states = one_at_a_time(model, batch, b, depths[b].tolist())
            for index, where in enumerate(batch.answer_A.tolist()):
                row, t = divmod(where, batch.ids_BT.shape[1])
                if row == b:
                    for k in range(int(depths[b, t])):
                        torch.testing.assert_close(dense[k][index], states[t][k], atol=1e-4, rtol=1e-4)


def one_at_a_time(model, batch, b: int, depths: list[int]) -> list[list[torch.Tensor]]:
    planes: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    states = []
    for t, depth in enumerate(depths):
        visible = batch.mask[b, t].nonzero().flatten().tolist()

        class Naive:
            positions = batch.positions_BT[b, t : t + 1]
            k = 0

            def attend(self, layer, q, k, v, t=t, visible=visible):
                planes[self.k, layer, t] = k[0], v[0]
                keys, values = (torch.stack(x) for x in zip(*(planes[self.k, layer, s] for s in visible), strict=True))
                scores = torch.einsum("hd,thd->ht", q[0], keys) / math.sqrt(q.shape[-1])
                return torch.einsum("ht,thd->hd", scores.softmax(-1), values)[None]

        h, kv, own = model.embed(batch.ids_BT[b, t : t + 1]), Naive(), []
        for k in range(1, depth + 1):
            kv.k = k
            h = model.segment(k, h, kv)
            own.append(h[0])
        for k in range(depth + 1, 5):
            for layer in range(model.shape.layers):
                planes[k, layer, t] = planes[depth, layer, t]
        states.append(own)
    return states


def test_packed_blocks_do_not_see_each_other() -> None:
    rows = data.mixed_rows(Random(5), rows=2, why_rows=0, asked=3)
    batch = data.collate(rows)
    model = initial_model(Recipe.tiny(), seed=0)
    with torch.no_grad():
        before = all_depths(model, batch)[-1]
        changed = batch.ids_BT.clone()
        changed[0][batch.blocks_BT[0] == 1] = 5
        other = data.Batch(**{**vars(batch), "ids_BT": changed})
        after = all_depths(model, other)[-1]
    own = (batch.blocks_BT.view(-1)[batch.answer_A] == 1) & (batch.answer_A < batch.ids_BT.shape[1])
    torch.testing.assert_close(before[~own], after[~own])
    assert not torch.allclose(before[own], after[own])
    assert DenseKV(batch).positions.max() < 256


def test_training_contexts_are_training_contexts() -> None:
    from anydepth.models.nano.tokenizer import VOCABULARY

    for row in data.mixed_rows(Random(2), rows=20, why_rows=5, asked=3) + data.curriculum_rows(
        Random(2), rows=20, level=3
    ):
        context = [i for i, block in zip(row.ids, row.blocks, strict=True) if block == 0]
        assert split_of(" ".join(VOCABULARY[i] for i in context)) == "train"


def test_exit_probabilities_sum_to_one_up_to_the_last_depth() -> None:
    p = exit_log_probabilities(torch.zeros(2, 4), torch.tensor([4, 2])).exp()
    torch.testing.assert_close(p, torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.5, 0.5, 0.0, 0.0]]))


def test_places_and_rates() -> None:
    recipe = Recipe()
    late = Progress(level=6, level_steps=120, step=500, accuracy=(0, 0, 0, 0.97))
    assert next_place(recipe, late).phase == "B"
    assert next_place(recipe, Progress(level=1, step=50, accuracy=(0, 0, 0, 0.86))).accuracy == (0.0,) * 4
    assert lr_factor(recipe, Progress(step=24)) == 0.5
    assert lr_factor(recipe, Progress(phase="B", step=recipe.steps_b - 1)) == 0.02
    assert lr_factor(recipe, Progress(phase="C", step=60)) == 0.5
