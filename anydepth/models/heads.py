"""Exit heads: what reads an inner depth of a frozen layered model, and the folder that keeps them.

A head turns the state after segment k into logits of the whole vocabulary, or of the tokens that it lists; a probe into
one number, the logit of "this exit says what full depth would". Both belong to one backbone, whose hash they carry.

| kind | logits | numbers, d hidden, V vocabulary |
|---|---|---|
| `norm` | own RMSNorm, then the model's own unembedding | d |
| `low_rank` | own RMSNorm, x + (x a) b with a [d, r] and b [r, d], then the model's own unembedding | d (1 + 2 r) |
| `shortlist` | the same, but of the unembedding only the S tokens `ids`, and `other` for any other | d (2 + 2 r) + S |

A shortlist is kept as what it is made of and read as one table [d, S] and a column for "any other": the unembedding's
through the correction. It declines where "any other" is its largest logit: the row then goes on, though its policy lets
it go, unless it has reached its max_depth. Shape suffixes: as in `base.py`; S listed tokens, r rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anydepth.dtypes import dtype_name
from anydepth.models.base import Shape
from anydepth.models.decoder import rms_norm
from anydepth.models.heads_about import ABOUT, FILE, VERSION, read_about
from anydepth.ops.linear import linear
from anydepth.record import files_hash, write_atomically

# What each kind is read with, and what of it is kept.
KINDS = {"norm": ("norm",), "low_rank": ("norm", "a", "b"), "shortlist": ("norm", "table", "other", "ids")}
FILES = {**KINDS, "shortlist": ("norm", "a", "b", "other", "ids")}
PROBE = ("weight", "bias")


@dataclass(frozen=True)
class Head:
    """One exit's readout: `tensors` by the names of its kind in KINDS, or, to be kept or folded, in FILES."""

    kind: str
    tensors: Mapping[str, Tensor]

    def folded(self, unembedding_dV: Tensor) -> Head:
        """As it is read with: a shortlist's table made from the unembedding; others as they are."""
        if self.kind != "shortlist":
            return self
        return self.of_columns(unembedding_dV.index_select(1, self.tensors["ids"]))

    def of_columns(self, columns_dS: Tensor) -> Head:
        """A shortlist as it is read with, made from the unembedding's columns of its tokens."""
        own = self.tensors
        table = torch.cat((columns_dS.to(own["other"]), own["other"][:, None]), 1)
        table = table + own["a"] @ (own["b"] @ table)
        listed, other = table[:, :-1].contiguous(), table[:, -1].contiguous()
        return Head(self.kind, {"norm": own["norm"], "table": listed, "other": other, "ids": own["ids"]})

    def with_table(self, change: Callable[[Tensor], Tensor]) -> Head:
        """A shortlist with its table changed, packed say; one that is not folded, and others, as they are."""
        if "table" not in self.tensors:
            return self
        return Head(self.kind, {**self.tensors, "table": change(self.tensors["table"])})

    def logits(self, h_Nd: Tensor, unembedding_dV: Tensor, eps: float) -> Tensor:
        """[N, C], of the whole vocabulary or, of a shortlist, of its tokens in the order of `ids`."""
        x = rms_norm(h_Nd, self.tensors["norm"], eps)
        if self.kind == "low_rank":
            x = x + (x @ self.tensors["a"]) @ self.tensors["b"]
        if self.kind != "shortlist":
            return linear(x, unembedding_dV)
        return linear(x, self.tensors["table"])

    def over_vocabulary(self, logits_NC: Tensor, vocab: int) -> Tensor:
        """[N, V]: -inf for tokens that a shortlist leaves out."""
        if self.kind != "shortlist":
            return logits_NC
        full = logits_NC.new_full((len(logits_NC), vocab), float("-inf"))
        return full.index_copy(1, self.tensors["ids"], logits_NC)

    def answers(self, h_Nd: Tensor, logits_NC: Tensor, eps: float) -> Tensor:
        """[N] bool, whether a shortlist with these logits may answer: "any other" is not above all of them."""
        return logits_NC.amax(-1) >= rms_norm(h_Nd, self.tensors["norm"], eps) @ self.tensors["other"]


@dataclass(frozen=True)
class Probe:
    """The logit of "this exit's token is full depth's": weight [d], bias [1]."""

    weight: Tensor
    bias: Tensor

    def logit(self, h_Nd: Tensor) -> Tensor:
        """[N], in the dtype of h."""
        return h_Nd @ self.weight + self.bias


@dataclass(frozen=True, kw_only=True)
class ExitHeads:
    """Heads and probes by the layer after which they read, of the backbone with `model_hash`. An exit may have either,
    or both. `about` is what else heads.json says: how they were made."""

    model_hash: str
    heads: Mapping[int, Head]
    probes: Mapping[int, Probe]
    about: Mapping[str, Any]
    hash: str | None = None  # of the file they were read from

    @property
    def exits(self) -> tuple[int, ...]:
        """Layers after which there is a head or a probe, ascending."""
        return tuple(sorted({*self.heads, *self.probes}))

    def save(self, folder: str | Path, dtype: torch.dtype | None = None) -> Path:
        """Write heads.safetensors, numbers in `dtype` or as they are, and heads.json; what lies there of earlier ones
        is replaced. ValueError, before that, for numbers that are not finite, in `dtype`."""
        for head in self.heads.values():
            assert head.tensors.keys() == {*FILES[head.kind]}, "a head that was folded cannot be read again"
        tensors = {f"exit.{n}.head.{name}": t for n, head in self.heads.items() for name, t in head.tensors.items()}
        for n, probe in self.probes.items():
            tensors |= {f"exit.{n}.probe.weight": probe.weight, f"exit.{n}.probe.bias": probe.bias}
        kept = {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in tensors.items()}
        if wrong := [n for n, t in kept.items() if t.is_floating_point() and not bool(t.isfinite().all())]:
            raise ValueError(
                f"{wrong[0]} has numbers that are not finite in {dtype_name(kept[wrong[0]].dtype)}; "
                f"give dtype float32 (the same training with --save-dtype float32 goes on from its end)"
            )
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        whole = folder / f"{FILE}.new"
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in kept.items()}, whole)
        whole.replace(folder / FILE)
        content = {
            "version": VERSION,
            "model_hash": self.model_hash,
            "exits": {str(n): self.heads[n].kind if n in self.heads else None for n in self.exits},
            "sha256": files_hash([folder / FILE]),
            **self.about,
        }
        write_atomically(folder / ABOUT, json.dumps(content, indent=1).encode() + b"\n")
        return folder


def load_heads(
    folder: str | Path, *, model_hash: str, shape: Shape, unembedding_dV: Tensor | None, dtype: torch.dtype | None
) -> ExitHeads:
    """Heads that were saved, for a backbone, ready to read with; without its unembedding and a dtype as they are kept.
    ValueError for ones of another backbone, of another width or vocabulary, for exits that are no layer of it, and for
    files that are missing, corrupt or not as they were written."""
    folder, about = Path(folder).expanduser(), read_about(folder)
    check_backbone(folder, about, model_hash)
    found = files_hash([folder / FILE])
    if found != about["sha256"]:
        raise ValueError(f"{folder / FILE} is not the file that {ABOUT} describes (its sha256 differs); get both again")
    tensors = _read(folder / FILE, dtype, torch.device("cpu") if unembedding_dV is None else unembedding_dV.device)
    heads, probes = dict[int, Head](), dict[int, Probe]()
    for layer, kind in ((int(n), kind) for n, kind in about["exits"].items()):
        if not 1 <= layer < shape.layers:
            raise ValueError(f"{folder}: exit after layer {layer}; allowed: 1 .. {shape.layers - 1}, inner layers")
        own = {name: tensors.pop(f"exit.{layer}.head.{name}", None) for name in FILES.get(kind, ())}
        if kind is not None:
            head = Head(kind, _checked(folder, layer, kind, own, shape))
            heads[layer] = head if unembedding_dV is None else head.folded(unembedding_dV)
        numbers = [tensors.pop(f"exit.{layer}.probe.{name}", None) for name in PROBE]
        if any(tensor is not None for tensor in numbers):
            probes[layer] = _checked_probe(folder, layer, *numbers, hidden=shape.hidden)
        elif kind is None:
            raise ValueError(f"{folder}: the exit after layer {layer} has neither a head nor a probe; get heads again")
    if tensors:
        raise ValueError(f"{folder / FILE} holds what {ABOUT} does not name: {', '.join(sorted(tensors)[:3])}")
    rest = {key: value for key, value in about.items() if key not in ("version", "model_hash", "exits", "sha256")}
    return ExitHeads(model_hash=model_hash, heads=heads, probes=probes, about=rest, hash=found)


def check_backbone(folder: str | Path, about: Mapping[str, Any], model_hash: str) -> None:
    """ValueError for heads of another backbone than the one with this hash."""
    if about["model_hash"] != model_hash:
        raise ValueError(
            f"{folder}: these heads were made for the backbone {about['model_hash'][:16]}, this one is "
            f"{model_hash[:16]}; heads belong to one backbone, train some for this one"
        )


def _checked(
    folder: Path, layer: int, kind: str, tensors: Mapping[str, Tensor | None], shape: Shape
) -> dict[str, Tensor]:
    """The tensors of a head, if they are those of its kind and fit the backbone."""
    if kind not in KINDS:
        raise ValueError(f"{folder}: head of kind {kind!r} after layer {layer}; allowed: {', '.join(KINDS)}")
    there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if missing := sorted(tensors.keys() - there.keys()):
        raise ValueError(f"{folder}: the {kind} head after layer {layer} lacks {', '.join(missing)}")
    hidden, ids = shape.hidden, there.get("ids")
    rank = there["a"].shape[-1] if "a" in there else 0
    wanted = {"norm": (hidden,), "a": (hidden, rank), "b": (rank, hidden), "other": (hidden,)}
    if ids is not None:
        wanted["ids"] = (len(ids),)
        if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= shape.vocab or len(ids.unique()) < len(ids):
            raise ValueError(
                f"{folder}: the head after layer {layer} lists tokens that are not those of the vocabulary"
            )
    for name, tensor in there.items():
        if tuple(tensor.shape) != wanted[name]:
            raise ValueError(
                f"{folder}: {name} of the {kind} head after layer {layer} is {tuple(tensor.shape)}, for this backbone "
                f"it is {wanted[name]}"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{folder}: {name} of the head after layer {layer} has numbers that are not finite")
    return there


def _checked_probe(folder: Path, layer: int, weight: Tensor | None, bias: Tensor | None, *, hidden: int) -> Probe:
    if weight is None or bias is None:
        raise ValueError(f"{folder}: the probe after layer {layer} lacks its {'weight' if weight is None else 'bias'}")
    if weight.shape != (hidden,) or bias.shape != (1,):
        raise ValueError(f"{folder}: the probe after layer {layer} is not for states of {hidden} numbers")
    if not bool(torch.cat((weight, bias)).isfinite().all()):
        raise ValueError(f"{folder}: the probe after layer {layer} has numbers that are not finite")
    return Probe(weight, bias)


def _read(path: Path, dtype: torch.dtype | None, device: torch.device) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            read = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or no safetensors file ({error}); get it again") from error
    return {name: t.to(device, dtype if t.is_floating_point() else None) for name, t in read.items()}


def exit_segments(heads: ExitHeads, exits: Sequence[int]) -> dict[int, int]:
    """Layer -> segment of every exit that heads have; ValueError where the model is not split there."""
    missing = [layer for layer in heads.exits if layer not in exits]
    if missing:
        raise ValueError(
            f"the heads read after layers {list(heads.exits)}, but the segments end after {list(exits)}; "
            f"give segments={[*heads.exits, exits[-1]]}"
        )
    return {layer: 1 + list(exits).index(layer) for layer in heads.exits}
