"""Where a number comes from: the code, the packages and the machine behind a run. Imports no torch."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import anydepth

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers")
SOURCE = Path(anydepth.__file__).parent


def provenance(
    *,
    packages: Sequence[str] = PACKAGES,
    threads: int | None = None,
    seed: int | None = None,
    model: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    task: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The provenance block of a Record, but for its times.

    model, tokenizer, task: what identifies them, such as {"name": ..., "hash": ...}. threads: what the tensor library
    uses. Packages that are not installed have the version None. Neither host name nor any path is in it.
    """
    return {
        "anydepth": source(),
        "python": platform.python_version(),
        "packages": package_versions(packages),
        "os": platform.platform(),
        "cpu": _cpu(),
        "threads": threads,
        "affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "gpu": _gpus(),
        "model": model,
        "tokenizer": tokenizer,
        "task": task,
        "seed": seed,
    }


def source(folder: Path = SOURCE) -> dict[str, Any]:
    """Version of anydepth, the commit of its own source tree, and whether that tree differs from the commit.

    commit and dirty are None where `folder` is not under version control: an installed package, even one inside
    somebody else's checkout.
    """
    version_ = {"version": anydepth.__version__}
    tracked = _git(folder, "ls-files", "--error-unmatch", "--", "__init__.py")
    commit = _git(folder, "rev-parse", "HEAD") if tracked else None
    if commit is None:
        return {**version_, "commit": None, "dirty": None}
    return {**version_, "commit": commit, "dirty": _git(folder, "status", "--porcelain", "--", ".") != ""}


def package_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Installed versions, None for what is not installed."""
    return {name: _installed(name) for name in packages}


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says about `folder`, None where it is not there or objects."""
    # A hook of another repository sets GIT_DIR and the like, which would answer for that one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return _said(["git", "-C", str(folder), *arguments], environment)


def _said(command: Sequence[str], environment: dict[str, str] | None = None) -> str | None:
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _gpus() -> list[str]:
    """Name and driver of each NVIDIA GPU, [] where there is none."""
    return (_said(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]) or "").splitlines()
