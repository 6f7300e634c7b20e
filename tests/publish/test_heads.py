"""Heads to give away: the folder loads and answers as the heads do, says all of it, and nothing in it is of another."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from anydepth import LLM, Sampling
from anydepth.calibrate.job import Job
from anydepth.calibrate.run import calibrate_heads
from anydepth.calibrate.write import write_profile
from anydepth.certificate import Certificate, describe
from anydepth.cli import app
from anydepth.pipeline.manifest import manifest_text, read_manifest
from anydepth.profile import Exit, Profile
from anydepth.publish import folder as folders
from anydepth.publish.heads import export_heads
from anydepth.record import files_hash
from anydepth.train.head_data import Source
from tests.calibrate.making import quiet, write_model, write_prompts

MANIFEST = """model = "m"
heads = "elsewhere"
segments = [1, 2, 3, 4]
readouts = [2, 4]
replicas = 2
kv_pages = 7
[[stage]]
segments = [1, 2]
device = ["cpu", "cuda:0"]
[[stage]]
segments = [3, 4]
place = "ray"
host = "a \\" node"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, its heads with profiles of both policies installed, what calibrated them, a certificate, a manifest."""
    path = write_model(tmp_path_factory.mktemp("llama"))
    write_prompts(path / "prompts.jsonl", 800, seed=1)
    sources = (Source(path=path / "prompts.jsonl", own_answers=True),)
    job = Job(model=str(path), heads=path / "heads", policy="probe", data=sources, levels=(0.7, 0.5), answer_tokens=9)
    for policy in ("probe", "confidence"):
        mine = replace(job, policy=policy, epsilon=0.6)
        calibrate_heads(mine, path / policy, answers=path / "answers", install=True, report=quiet)
    (path / "m.toml").write_text(MANIFEST)
    return path


@pytest.fixture(scope="module")
def given(folder) -> dict[str, object]:
    both = [folder / policy / "calibration.json" for policy in ("probe", "confidence")]
    certificate = folder / "probe/certificate.json"
    return {"certificate": certificate, "calibrations": both, "manifest": folder / "m.toml"}


@pytest.fixture(scope="module")
def out(folder, given, tmp_path_factory) -> Path:
    return export_heads(folder / "heads", tmp_path_factory.mktemp("out") / "heads", **given)


@pytest.fixture
def heads(folder, tmp_path) -> Path:
    """The heads alone, with their profiles, to change."""
    shutil.copytree(folder / "heads", tmp_path / "heads")
    return tmp_path / "heads"


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("name", ["probe-0.5", "confidence-0.5"])
def test_the_folder_answers_as_the_heads_do(folder, out, name):
    ask = Sampling(exit_policy=name.split("-")[0], max_tokens=9)
    prompts = ["a b c", "d e f g", "b i"]
    mine, theirs = (LLM(folder, heads=h, profile=name).generate(prompts, ask) for h in (out, folder / "heads"))
    assert [(o.token_ids, o.depths) for o in mine] == [(o.token_ids, o.depths) for o in theirs]
    assert len({depth for o in mine for depth in o.depths}) > 1


def test_its_certificate_is_kept_to(folder, out):
    certificate = Certificate.read(out / "certificate.json")
    names = [setting["profile"] for setting in certificate.grid]
    llm = LLM(folder, heads=out, profile=names, certificate=out / "certificate.json")
    assert certificate.chosen != "never" and llm.generate("a b c", Sampling(max_tokens=3))[0].token_ids


def test_the_card_says_all_of_it(folder, out):
    card, told = (out / "README.md").read_text(), json.loads((out / "heads.json").read_text())["training"]
    assert (
        f"Seed {told['recipe']['seed']}. Knowledge distillation" in card
        and f"| {told['evaluation'][1]['kl']:.3f} |" in card
    )
    assert describe(Certificate.read(out / "certificate.json")) in card
    for path in (out / "profiles").iterdir():
        profile = Profile.read(path)
        exit = profile.exits[0]
        said = (
            f"probe {exit.probe:.4g}" if exit.probe is not None else f"logit {exit.logit:.4g}, margin {exit.margin:.4g}"
        )
        assert f"| {profile.name} |" in card and said in card
        found = json.loads((folder / profile.name.split("-")[0] / "calibration.json").read_text())
        of = found["profiles"][profile.name]["certify"]
        early = 100 - 100 * of["left_after_layer"]["4"] / of["rows"]
        row = f"| {profile.name} | {100 * of['agreement']:.1f} % | {of['mean_layers']:.1f} of 4 | {early:.1f} % |"
        assert f"{row} {of['rows']:,} | {of['questions']} |" in card
    for name in content(out).keys() - {"README.md", "export.json"}:
        assert f"| `{name}` | `{files_hash([out / name])}` |" in card
    assert str(folder) not in card
    (line,) = re.findall(r"LLM\(.*\)", card)
    assert 'heads="FOLDER", profile="probe-' in line and 'certificate="FOLDER/certificate.json"' in line


def test_a_certificate_of_nothing_is_told_too(folder, tmp_path):
    certificate = replace(Certificate.read(folder / "probe/certificate.json"), chosen="never")
    certificate.write(tmp_path / "c.json")
    out = export_heads(folder / "heads", tmp_path / "out", certificate=tmp_path / "c.json")
    card = (out / "README.md").read_text()
    (line,) = re.findall(r"LLM\(.*\)", card)
    assert describe(certificate) in card and "profile=" not in line
    assert LLM(folder, heads=out, certificate=out / "certificate.json", dtype="float32", fill="full").generate("a b")


@pytest.mark.parametrize(
    "stored, said",
    [
        (None, "in float32, before the numbers were rounded to float16"),
        ("float16", "of the numbers as they are stored, in float16"),
    ],
)
def test_the_card_says_of_which_numbers_its_table_is(heads, tmp_path, stored, said):
    """Heads of before this was noted were measured before rounding."""
    about = json.loads((heads / "heads.json").read_text())
    about["training"]["recipe"]["save_dtype"] = "float16"
    about["training"]["evaluated_as"] = stored
    (heads / "heads.json").write_text(json.dumps(about))
    assert said in (export_heads(heads, tmp_path / "out") / "README.md").read_text()


def test_the_manifest_is_read_with_these_heads_wherever_they_lie(folder, out, tmp_path):
    given = read_manifest(folder / "m.toml")
    assert read_manifest(out / "manifest.toml") == replace(given, heads=str(out))
    shutil.copytree(out, tmp_path / "moved")
    assert read_manifest(tmp_path / "moved/manifest.toml").heads == str(tmp_path / "moved")
    (tmp_path / "again.toml").write_text(manifest_text(given))
    assert read_manifest(tmp_path / "again.toml") == given


def test_the_same_files_give_the_same_bytes(folder, given, out, tmp_path):
    assert content(export_heads(folder / "heads", tmp_path / "a", **given)) == content(out)
    assert content(export_heads(folder / "heads", tmp_path / "a", **given)) == content(out)


def test_some_profiles_alone_by_name_and_path(folder, tmp_path):
    other = replace(Profile.read(folder / "heads/profiles/probe-0.5.toml"), name="mine")
    path = write_profile(tmp_path, other, [])
    out = export_heads(folder / "heads", tmp_path / "out", profiles=["probe-0.7", path])
    assert {*content(out)} == {
        *("README.md", "export.json", "heads.json", "heads.safetensors"),
        *("profiles/mine.toml", "profiles/probe-0.7.toml"),
    }
    assert content(export_heads(folder / "heads", tmp_path / "b", profiles=[path, "probe-0.7"])) == content(out)
    export_heads(out, out, profiles=["mine"])  # in its own place
    assert [path.name for path in (out / "profiles").iterdir()] == ["mine.toml"]
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".new", ".old")]


def test_heads_without_profiles(heads, tmp_path):
    shutil.rmtree(heads / "profiles")
    assert "There are no profiles yet" in (export_heads(heads, tmp_path / "out") / "README.md").read_text()


CHANGES = {"model_hash": "0" * 64, "head_hash": "0" * 64}


@pytest.mark.parametrize("key", CHANGES)
@pytest.mark.parametrize("what", ["profile", "certificate", "calibrations"])
def test_what_is_of_other_heads_or_another_backbone_is_refused(folder, heads, tmp_path, what, key):
    given: dict[str, object] = {}
    if what == "profile":
        profile = replace(Profile.read(folder / "heads/profiles/probe-0.5.toml"), **{key: CHANGES[key]})
        write_profile(heads / "profiles", profile, [])
    elif what == "certificate":
        given[what] = tmp_path / "c.json"
        replace(Certificate.read(folder / "probe/certificate.json"), **{key: CHANGES[key]}).write(tmp_path / "c.json")
    else:
        changed = json.loads((folder / "probe/calibration.json").read_text()) | {key: CHANGES[key]}
        (tmp_path / "c.json").write_text(json.dumps(changed))
        given[what] = [tmp_path / "c.json"]
    with pytest.raises(ValueError, match=r"(was made for|is of) (model|backbone|heads) 0000000000000000"):
        export_heads(heads, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_profiles_that_do_not_fit_are_refused(folder, heads, tmp_path):
    good = Profile.read(folder / "heads/profiles/probe-0.5.toml")
    for profile, name, message in (
        (replace(good, exits=(Exit(layer=4, probe=0.5),)), None, r"exits after layers \[4\]"),
        (good, "other", "are both named 'probe-0.5'"),
        (replace(good, name="../x"), "x", "name is '../x'"),
        (replace(good, name=""), "x", "name is ''"),
    ):
        again = tmp_path / "again"
        shutil.copytree(heads, again)
        write_profile(again / "profiles", replace(profile, name=name or profile.name), [])
        if name:
            path = again / f"profiles/{name}.toml"
            path.write_text(path.read_text().replace(f'name = "{name}"', f'name = "{profile.name}"'))
        with pytest.raises(ValueError, match=message):
            export_heads(again, tmp_path / "out")
        shutil.rmtree(again)
    assert not (tmp_path / "out").exists()


def test_certificates_of_other_profiles_are_refused(folder, heads, tmp_path):
    certificate = folder / "probe/certificate.json"
    with pytest.raises(ValueError, match=r"tried profile 'probe-0.7', which is not among \['confidence-0.5'\]"):
        export_heads(heads, tmp_path / "out", profiles=["confidence-0.5"], certificate=certificate)
    path = heads / "profiles/probe-0.7.toml"
    path.write_text(path.read_text().replace("probe = 0.", "probe = 0.0"))
    with pytest.raises(ValueError, match=r"'probe-0\.7' was changed after"):
        export_heads(heads, tmp_path / "out", certificate=certificate)
    with pytest.raises(ValueError, match=r"is of another profile 'probe-0\.7'"):
        export_heads(heads, tmp_path / "out", calibrations=[folder / "probe/calibration.json"])
    with pytest.raises(ValueError, match="has none of the profiles"):
        export_heads(
            heads, tmp_path / "out", profiles=["confidence-0.5"], calibrations=[folder / "probe/calibration.json"]
        )
    found = Certificate.read(certificate)
    replace(found, policy={**found.policy, "segments": 3}).write(tmp_path / "c.json")
    with pytest.raises(ValueError, match="is for 3 segments; these heads make 4"):
        export_heads(folder / "heads", tmp_path / "out", certificate=tmp_path / "c.json")


@pytest.mark.parametrize("segments, stages", [("[2, 3, 4]", "[1, 2, 3]"), ("[1, 2, 3]", "[1, 2, 3]")])
def test_a_manifest_that_does_not_end_where_heads_read_is_refused(heads, tmp_path, segments, stages):
    (tmp_path / "m.toml").write_text(f'model = "m"\nsegments = {segments}\n[[stage]]\nsegments = {stages}\n')
    with pytest.raises(ValueError, match=r"the heads read after layers \[(1|3)\]"):
        export_heads(heads, tmp_path / "out", manifest=tmp_path / "m.toml")


def test_heads_that_are_not_whole_are_refused(heads, tmp_path):
    about = json.loads((heads / "heads.json").read_text())
    (heads / "heads.json").write_text(json.dumps({key: about[key] for key in about if key != "training"}))
    with pytest.raises(ValueError, match="lacks 'training', so that there can be no complete card"):
        export_heads(heads, tmp_path / "out")
    with (heads / "heads.safetensors").open("ab") as file:
        file.write(b"0")
    with pytest.raises(ValueError, match="its sha256 differs"):
        export_heads(heads, tmp_path / "out")
    with pytest.raises(ValueError, match="there are no exit heads"):
        export_heads(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("where", ["out", "out.new", "out.old"])
def test_folders_with_anything_else_in_them_are_left_alone(folder, tmp_path, where):
    (tmp_path / where / "profiles").mkdir(parents=True)
    (tmp_path / where / "profiles/mine.toml").write_text("precious")
    with pytest.raises(ValueError, match=rf"{where} holds profiles/mine.toml and is not"):
        export_heads(folder / "heads", tmp_path / "out")
    assert (tmp_path / where / "profiles/mine.toml").read_text() == "precious"
    with pytest.raises(ValueError, match=r"heads holds .* and is not"):
        export_heads(folder / "heads", folder / "heads")


def test_a_killed_export_is_never_half_a_folder_of_heads(folder, out, tmp_path):
    """Killed at each file and each rename in turn: what can be loaded at OUT is whole, and nothing loads at OUT.new
    before it is."""
    code = """
import os, pathlib, shutil, signal, sys
from anydepth.publish.heads import export_heads
left = int(sys.argv[3])
def killing(call):
    def do(*args, **options):
        global left
        left -= 1
        if left == 0:
            if call is write:
                os.close(os.open(args[0], os.O_CREAT))  # a file that was begun
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)
    return do
write = pathlib.Path.write_bytes
pathlib.Path.write_bytes = killing(write)
pathlib.Path.rename = killing(pathlib.Path.rename)
shutil.copyfile, shutil.rmtree = killing(shutil.copyfile), killing(shutil.rmtree)
export_heads(sys.argv[1], sys.argv[2], profiles=["probe-0.5"])
"""
    ask = {"profiles": ["probe-0.5"]}
    wanted, earlier = (export_heads(folder / "heads", tmp_path / n, profiles=[f"probe-{n}"]) for n in ("0.5", "0.7"))
    wanted, point = content(wanted), 0
    while True:
        point, place = point + 1, tmp_path / str(point)
        shutil.copytree(earlier, place / "out")
        done = subprocess.run([sys.executable, "-c", code, folder / "heads", place / "out", str(point)])
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL and point < 12
        assert not (place / "out").exists() or content(place / "out") in (content(earlier), wanted)
        last = place / "out.new/heads.json"
        assert not last.exists() or last.stat().st_size == 0 or content(last.parent) == wanted
        assert content(export_heads(folder / "heads", place / "out", **ask)) == wanted and os.listdir(place) == ["out"]
    assert point == 8


def test_a_full_disk_leaves_the_earlier_export(folder, out, tmp_path, monkeypatch):
    target = export_heads(folder / "heads", tmp_path / "out", profiles=["probe-0.7"])
    earlier = content(target)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.shutil, "copyfile", full)
    with pytest.raises(ValueError, match=r"could not be written .*No space"):
        export_heads(folder / "heads", target)
    assert content(target) == earlier


def test_the_command(folder, tmp_path, capsys):
    def run(*words: object) -> None:
        app(["export", *map(str, words)], standalone_mode=False)

    paths = ("--certificate", folder / "probe/certificate.json", "--calibration", folder / "probe/calibration.json")
    names = ("--profile", "probe-0.7", "--profile", "probe-0.5", "--manifest", folder / "m.toml")
    run("--heads", folder / "heads", tmp_path / "out", *names, *paths, "--json")
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["result"]
    assert told == {"folder": str(tmp_path / "out"), "profiles": ["probe-0.5", "probe-0.7"]}
    assert {"certificate.json", "manifest.toml"} <= {*content(tmp_path / "out")}
    for words, message in (
        (("--heads", folder / "heads", "x", "y"), "'x' is one folder too many"),
        (("--heads", folder / "heads", "--segments", "m.toml", "x"), "are two exports"),
        (("nano", "x", "--profile", "p"), "--profile would change nothing of a model"),
        (("--heads", folder / "heads", "x", "--revision", "r"), "--revision would change nothing of exit heads"),
        (("--segments", "m.toml", "x", "--manifest", "m"), "--manifest would change nothing of a pipeline's parts"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*words)
