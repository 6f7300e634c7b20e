"""What must be equal for two runs to be comparable, as one hash, and the frozen file of a study. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anydepth.eval.arms import Study
from anydepth.eval.backends.base import Backend
from anydepth.eval.task import Question, Task
from anydepth.profile import Profile, profile_path
from anydepth.provenance import package_versions
from anydepth.record import ids_hash, read_versioned, write_atomically
from anydepth.types import Sampling

VERSION = 1
# What may differ between arms that are compared.
_BESIDE = ("arms", "certificates", "heads", "profiles", "rules", "packages", "study")


def prompt_ids(backend: Backend, question: Question) -> tuple[int, ...]:
    """Token ids of a question. Messages go through the chat template, where the model has one; else their text is the
    prompt. For choices the ids are those of the context alone."""
    if isinstance(question.prompt, str):
        return tuple(backend.tokenizer.encode(question.prompt))
    if backend.tokenizer.chat_template:
        return tuple(backend.tokenizer.chat(question.prompt))
    return tuple(backend.tokenizer.encode("\n\n".join(message["content"] for message in question.prompt)))


def protocol(
    task: Task,
    questions: Sequence[Question],
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    backend: Backend,
    *,
    task_hash: str,
) -> dict[str, Any]:
    """What decides the questions, and what an answer may be, whatever the arm: all that `protocol_hash` covers."""
    return {
        "version": VERSION,
        "task": {"name": task.name, "hash": task_hash, "file": task.file.name},
        "questions": [question.id for question in questions],
        "prompt_ids_sha256": [ids_hash(ids) for ids in prompts],
        "caps": {
            "max_tokens": sampling.max_tokens,
            "ignore_eos": sampling.ignore_eos,
            "first_token": sampling.first_token,
            "n": sampling.n,
        },
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "few_shot": list(task.few_shot),
        "model_hash": backend.model_hash,
        "tokenizer_hash": backend.tokenizer.hash,
        "template_hash": backend.tokenizer.template_hash,
    }


def protocol_hash(content: Mapping[str, Any]) -> str:
    """sha256 (hex) of the canonical JSON of everything but arms, rules and package versions."""
    return _hash({key: value for key, value in content.items() if key not in (*_BESIDE, "study_hash", "protocol_hash")})


def freeze(study: Study, content: Mapping[str, Any]) -> dict[str, Any]:
    """The frozen file: a protocol, the study's arms and rules, the package versions, and the hashes of it all."""
    frozen = {
        **content,
        "study": study.head(),
        "arms": [{"name": arm.name, **arm.passed()} for arm in study.arms],
        "certificates": {
            path: hashlib.sha256(Path(path).read_bytes()).hexdigest()
            for arm in study.arms
            if (path := arm.engine.get("certificate")) is not None
        },
        **_heads_and_profiles(study),
        "rules": [rule.asdict() for rule in study.rules],
        "packages": package_versions(),
        "protocol_hash": protocol_hash(content),
    }
    return {**frozen, "study_hash": _hash(frozen)}


def _heads_and_profiles(study: Study) -> dict[str, dict[str, str]]:
    """What heads and profiles of the arms are: hashes by path; neither key where no arm has any."""
    heads = {arm.heads: _heads_hash(arm.heads) for arm in study.arms if arm.heads is not None}
    files = [profile_path(arm.profile, arm.heads) for arm in study.arms if arm.profile is not None]
    found = {"heads": heads, "profiles": {str(path): Profile.read(path).hash for path in files}}
    return {name: hashes for name, hashes in found.items() if hashes}


def _heads_hash(folder: str) -> str:
    from anydepth.models.heads_about import read_about

    found: str = read_about(folder)["sha256"]
    return found


def write_frozen(path: Path, frozen: Mapping[str, Any]) -> None:
    """Write a frozen file; ValueError where one is there already with other contents."""
    if path.exists() and read_frozen(path) != frozen:
        raise ValueError(
            f"{path} holds another frozen study; give another file, or delete it if nothing was run from it"
        )
    write_atomically(path, json.dumps(frozen, indent=1).encode() + b"\n")


def read_frozen(path: Path) -> dict[str, Any]:
    """A frozen file. ValueError for one that is missing, malformed, of another version, or edited."""
    if not path.is_file():
        raise ValueError(
            f"there is no frozen protocol {path}; write one with: anydepth eval --study FILE --freeze {path}"
        )
    frozen = read_versioned(path, what="no frozen protocol", version=VERSION)
    if frozen.get("study_hash") != _hash({key: value for key, value in frozen.items() if key != "study_hash"}):
        raise ValueError(f"{path} was edited after it was frozen (its study_hash does not fit); freeze the study anew")
    return frozen


def study_of(frozen: Mapping[str, Any]) -> Study:
    """The study that a frozen file describes."""
    return Study.parse({"study": frozen["study"], "arm": frozen["arms"], "rule": frozen["rules"]})


def check_unchanged(frozen: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """ValueError naming every part of a frozen study that is not the same any more."""
    changed = [
        _change(key, frozen.get(key), now.get(key)) for key in frozen if key not in ("study_hash", "protocol_hash")
    ]
    if said := [change for change in changed if change]:
        raise ValueError(
            f"the study was frozen with something else: {'; '.join(said)}. Restore it, or freeze a new study: "
            f"results of the two must not be mixed"
        )


def _change(name: str, old: Any, new: Any) -> str | None:
    if old == new:
        return None
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        parts = [_change(f"{name}.{key}", old.get(key), new.get(key)) for key in {**old, **new}]
        return "; ".join(part for part in parts if part)
    if isinstance(old, list) and isinstance(new, list):
        at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        return f"{name} differ from entry {at} on ({len(old)} then, {len(new)} now)"
    return f"{name} was {old!r} and is {new!r}"


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
