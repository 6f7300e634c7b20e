"""Tasks of the lm-evaluation-harness, as they are but for their data, which come from local files.

lm-eval's own way to do this is a task file that includes another and says where the data are, in a folder of
`--include_path`. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anydepth.types import unknown


def write_local_tasks(given: Sequence[str], folder: Path, *, include_path: Sequence[str] = ()) -> None:
    """Write into `folder` a task file for each task of `given`, texts `TASK[:SPLIT]=FILE`.

    SPLIT is the split that the task evaluates, if left out. Rows must have the fields of the task's own data set.
    Example: write_local_tasks(["gsm8k_cot=gsm8k_test.jsonl"], folder): rows with `question` and `answer`.
    Raises ValueError for a file that is not there, an unknown task or split, and a split that the task reads too but
    that has no file.
    """
    from lm_eval.tasks import TaskManager

    asked: dict[str, list[tuple[str, Path]]] = {}
    for text in given:
        task, split, file = _parsed(text)
        asked.setdefault(task, []).append((split, file))
    index = TaskManager(include_path=list(include_path)).task_index
    for task, files in asked.items():
        if task not in index:
            raise ValueError(f"--local-data: {unknown('lm-eval task', task, index)}")
        config = index[task].cfg
        if config is None or "group" in config or "class" in config:
            raise ValueError(f"--local-data: {task} is no single task with a data set of its own; name its tasks")
        override = {
            "include": str(index[task].yaml_path),
            "tag": None,  # or the tag would shrink to this task
            "dataset_path": "json",
            "dataset_name": None,
            "custom_dataset": None,
            "dataset_kwargs": {"data_files": _splits(task, config, files), "cache_dir": str(folder / "cache")},
        }
        # JSON is YAML
        (folder / f"{len(list(folder.iterdir()))}.yaml").write_text(json.dumps(override), encoding="utf-8")


def _parsed(text: str) -> tuple[str, str, Path]:
    name, _, path = text.partition("=")
    task, _, split = name.partition(":")
    file = Path(path).expanduser().absolute()
    if not task or not path:
        raise ValueError(f"--local-data {text}: allowed: TASK=FILE or TASK:SPLIT=FILE")
    if not file.is_file() or file.suffix not in (".jsonl", ".json"):
        raise ValueError(f"--local-data {text}: there is no .jsonl or .json file {file}")
    return task, split, file


def _splits(task: str, config: Mapping[str, Any], files: Sequence[tuple[str, Path]]) -> dict[str, str]:
    """Split -> file, for every split that lm-eval reads of this task: few-shot examples are read even when none are
    shown."""
    evaluated = config.get("test_split") or config.get("validation_split")
    shots = config.get("fewshot_config") or {}
    source = config.get("fewshot_split") or shots.get("split")
    if source is None and "samples" not in shots:
        source = config.get("training_split") or config.get("validation_split")
    given = {split or str(evaluated): str(file) for split, file in files}
    if len(given) < len(files):
        raise ValueError(f"--local-data: a split of {task} is named a second time; give each once")
    read = [split for split in dict.fromkeys((evaluated, source)) if split is not None]
    for split in given:
        if split not in read:
            raise ValueError(f"--local-data: {unknown(f'split of {task}', str(split), read)}")
    for split in read:
        if split not in given:
            raise ValueError(
                f"--local-data: {task} also reads its split {split!r}"
                f"{' for examples' if split == source else ''}; give --local-data {task}:{split}=FILE too"
            )
    return given
