"""kill -9 at random moments, then resume: the Record of an undisturbed run, no answer lost or doubled."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest

from anydepth.record import Record

# One process, several lives: it is killed while it imports, loads, answers, writes or finishes.
COMMAND = "from anydepth.cli import main; main()"
ARMS = ["--arm", "name=gate,exit_threshold=0.5", "--arm", "name=drawn,temperature=1.0,n=2,max_tokens=20"]
TIMES = ("latency_s",)


def evaluate(out, *, questions, concurrency=3):
    arguments = ["eval", "--out", str(out), "--limit", str(questions), "--concurrency", str(concurrency), *ARMS]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def timeless(out):
    found = {}
    for arm in ("gate", "drawn"):
        record = Record.read(out / arm)
        samples = [{k: v for k, v in sample.items() if k not in TIMES} for sample in record.samples]
        samples.sort(key=lambda sample: (sample["id"], sample["answer_index"]))
        worth = {**record.aggregates, "latency_s": None}
        found[arm] = record.status, record.settings_used, record.protocol_hash, worth, samples
    return found


def killed(out, *, kills, questions, seed):
    """Run, kill, run again; the number of kills that hit a process with answers already on disk."""
    chance, hits = random.Random(seed), 0
    for _ in range(kills):
        process = evaluate(out, questions=questions)
        files = [out / arm / "samples.jsonl" for arm in ("gate", "drawn")]
        before = sum(path.stat().st_size for path in files if path.exists())
        deadline = time.monotonic() + 60
        # Half of the kills wait for an answer to be written, the others come at any moment from the start on.
        if chance.random() < 0.5:
            while process.poll() is None and time.monotonic() < deadline:
                if sum(path.stat().st_size for path in files if path.exists()) > before:
                    break
                time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.communicate()
        hits += process.returncode == -9
    process = evaluate(out, questions=questions)
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors
    return hits


def assert_survives(tmp_path, *, kills, questions, seed):
    process = evaluate(tmp_path / "whole", questions=questions)
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors
    hits = killed(tmp_path / "killed", kills=kills, questions=questions, seed=seed)
    assert hits >= kills // 2
    whole, resumed = timeless(tmp_path / "whole"), timeless(tmp_path / "killed")
    assert resumed == whole
    return hits


def test_three_kills(tmp_path):
    assert_survives(tmp_path, kills=3, questions=24, seed=0)


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    assert assert_survives(tmp_path, kills=20, questions=400, seed=1) >= 15
