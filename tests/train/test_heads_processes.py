"""`anydepth train heads` under a launcher: two processes learn what one does, from data that the first prepares."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anydepth.cli import app
from tests.models.checkpoints import WORDS, write_folder, write_tokenizer

pytest.importorskip("accelerate", reason="training in several processes needs accelerate")

SCRIPT = """
import sys
from torch import device, distributed
from anydepth.cli import app
app(sys.argv[1:], standalone_mode=False)
hours = distributed.group.WORLD._get_backend(device("cpu")).options._timeout.total_seconds() / 3600
print(f"rank {distributed.get_rank()} of {distributed.get_world_size()} waits {hours:g} hours\\n", end="", flush=True)
"""


def launch(words: list[str], folder: Path) -> str:
    """What a command printed that a launcher ran in two processes."""
    (folder / "run.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    where = ["--master_addr=127.0.0.1", f"--master_port={port}", str(folder / "run.py")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([*launcher, *where, *words], capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_two_processes_train_what_one_does(tmp_path, capsys) -> None:
    write_folder(tmp_path / "model", vocab_size=len(WORDS), max_position_embeddings=512)
    write_tokenizer(tmp_path / "model")
    rows = [{"prompt": " ".join("abcdefghi"[i % 9 : i % 9 + 3]) + " a" * (i // 9)} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["-m", str(tmp_path / "model"), "--own-answers", str(tmp_path / "rows.jsonl"), "--answer-tokens", "9"]
    words += ["--exits", "2", "--rank", "4", "--batch-tokens", "60", "--accumulate", "2", "--fit", "2"]
    words += ["--steps", "6", "--save-every", "2", "--evaluate-every", "3", "--threads", "1", "--json"]
    app(["train", "heads", str(tmp_path / "one"), *words], standalone_mode=False)
    capsys.readouterr()
    said = launch(["train", "heads", str(tmp_path / "two"), *words], tmp_path)
    for rank in (0, 1):
        assert f"rank {rank} of 2 waits 24 hours" in said, "the others wait for as long as the first answers prompts"
    assert sum(line.startswith('{"command"') for line in said.splitlines()) == 1
    one, two = (load_file(tmp_path / name / "heads.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=1e-4)
    for log, column in (("steps.csv", "loss"), ("evaluations.csv", "kl")):
        read = [list(csv.DictReader((tmp_path / run / log).open())) for run in ("one", "two")]
        assert [row["step"] for row in read[0]] == [row["step"] for row in read[1]]
        losses = [[float(row[column]) for row in rows] for rows in read]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
