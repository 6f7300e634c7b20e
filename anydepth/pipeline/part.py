"""What one worker holds of a layered model: its segments, and what reads and embeds there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from anydepth.dtypes import DTYPES
from anydepth.models.base import KV
from anydepth.models.decoder import Layer, LayerShape, Rotary
from anydepth.models.heads import FILES, Head, Probe
from anydepth.models.llama import Llama, rope
from anydepth.models.load import copy
from anydepth.models.weights import EMBEDDING, HEAD
from anydepth.ops.linear import pack
from anydepth.pipeline.export import COLUMNS, NORM, Artifact
from anydepth.types import Shape, unknown


class Part(Llama):
    """Consecutive segments of a Llama. What belongs to other workers is on the meta device: it has no storage here.

    `own`: its segments. `plane_shape`: the Shape of its K/V pool, in which its first layer is layer 0.
    """

    def __init__(self, artifacts: Sequence[Artifact], *, dtype: str | None, device: str) -> None:
        config, target = artifacts[0].config, torch.device(device)
        name = dtype or (artifacts[0].dtype if target.type != "cpu" else "float32")
        if name not in DTYPES:
            raise unknown("dtype", name, DTYPES)
        number = DTYPES[name]
        super().__init__(config, dtype=number, device=torch.device("meta"), segments=list(artifacts[0].segments))
        self.device, self.own = target, tuple(artifact.segment for artifact in artifacts)
        layer = LayerShape.from_config(config, sandwich=False)
        first, last = (self.shape.segment_layers[self.own[end] - 1] for end in (0, -1))
        self.first_layer = first.start
        self.plane_shape: Shape = replace(self.shape, segment_layers=(range(last.stop - first.start),))
        slots: dict[str, Tensor] = {}
        for index in range(first.start, last.stop):
            self.layers[index] = Layer(layer, dtype=number, device=target)
            slots |= self.layers[index].slots(f"model.layers.{index}.")
        names = {name for artifact in artifacts for name in artifact.tensors}
        slots |= self._outer(names)
        for artifact in artifacts:
            tensors = artifact.read()
            self._read_exit(artifact, tensors)
            for name in artifact.tensors:
                if name in slots:
                    copy(tensors[name], slots[name])
        del slots  # its views would keep what is packed
        theta, factors = rope(config, self.shape.head_dim)
        positions = self.shape.max_positions
        self.rotary = Rotary(layer.head_dim, theta, positions, dtype=number, device=target, factors=factors)
        self.pack()

    @property
    def is_first(self) -> bool:
        return self.own[0] == 1

    def segment(self, k: int, h_Nd: Tensor, kv: KV) -> Tensor:
        """The layers of segment k, one of its own."""
        rotary = self.rotary.turn(kv.positions)
        for index in self.shape.segment_layers[k - 1]:
            h_Nd = self.layers[index].forward(index - self.first_layer, h_Nd, rotary, kv)
        return h_Nd

    def pack(self) -> None:
        """As in `Llama`, for the layers it has; and the LM head, where it is not the embedding too."""
        with torch.no_grad():
            for layer in self.layers:
                if not layer.qkv.is_meta:
                    layer.each_matrix(pack)
            if not (self.tied and self.is_first) and not self.head.is_meta:
                self.head = pack(self.head)
            self.each_table(pack)

    def held(self) -> dict[str, int]:
        """Bytes by name of every tensor it has storage for."""
        found = {"embedding": self.embedding, "head": self.head, "norm": self.norm}
        for index, layer in enumerate(self.layers):
            found |= {f"layers.{index}.{n}": tensor for n, tensor in enumerate(layer.parameters())}
        for k, head in self.heads.items():
            found |= {f"exit.{k}.{name}": tensor for name, tensor in head.tensors.items()}
        for k, probe in self.probes.items():
            found[f"exit.{k}.probe"] = probe.weight
        return {name: t.numel() * t.element_size() for name, t in found.items() if not t.is_meta}

    def _outer(self, names: set[str]) -> dict[str, Tensor]:
        """Storage for embedding, norm and LM head, as far as its artifacts have them."""
        hidden, vocab, slots = self.shape.hidden, self.shape.vocab, dict[str, Tensor]()
        if HEAD in names or (self.tied and EMBEDDING in names):
            self.head = torch.empty(hidden, vocab, dtype=self.dtype, device=self.device)
            slots[HEAD] = self.head.t()
        if EMBEDDING in names:
            shape = (vocab, hidden)
            self.embedding = slots[HEAD] if self.tied else torch.empty(shape, dtype=self.dtype, device=self.device)
            slots[EMBEDDING] = self.embedding
        if NORM in names:
            slots[NORM] = self.norm = torch.empty(hidden, dtype=self.dtype, device=self.device)
        return slots

    def _read_exit(self, artifact: Artifact, tensors: Mapping[str, Tensor]) -> None:
        there = {name: t.to(self.device, self.dtype if t.is_floating_point() else None) for name, t in tensors.items()}
        if artifact.head is not None:
            head = Head(artifact.head, {name: there[f"head.{name}"] for name in FILES[artifact.head]})
            self.heads[artifact.segment] = head.of_columns(there[COLUMNS]) if COLUMNS in there else head
        if artifact.probe:
            self.probes[artifact.segment] = Probe(there["probe.weight"], there["probe.bias"])
