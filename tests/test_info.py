"""`anydepth info`: the facts of a checkpoint, and of the exit heads that are read beside it."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from anydepth import LLM
from anydepth.cli import app
from anydepth.models.heads_about import read_about
from tests.calibrate.making import write_model


def told(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["info", *arguments, "--json"], catch_exceptions=False)
    return json.loads(result.stdout.splitlines()[-1])["result"]


def test_heads_are_told_with_their_profiles_and_what_each_exit_costs(tmp_path):
    model = write_model(tmp_path)
    heads, plain = model / "heads", told("--model", str(model))
    (heads / "profiles").mkdir(exist_ok=True)
    (heads / "profiles" / "mine.toml").write_text("[[exit]]\nlayer = 1\nprobe = 0.5\n")
    found = told("--model", str(model), "--heads", str(heads))
    kinds = read_about(heads)["exits"]
    assert found["exit heads"] == [f"{kind} after {layer}" for layer, kind in kinds.items()]
    assert found["profiles"] == ["mine"] and found["heads sha256"] == read_about(heads)["sha256"]
    assert found["segments"] == len(kinds) + 1 and plain["segments"] == 1
    costs, loaded = found["cost_at_256"], LLM(str(model), heads=heads).checkpoint.model
    for depth, layer in enumerate(kinds, start=1):
        assert costs[f"exit {layer}"] == loaded.cost("readout", depth, 256)._asdict()
        assert costs[f"probe {layer}"]["flops_per_row"] == 2 * found["hidden"]
    assert costs["readout"] == plain["cost_at_256"]["readout"] and len({*map(str, costs.values())}) > 5
