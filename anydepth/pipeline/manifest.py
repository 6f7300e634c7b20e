"""The manifest: how a layered model is cut into segments, and which worker holds which of them where. Imports no torch.

model = "meta-llama/Llama-3.1-8B-Instruct"
heads = "runs/heads"                 # exit heads, a folder from this file's on; none: the model's own norm and head
segments = [4, 8, 12, 16]            # the last layer of each segment
readouts = [4, 16]                   # layers after which tokens may be read; all segments' ends unless given
replicas = 2                         # equal pipelines side by side
[[stage]]                            # one worker of every replica, in order
segments = [1, 2]
place = "process"                    # "here": a thread of this process, "process": one of its own, "ray": an actor
device = ["cuda:0", "cuda:1"]        # of replica 1, 2; one name for all
[[stage]]
segments = [3, 4]
place = "ray"
host = "node:10.0.0.2"               # a Ray resource that only that host has
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from anydepth.types import unknown

PLACES = ("here", "process", "ray")
ROUTING = ("round_robin", "least_loaded")
FILLS = ("full", "deferred", "project")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One worker of a pipeline: consecutive segments, counted from 1, and where they run. `device` and `host` have an
    entry for every replica."""

    segments: tuple[int, ...]
    place: str
    device: tuple[str, ...]
    host: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a manifest's file says.

    segments, readouts: layers. micro_batch: most decode rows that travel together; max_batch: requests a replica holds;
    kv_pages: pages of page_size positions in every worker, enough for max_batch requests of 1024 positions unless
    given; max_batched_tokens: prompt positions beside a micro-batch; queue: requests that may wait; threads: of each
    worker in a process of its own.
    """

    model: str
    segments: tuple[int, ...]
    stages: tuple[Stage, ...]
    heads: str | None = None
    readouts: tuple[int, ...] = ()
    replicas: int = 1
    routing: str = "round_robin"
    fill: str = "full"
    dtype: str | None = None
    micro_batch: int = 8
    max_batch: int = 32
    page_size: int = 16
    kv_pages: int = 0
    max_batched_tokens: int = 512
    queue: int = 256
    threads: int = 1

    @property
    def pages(self) -> int:
        """K/V pages in every worker."""
        return self.kv_pages or self.max_batch * -(-1024 // self.page_size)

    @property
    def in_flight(self) -> int:
        """Micro-batches that a replica may have under way: one in work and one waiting for each of its workers."""
        return 2 * len(self.stages)


def read_manifest(path: str | Path) -> Manifest:
    """From a TOML file. ValueError, naming the file, for what is missing, unknown or does not fit together."""
    path = Path(path).expanduser().absolute()
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} is no manifest ({error}); give a TOML file as docs/pipeline.md shows it") from error
    try:
        manifest = _manifest(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if manifest.heads is None:
        return manifest
    return replace(manifest, heads=str(path.parent / Path(manifest.heads).expanduser()))


def manifest_text(manifest: Manifest) -> str:
    """The TOML that is read as this manifest; what has its default is left out."""
    lines = _lines(manifest, but="stages")
    for stage in manifest.stages:
        lines += ["", "[[stage]]", *_lines(stage)]
    return "\n".join(lines) + "\n"


def _lines(content: Manifest | Stage, but: str | None = None) -> list[str]:
    """JSON's strings, whole numbers and lists of them are TOML's, too."""
    given = {field.name: getattr(content, field.name) for field in fields(content) if field.name != but}
    left_out = {field.name: field.default for field in fields(content)}
    return [
        f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in given.items() if value != left_out[name]
    ]


def _manifest(content: dict[str, Any]) -> Manifest:
    _known(content, [*(f.name for f in fields(Manifest) if f.name != "stages"), "stage"])
    stages = content.pop("stage", [])
    if not isinstance(content.get("model"), str):
        raise ValueError(f"model is {content.get('model')!r}; give the checkpoint's name or folder")
    for key in ("heads", "dtype", "routing", "fill"):
        if not isinstance(content.get(key, ""), str):
            raise ValueError(f"{key} is {content[key]!r}; allowed: a string")
    for key, allowed in (("routing", ROUTING), ("fill", FILLS)):
        if content.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{key} is {content[key]!r}; allowed: {', '.join(allowed)}")
    for field in fields(Manifest):
        if field.type == "int" and field.name in content:
            _whole(field.name, content[field.name])
    content["segments"] = _rising("segments", content.get("segments"))
    content["readouts"] = _rising("readouts", content.get("readouts", content["segments"]))
    if extra := [layer for layer in content["readouts"] if layer not in content["segments"]]:
        raise ValueError(f"readouts has {extra}, where no segment ends; allowed: {list(content['segments'])}")
    if content["segments"][-1] not in content["readouts"]:
        raise ValueError(f"readouts lacks {content['segments'][-1]}, the last layer, where every prompt is read")
    if not isinstance(stages, list) or not stages:
        raise ValueError("there is no [[stage]]; give one for every worker of the pipeline")
    replicas = content.get("replicas", 1)
    built = tuple(_stage(number, stage, replicas) for number, stage in enumerate(stages, 1))
    listed = [segment for stage in built for segment in stage.segments]
    if listed != list(range(1, len(content["segments"]) + 1)):
        raise ValueError(
            f"the stages hold segments {listed}; together and in order they must be 1 .. {len(content['segments'])}"
        )
    return Manifest(stages=built, **content)


def _stage(number: int, stage: Any, replicas: int) -> Stage:
    where = f"stage {number}"
    if not isinstance(stage, dict):
        raise ValueError(f"{where} is {stage!r}; write it as [[stage]]")
    _known(stage, [f.name for f in fields(Stage)])
    place = stage.get("place", "here")
    if place not in PLACES:
        raise ValueError(f"{where}: place is {place!r}; allowed: {', '.join(PLACES)}")
    if "host" in stage and place != "ray":
        raise ValueError(f"{where}: host is for place 'ray'; this stage has {place!r}")
    segments = _rising(f"{where}: segments", stage.get("segments"))
    device = _each(f"{where}: device", stage.get("device", "cpu"), replicas)
    host = _each(f"{where}: host", stage["host"], replicas) if "host" in stage else ()
    return Stage(segments=segments, place=place, device=device, host=host)


def _each(name: str, value: Any, replicas: int) -> tuple[str, ...]:
    """One string for every replica."""
    listed = [value] * replicas if isinstance(value, str) else value
    if not isinstance(listed, list) or len(listed) != replicas or not all(isinstance(one, str) for one in listed):
        raise ValueError(f"{name} is {value!r}; allowed: a string, or a list of one for each of {replicas} replicas")
    return tuple(listed)


def _rising(name: str, value: Any) -> tuple[int, ...]:
    whole = isinstance(value, list | tuple) and all(type(one) is int and one >= 1 for one in value)
    if not whole or not value or list(value) != sorted(set(value)):
        raise ValueError(f"{name} is {value!r}; allowed: a rising list of whole numbers from 1")
    return tuple(value)


def _whole(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}; allowed: whole numbers from 1")


def _known(content: dict[str, Any], names: Sequence[str]) -> None:
    for name in content:
        if name not in names:
            raise unknown("key", str(name), names)
