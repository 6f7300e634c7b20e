"""A benchmark's rows as a Record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from anydepth.models.load import Checkpoint
from anydepth.provenance import provenance
from anydepth.record import HEADER, Record, RecordWriter, remove


def write_rows(
    out: Path, *, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], checkpoint: Checkpoint
) -> Record:
    """Write one sample a row into the folder `out`, replacing the benchmark Record that may be there."""
    if (out / HEADER).exists():
        if Record.read(out, samples=False).kind != "bench":
            raise ValueError(f"{out} holds a Record of something else; give another folder")
        remove(out)
    about = provenance(
        threads=torch.get_num_threads(),
        model={"name": checkpoint.name, "hash": checkpoint.model_hash},
        tokenizer={"hash": checkpoint.tokenizer_hash},
    )
    with RecordWriter(out, kind="bench", settings_used=settings, settings_passed={}, provenance=about) as writer:
        for index, row in enumerate(rows):
            writer.append({"id": str(index), "answer_index": 0, **row})
        return writer.finish({"rows": list(rows)})
