"""A task's risk certified over profiles of exit heads: from questions to an LLM that keeps to the certificate."""

from __future__ import annotations

import json
import shutil

import pytest

from anydepth import LLM
from anydepth.certificate import Certificate
from anydepth.cli import app
from anydepth.models.nano import questions as nano
from tests.eval.made_heads import write_heads
from tests.eval.test_calibrate import TASK
from tests.random_nano import write_random_nano


def test_profiles_are_certified_on_a_task(tmp_path):
    model = write_random_nano(tmp_path / "model", kind="layered")
    heads = write_heads(tmp_path / "heads", model)
    drawn = {
        split: nano.questions(split, n=n, kinds=("single",)) for split, n in {"test": 9, "calibration": 500}.items()
    }
    content = {split: [(q.id, q.prompt, q.answer) for q in questions] for split, questions in drawn.items()}
    (tmp_path / "single.py").write_text(TASK.replace("max_tokens = 16", "max_tokens = 3"))
    (tmp_path / "single.json").write_text(json.dumps(content))
    words = ["calibrate", "--model", model, "--task", tmp_path / "single.py", "--heads", heads, "--policy", "probe"]
    eager = tmp_path / "other.toml"
    eager.write_text('name = "eager"\n' + (heads / "profiles/eager.toml").read_text())
    words += ["--set", "fill=full", "--profile", "careful", "--profile", eager]
    words += ["--eps", 0.1, "--loss", "lost", "--out", tmp_path / "out"]
    app(list(map(str, words)), standalone_mode=False)
    certificate = Certificate.read(tmp_path / "out/certificate.json")
    assert [point["profile"] for point in certificate.grid] == ["careful", "eager"]
    assert certificate.chosen == {"profile": "eager"}  # nothing that a random model answers is right, nor lost
    options = {"heads": heads, "profile": ["careful", "eager"], "certificate": tmp_path / "out/certificate.json"}
    held = LLM(model, **options)
    assert held.generate("Ann has 5 .")[0].depths[1:] and set(held.generate("Ann has 5 .")[0].depths[1:]) == {1}
    fixed = (tmp_path / "out/grid.json").read_text()
    assert json.loads(fixed)["grid"] == [{"profile": "careful"}, {"profile": "eager"}]
    shutil.rmtree(tmp_path / "out/eager")
    before = eager.read_text()
    eager.write_text('name = "eager"\n[[exit]]\nlayer = 1\nprobe = 0.1\n')
    with pytest.raises(ValueError, match=r"something is altered: profile_hashes was \['\w+', '\w+'\] and is"):
        app(list(map(str, words)), standalone_mode=False)
    eager.write_text(before)
    words[words.index("probe")] = "confidence"
    with pytest.raises(ValueError, match="something is altered: policy was 'probe' and is 'confidence'"):
        app(list(map(str, words)), standalone_mode=False)
    words[words.index("confidence")] = "probe"
    write_heads(heads, model, kind="norm")
    with pytest.raises(ValueError, match="something is altered: head_hash was"):
        app(list(map(str, words)), standalone_mode=False)
    write_heads(heads, model)
    assert (tmp_path / "out/grid.json").read_text() == fixed
    (heads / "profiles/eager.toml").write_text("[[exit]]\nlayer = 1\nprobe = 0.1\n")
    with pytest.raises(ValueError, match="profile 'eager' was changed after it was certified"):
        LLM(model, **options)
