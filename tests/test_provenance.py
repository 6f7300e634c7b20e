"""Provenance speaks of anydepth's own source, whatever folder or repository it is run from."""

from __future__ import annotations

import subprocess

import anydepth
from anydepth.provenance import provenance, source


def git(folder, *arguments):
    subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
        check=True,
        capture_output=True,
    )


def checkout(folder, name):
    """A repository with a committed package."""
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return package


def test_commit_and_dirty_flag(tmp_path):
    package = checkout(tmp_path, "package")
    assert len(source(package)["commit"]) == 40 and source(package)["dirty"] is False
    (tmp_path / "notes.txt").write_text("beside the package, so no change of it")
    assert source(package)["dirty"] is False
    (package / "new.py").write_text("")
    assert source(package)["dirty"] is True


def test_a_package_installed_inside_another_repository_has_no_commit(tmp_path):
    checkout(tmp_path, "project")
    installed = tmp_path / ".venv" / "anydepth"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert source(installed) == {"version": anydepth.__version__, "commit": None, "dirty": None}


def test_neither_the_current_folder_nor_a_hook_matters(tmp_path, monkeypatch):
    before = source()
    package = checkout(tmp_path, "other")
    monkeypatch.chdir(package)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert source() == before


def test_block():
    block = provenance(packages=("torch", "no-such-package"), threads=2, seed=7, model={"name": "nano", "hash": "0"})
    assert block["packages"]["torch"] and block["packages"]["no-such-package"] is None
    assert block["threads"] == 2 and block["seed"] == 7 and block["model"]["name"] == "nano"
    assert block["cpu"] and block["os"] and isinstance(block["gpu"], list)
