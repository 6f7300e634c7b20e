"""One process's share of a training of exit heads: heads, optimiser, place in the run, and the step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anydepth.dtypes import DTYPES, dtype_name
from anydepth.models.heads import ExitHeads
from anydepth.models.llama import Llama
from anydepth.models.load import Checkpoint
from anydepth.train import checkpoint as files
from anydepth.train.distil import MEASURED, Goal, Sums, Unembedding, auc, distil
from anydepth.train.head_fit import Fit, expected
from anydepth.train.head_recipe import HeadRecipe
from anydepth.train.packed import Order, Pack, exit_states, in_packs
from anydepth.train.parallel import Peers
from anydepth.train.prepared import Prepared
from anydepth.train.trained_head import TrainedHead


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step's measurements."""

    loss: float
    gradient_norm: float
    lr: float
    tokens: int
    answer_tokens: int
    flops: float
    seconds: float


def layered(checkpoint: Checkpoint) -> Llama:
    """Its model. ValueError where that has no inner layers to read."""
    if not isinstance(checkpoint.model, Llama):
        raise ValueError(f"{checkpoint.name} is no layered model; exit heads are for those of the Llama family")
    return checkpoint.model


class HeadTrainer:
    """One process's heads, optimiser and place in the run."""

    def __init__(self, checkpoint: Checkpoint, data: Prepared, recipe: HeadRecipe, peers: Peers) -> None:
        self.checkpoint, self.model, self.data, self.peers = checkpoint, layered(checkpoint), data, peers
        self.recipe = recipe.checked(self.model.shape.layers, self.model.shape.vocab)
        if int(data.ids.max()) >= self.model.shape.vocab:
            raise ValueError(
                f"the data has token {int(data.ids.max())}, the model a vocabulary of {self.model.shape.vocab}; "
                f"prepare the data for this model"
            )
        if self.recipe.accumulate % peers.count:
            raise ValueError(f"accumulate is {self.recipe.accumulate}; give a multiple of the {peers.count} processes")
        self.order = Order(data, tokens=self.recipe.tokens, seed=self.recipe.seed)
        self.heads, self._unembedding = self._new_heads(), Unembedding.packed(self.model)
        self.parameters = [tensor for head in self.heads for tensor in head.parameters()]
        probes = [tensor for head in self.heads for tensor in (head.probe_weight, head.probe_bias)]
        groups = [
            {
                "params": [t for t in self.parameters if all(t is not probe for probe in probes)],
                "largest": self.recipe.lr,
            },
            {"params": probes, "largest": self.recipe.probe_lr},
        ]
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self.progress = Progress()

    def _new_heads(self) -> list[TrainedHead]:
        r = self.recipe
        ids = self.data.frequent(r.shortlist, vocab=self.model.shape.vocab) if "shortlist" in r.kinds else None
        return [TrainedHead.new(kind, self.model, rank=r.rank, ids=ids) for kind in r.kinds]

    @property
    def dtype(self) -> str:
        """What the backbone computes in: other heads come of another."""
        return dtype_name(self.model.dtype)

    def schedule(self, step: int) -> float:
        """The share of the largest learning rate: linear warm-up, then a cosine to zero."""
        r = self.recipe
        done = max(0.0, (step - r.warmup) / max(1, r.steps - r.warmup))
        return min(1.0, (step + 1) / max(1, r.warmup)) * 0.5 * (1 + math.cos(math.pi * done))

    def step(self) -> Step:
        """One optimiser step. ValueError where the loss is no number: nothing is changed by it then."""
        r, now = self.recipe, self.progress
        if now.step == 0:
            self._begin()
        began = time.monotonic()
        first = now.step * r.accumulate
        packs = [self._pack(self.order(first + i)) for i in range(r.accumulate)]
        positions = sum(len(pack.targets_A) for pack in packs)
        self.adam.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for pack in packs[self.peers.rank :: self.peers.count]:
            sums = self._distil(self.heads, pack, share=1 / positions)
            kl, ce, bce = sums.total_6E[:3]
            weights = kl.new_tensor(r.weights)
            loss += (weights * (r.temperature**2 * kl + r.ce_weight * ce) + bce).sum() / positions
        total = self._sum_over_peers(loss)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, r.clip if r.clip else math.inf))
        if not math.isfinite(total) or not math.isfinite(norm):
            raise ValueError(
                f"the loss of step {now.step} is {total}, its gradient {norm}; the state saved last is kept. Begin in "
                f"another folder with a smaller lr (now {r.lr}), or look at the weights and data"
            )
        share = self.schedule(now.step)
        for group in self.adam.param_groups:
            group["lr"] = share * group["largest"]
        self.adam.step()
        tokens = sum(len(pack.ids_N) for pack in packs)
        seconds = time.monotonic() - began
        self.progress = Progress(
            step=now.step + 1,
            tokens=now.tokens + tokens,
            answer_tokens=now.answer_tokens + positions,
            seconds=now.seconds + seconds,
        )
        return Step(
            loss=total,
            gradient_norm=norm,
            lr=share * r.lr,
            tokens=tokens,
            answer_tokens=positions,
            flops=sum(self.flops(pack) for pack in packs),
            seconds=seconds,
        )

    def evaluate(self) -> list[dict[str, Any]]:
        """Of every exit, on held-out documents: means of what `distil` measures (KL and CE in nats; the share of rows
        that agree with full depth, that the head may answer, that the probe judges rightly), and the probe's AUC. After
        the last step, of heads as they are stored: rounded to `save_dtype`."""
        heads = self.heads
        if self.progress.step >= self.recipe.steps:
            heads = [head.stored(DTYPES[self.recipe.save_dtype]) for head in heads]
        documents = self.data.documents(held_out=True)
        some = min(len(documents), self.recipe.evaluate_documents)
        documents = [documents[n * len(documents) // some] for n in range(some)]  # of all sources
        packs = in_packs(documents, self.data.lengths(), tokens=self.recipe.tokens)
        seen = [self._distil(heads, self._pack(pack), share=None) for pack in packs]
        scores_AE, agrees_AE = torch.cat([s.probe_AE for s in seen]), torch.cat([s.agrees_AE for s in seen])
        mean_6E = torch.stack([s.total_6E for s in seen]).sum(0) / len(scores_AE)
        return [
            {
                "step": self.progress.step,
                "exit": layer,
                **dict(zip(MEASURED, mean_6E[:, e].tolist(), strict=True)),
                "probe_auc": auc(scores_AE[:, e], agrees_AE[:, e]),
                "tokens": len(scores_AE),
            }
            for e, layer in enumerate(self.recipe.exits)
        ]

    def flops(self, pack: Pack) -> float:
        """The backbone and its readout once, the heads forward and backward."""
        depths = range(1, self.model.shape.segments + 1)
        segment, both = (
            sum(self.model.cost("segment", k, context).flops_per_row for k in depths) for context in (0, 1)
        )
        attention = both - segment
        seen = sum(length * (length + 1) / 2 for length in pack.lengths)
        readout = self.model.cost("readout", 1, 0.0).flops_per_row
        own = readout + sum(head.flops(self.model) for head in self.heads)
        return len(pack.ids_N) * segment + seen * attention + len(pack.targets_A) * own

    def save(self, path: Path) -> None:
        """Write everything that a resumed run needs."""
        state = {
            "version": 2,
            **self._identity(),
            "progress": asdict(self.progress),
            "heads": [tensor.detach() for tensor in self.parameters],
            "buffers": [head.buffers() for head in self.heads],
            "adam": self.adam.state_dict(),
        }
        files.save_state(path, state)

    def load(self, path: Path) -> None:
        """Continue from a state. ValueError where it belongs to another run."""
        state = files.load_state(path)
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"{path} was made with {name} = {state.get(name)!r}, this run has {value!r}; give the same, or "
                    f"another output folder (--restart begins anew)"
                )
        self.progress = Progress(**state["progress"])
        with torch.no_grad():
            for tensor, saved in zip(self.parameters, state["heads"], strict=True):
                tensor.copy_(saved)
            for head, saved in zip(self.heads, state["buffers"], strict=True):
                for buffer, value in zip(head.buffers(), saved, strict=True):
                    buffer.copy_(value)
        self.adam.load_state_dict(state["adam"])

    def exit_heads(self, about: Mapping[str, Any]) -> ExitHeads:
        """As they are now."""
        named = list(zip(self.recipe.exits, self.heads, strict=True))
        return ExitHeads(
            model_hash=self.checkpoint.model_hash,
            heads={layer: head.head() for layer, head in named},
            probes={layer: head.probe() for layer, head in named},
            about=about,
        )

    def _identity(self) -> dict[str, Any]:
        learnt = {name: value for name, value in self.recipe.as_json().items() if name != "save_dtype"}
        return {"data": self.data.hash, "model": self.checkpoint.model_hash, "dtype": self.dtype, **learnt}

    def _pack(self, documents: Sequence[int]) -> Pack:
        return Pack.of(self.data, documents, mask_prompts=self.recipe.mask_prompts, device=self.model.device)

    def _begin(self) -> None:
        """Heads and probes' scales from the first micro-batches."""
        fits = [Fit(head, self.model) for head in self.heads]
        listed = [head.tensors["ids"] for head in self.heads if head.kind == "shortlist"]  # the same for all
        for index in range(max(1, self.recipe.fit)):
            *states, last = exit_states(self.model, self._pack(self.order(index)), self.recipe.exits)
            y_Ad, rest_A = expected(self.model, last, listed[0] if listed else None)
            for fit, h_Ad in zip(fits, states, strict=True):
                fit.add(h_Ad, y_Ad, rest_A)
        for fit in fits:
            fit.apply(head=self.recipe.fit > 0)

    def _distil(self, heads: Sequence[TrainedHead], pack: Pack, *, share: float | None) -> Sums:
        states = exit_states(self.model, pack, self.recipe.exits)
        goal = Goal(temperature=self.recipe.temperature, ce_weight=self.recipe.ce_weight)
        return distil(
            heads,
            self.model,
            states,
            pack.targets_A,
            goal=goal,
            weights=self.recipe.weights,
            share=share,
            unembedding=self._unembedding,
        )

    def _sum_over_peers(self, loss: Tensor) -> float:
        """The step's loss; gradients become the sums over all processes."""
        if self.peers.count > 1:
            grads = [tensor.grad if tensor.grad is not None else torch.zeros_like(tensor) for tensor in self.parameters]
            flat = torch.cat([*(grad.reshape(-1) for grad in grads), loss.to(grads[0]).reshape(1)])
            self.peers.sum(flat)
            *parts, loss = flat.split([*(grad.numel() for grad in grads), 1])
            for tensor, part in zip(self.parameters, parts, strict=True):
                tensor.grad = part.view(tensor.shape)
        return float(loss)
