"""One exit's head and probe while they are trained. Shape suffixes: as in `distil.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from anydepth.models.decoder import rms_norm
from anydepth.models.heads import Head, Probe
from anydepth.models.llama import Llama


class TrainedHead:
    """Head and probe of one exit, in float32 or wider. Numbers of a state differ a thousandfold in scale, and the same
    small step on each would be a large one on some. So the probe learns on states brought to mean 0 and deviation 1,
    and of the head's `tensors` those in `units` are learnt as multiples of these: `own` is what they mean."""

    def __init__(self, kind: str, tensors: dict[str, Tensor], hidden: int) -> None:
        self.kind, self.tensors = kind, tensors
        self.units = {name: torch.ones_like(tensors[name]) for name in ("a", "b", "other") if name in tensors}
        like = tensors["norm"]
        self.probe_weight, self.probe_bias = like.new_zeros(hidden), like.new_zeros(1)
        self.mean, self.scale = like.new_zeros(hidden), like.new_ones(hidden)
        for tensor in self.parameters():
            tensor.requires_grad_()

    @classmethod
    def new(cls, kind: str, model: Llama, *, rank: int, ids: Tensor | None) -> TrainedHead:
        """One that reads as the model's own final norm and unembedding do (a shortlist: of the tokens `ids`)."""
        wide = torch.promote_types(model.dtype, torch.float32)
        norm, d = model.norm.to(wide, copy=True), model.shape.hidden
        rank = min(rank, d)
        tensors = {"norm": norm}
        if kind != "norm":
            tensors |= {"a": torch.eye(d, rank, dtype=wide, device=norm.device), "b": norm.new_zeros(rank, d)}
        if kind == "shortlist":
            assert ids is not None
            tensors |= {"other": norm.new_zeros(d), "ids": ids.to(norm.device)}
        return cls(kind, tensors, d)

    def parameters(self) -> list[Tensor]:
        """What is trained, in one fixed order."""
        own = [tensor for tensor in self.tensors.values() if tensor.is_floating_point()]
        return [*own, self.probe_weight, self.probe_bias]

    def own(self, name: str) -> Tensor:
        """A tensor as the head that is read with has it."""
        return self.tensors[name] * self.units[name] if name in self.units else self.tensors[name]

    def buffers(self) -> list[Tensor]:
        """What is not trained, but begun with."""
        return [self.mean, self.scale, *self.units.values()]

    @torch.no_grad()
    def begin(self, x_d: Tensor, y_d: Tensor, **values: Tensor) -> None:
        """Units from the root mean squares of what comes in and what is read, and values to begin with; without a
        value a tensor keeps what it means."""
        units = {"a": 1 / x_d[:, None], "b": y_d, "other": 1 / y_d}
        for name, unit in self.units.items():
            value = values.get(name, self.own(name)).to(unit)
            unit.copy_(units[name].expand_as(unit))
            self.tensors[name].copy_(value / unit)

    def features(self, h_Ad: Tensor, eps: float) -> Tensor:
        """What the columns multiply, [A, d]."""
        x = rms_norm(h_Ad, self.tensors["norm"], eps)
        return x if self.kind == "norm" else x + (x @ self.own("a")) @ self.own("b")

    def probe_logits(self, h_Ad: Tensor) -> Tensor:
        """[A]."""
        return ((h_Ad - self.mean) / self.scale) @ self.probe_weight + self.probe_bias

    def head(self) -> Head:
        """As it is now, to read with or to save."""
        return Head(self.kind, {name: self.own(name).detach().clone() for name in self.tensors})

    def probe(self) -> Probe:
        """As it is now, for raw states."""
        weight = self.probe_weight.detach().double() / self.scale.double()
        bias = self.probe_bias.detach().double() - (weight * self.mean.double()).sum()
        return Probe(weight.to(self.probe_weight.dtype), bias.to(self.probe_bias.dtype))

    def stored(self, dtype: torch.dtype) -> TrainedHead:
        """What reads as this one does after its numbers were kept in a file of `dtype`."""

        def rounded(tensor: Tensor) -> Tensor:
            return tensor.to(dtype).to(tensor) if tensor.is_floating_point() else tensor

        head, probe = self.head(), self.probe()
        found = TrainedHead(self.kind, {name: rounded(t) for name, t in head.tensors.items()}, len(self.mean))
        with torch.no_grad():
            found.probe_weight.copy_(rounded(probe.weight))
            found.probe_bias.copy_(rounded(probe.bias))
        return found

    def flops(self, model: Llama) -> float:
        """A position's, forward and backward: no gradient of the model's own unembedding, nor of columns of it."""
        product = 2.0 * model.shape.hidden
        columns = len(self.tensors["ids"]) + 1 if self.kind == "shortlist" else model.shape.vocab
        rank = self.tensors["a"].shape[1] if self.kind != "norm" else 0
        return 2 * product * columns + 3 * 2 * product * rank + 2 * product
