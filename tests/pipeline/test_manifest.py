"""What a manifest may say."""

from __future__ import annotations

import pytest

from anydepth.pipeline.manifest import manifest_text, read_manifest
from tests.pipeline.making import written

GOOD = """model = "m"
segments = [4, 8]
replicas = 2
[[stage]]
segments = [1]
device = ["cpu", "cuda:0"]
[[stage]]
segments = [2]
place = "ray"
host = "node:10.0.0.2"
"""


def test_a_manifest_is_read(tmp_path):
    manifest = written(tmp_path / "m.toml", GOOD)
    assert [stage.place for stage in manifest.stages] == ["here", "ray"]
    assert manifest.stages[0].device == ("cpu", "cuda:0") and manifest.stages[1].host == ("node:10.0.0.2",) * 2
    assert manifest.readouts == (4, 8) and manifest.fill == "full" and manifest.in_flight == 4
    assert manifest.pages == 32 * 64


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('model = "m"', "model = 3", "model is 3"),
        ('model = "m"', "model = ", "no manifest"),
        ("segments = [4, 8]", "segments = [8, 4]", "segments is .*rising list"),
        ("segments = [4, 8]", "segments = [4, 8]\nreadouts = [4]", "readouts lacks 8"),
        ("segments = [4, 8]", "segments = [4, 8]\nreadouts = [2, 8]", r"readouts has \[2\], where no segment ends"),
        (
            "segments = [4, 8]",
            'segments = [4, 8]\nfill = "shared"',
            "fill is 'shared'; allowed: full, deferred, project",
        ),
        ("segments = [4, 8]", 'segments = [4, 8]\nrouting = "random"', "routing is 'random'"),
        ("segments = [4, 8]", "segments = [4, 8]\nmicro_batch = 0", "micro_batch is 0"),
        ("segments = [4, 8]", "segments = [4, 8]\nmicrobatch = 2", "unknown key 'microbatch'.*micro_batch"),
        ("replicas = 2", "replicas = true", "replicas is True"),
        ("replicas = 2", "replicas = 3", "device is .*3 replicas"),
        ("segments = [2]", "segments = [1, 2]", r"stages hold segments \[1, 1, 2\]"),
        ("segments = [2]", "segments = [3]", r"must be 1 \.\. 2"),
        ('place = "ray"', 'place = "moon"', "stage 2: place is 'moon'; allowed: here, process, ray"),
        ('place = "ray"', 'place = "process"', "stage 2: host is for place 'ray'"),
        ('host = "node:10.0.0.2"', 'hosts = "a"', "unknown key 'hosts'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(ValueError, match=rf"m\.toml.*{message}"):
        written(tmp_path / "m.toml", GOOD.replace(old, new))


def test_a_manifest_without_stages_or_a_file(tmp_path):
    with pytest.raises(ValueError, match=r"there is no \[\[stage\]\]"):
        written(tmp_path / "m.toml", 'model = "m"\nsegments = [4]\n')
    with pytest.raises(ValueError, match=r"nowhere\.toml is no manifest"):
        read_manifest(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("said", "meant"), [("heads", "{folder}/heads"), (".", "{folder}"), ("/else/heads", "/else/heads")]
)
def test_heads_are_found_from_the_manifest(tmp_path, said, meant):
    manifest = written(tmp_path / "m.toml", f'heads = "{said}"\n{GOOD}')
    assert manifest.heads == meant.format(folder=tmp_path)
    assert written(tmp_path / "none.toml", GOOD).heads is None


def test_a_manifest_written_elsewhere_means_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.toml").write_text(f'heads = "heads"\n{GOOD}')
    (tmp_path / "there").mkdir()
    manifest = read_manifest("m.toml")
    assert written(tmp_path / "there/m.toml", manifest_text(manifest)) == manifest
