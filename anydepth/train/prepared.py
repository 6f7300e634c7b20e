"""Tokenised training data of exit heads, as `head_data.py` leaves it in a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from anydepth.models.load import Checkpoint
from anydepth.record import files_hash, read_versioned

VERSION, MANIFEST = 1, "manifest.json"
HELD_OUT_SHARE = 0.1  # enough prompts for thresholds to be fitted and certified on
_KEYS = ("ids", "lengths", "prompts", "numbers")


def prompt_number(prompt: str) -> int:
    """63 bits of a prompt's sha256: documents of one prompt are held out together."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") >> 1


def held_out(prompt: str) -> bool:
    """Whether documents of this prompt are kept for evaluation and calibration, one in ten."""
    return prompt_number(prompt) < HELD_OUT_SHARE * 2**63


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Documents one after the other. Document i has the ids `ids[starts[i] : starts[i + 1]]`, the first `prompts[i]` of
    them its prompt; `held_out[i]`: for evaluation only."""

    ids: Tensor
    starts: Tensor
    prompts: Tensor
    held_out: Tensor
    manifest: Mapping[str, Any]
    hash: str

    def __len__(self) -> int:
        return len(self.prompts)

    def documents(self, *, held_out: bool) -> list[int]:
        """Numbers of the documents to train on, or to evaluate with."""
        return torch.nonzero(self.held_out == held_out).flatten().tolist()

    def document(self, index: int) -> tuple[Tensor, int]:
        """Its ids as int64, and how many of them are prompt."""
        return self.ids[int(self.starts[index]) : int(self.starts[index + 1])].long(), int(self.prompts[index])

    def lengths(self) -> list[int]:
        """Tokens of every document."""
        return self.starts.diff().tolist()

    def frequent(self, count: int, *, vocab: int) -> Tensor:
        """The `count` most frequent tokens of the answers trained on, ascending; of equally frequent ones the lower."""
        counts = torch.zeros(vocab, dtype=torch.int64)
        for index in self.documents(held_out=False):
            ids, prompt = self.document(index)
            counts += torch.bincount(ids[prompt:], minlength=vocab)
        return counts.argsort(descending=True, stable=True)[:count].sort().values


def load_prepared(folder: Path, checkpoint: Checkpoint) -> Prepared:
    """What `prepare` finished. ValueError where it has not, was changed since, or is of another tokenizer."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(
            f"no data was named (--data, --own-answers), and {folder} has no {MANIFEST}: nothing is prepared there"
        )
    manifest = read_versioned(folder / MANIFEST, what="no manifest of prepared data", version=VERSION)
    if manifest["tokenizer_hash"] != checkpoint.tokenizer_hash:
        raise ValueError(
            f"{folder} was tokenised with another vocabulary ({str(manifest['tokenizer_hash'])[:16]}) than that of "
            f"{checkpoint.name} ({str(checkpoint.tokenizer_hash)[:16]}); prepare the data for this model"
        )
    parts = []
    for name, sha256 in manifest["shards"].items():
        if not (folder / name).is_file() or files_hash([folder / name]) != sha256:
            raise ValueError(f"{folder / name} is missing or was changed; remove it and prepare again")
        parts.append(load_file(folder / name))
    ids, lengths, prompts, numbers = (torch.cat([part[key] for part in parts]) for key in _KEYS)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.long().cumsum(0)))
    held = numbers < HELD_OUT_SHARE * 2**63
    if not held.any():  # little data: what is nearest to being held out
        held = numbers == numbers.min()
    if bool(held.all()):
        raise ValueError(f"{folder} has documents of one prompt only; some must be held out: give more prompts")
    return Prepared(
        ids=ids,
        starts=starts,
        prompts=prompts,
        held_out=held,
        manifest=manifest,
        hash=hashlib.sha256(json.dumps(manifest["shards"]).encode()).hexdigest(),
    )
