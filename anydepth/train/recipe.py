"""What a run of looped pretraining is made of, in one frozen object, and the weights it starts from."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from anydepth.models.nano.tokenizer import EOS, IDS, PAD, VOCABULARY
from anydepth.models.ouro import Ouro


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyperparameters. The defaults are those of the shipped nano; `tiny()` is for tests.

    Phase A teaches single questions through a curriculum of growing hop depth and ends by accuracy; B adds pairs and
    explanations; C trains against copied K/V. One step is two micro-batches of `rows` packed rows each.
    """

    hidden: int = 64
    inner: int = 192
    heads: int = 4
    layers: int = 2
    loops: int = 4
    max_positions: int = 256
    # Rows of a micro-batch, how many of them explain (phases B and C), questions in each other row.
    rows: int = 64
    why_rows: int = 14
    asked: int = 5
    # Rows that go through the model at once; memory and cache, not results up to rounding.
    rows_per_chunk: int = 16
    warmup: int = 50
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    # Weight of an answer token that is a computed number, before normalisation to a mean of 1.
    computed_weight: float = 3.0
    entropy: float = 0.1
    clip: float = 1.0
    # Curriculum: next level when the running mean of full-depth accuracy on computed numbers exceeds this.
    level_accuracy: float = 0.85
    # A stuck start never recovers: level 1 must be reached within so many steps.
    escape_steps: int = 400
    # Phase A ends at level 6 with this accuracy after at least / at most so many steps there, or at the cap.
    end_accuracy: float = 0.95
    end_steps: tuple[int, int] = (100, 450)
    cap_a: int = 1600
    steps_b: int = 650
    decay_b: float = 0.5
    steps_c: int = 300
    decay_c: float = 0.7
    # Phase C runs at this share of the learning rates; an answer position keeps full depth this often, else 1..R.
    lr_c: float = 0.5
    full_depth: float = 0.3
    save_every: int = 50

    @staticmethod
    def tiny(**changes: Any) -> Recipe:
        """A few steps of a model of a few thousand weights; for tests."""
        small: dict[str, Any] = {
            "hidden": 16,
            "inner": 32,
            "layers": 1,
            "loops": 2,
            "rows": 4,
            "why_rows": 1,
            "rows_per_chunk": 2,
            "cap_a": 6,
            "steps_b": 4,
            "steps_c": 4,
            "warmup": 2,
            "save_every": 2,
        }
        return Recipe(**small | changes)

    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json, in the released Ouro keys."""
        return {
            "architectures": ["OuroForCausalLM"],
            "model_type": "ouro",
            "vocab_size": len(VOCABULARY),
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "head_dim": self.hidden // self.heads,
            "total_ut_steps": self.loops,
            "early_exit_threshold": 1.0,
            "max_position_embeddings": self.max_positions,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eos_token_id": IDS[EOS],
            "pad_token_id": IDS[PAD],
            "bos_token_id": None,
            "torch_dtype": "float32",
        }

    def as_json(self) -> dict[str, Any]:
        """Plain values, as a training state stores them."""
        return asdict(self) | {"end_steps": list(self.end_steps)}


# Branches start small beside a residual stream of unit size, or the tokens drown in them.
_POST_NORM, _MATRIX = 0.3, 0.7
_COMMON, _LOOK_BACK_LOGIT = 0.7, 3.0


def initial_model(recipe: Recipe, *, seed: int) -> Ouro:
    """A model that can learn to look things up within a hundred steps or so. Weights require gradients.

    Three choices matter, each without which training sat for hundreds of steps at guessing a number of the context:
    unit-size embeddings under small branches; W_k = W_q and W_o = W_v^T, orthogonal (alike tokens attend to each
    other, and attention copies); and three heads of layer 0 that start out looking 1, 2 and 3 tokens back.
    """
    model = Ouro(recipe.config(), dtype=torch.float32, device=torch.device("cpu"))
    random = torch.Generator().manual_seed(seed)
    d = recipe.hidden

    def normal(tensor: Tensor, std: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=random) * std)

    def orthogonal() -> Tensor:
        return torch.linalg.qr(torch.randn(d, d, generator=random)).Q

    with torch.no_grad():
        normal(model.embedding, 1.0)
        normal(model.head, d**-0.5)
        model.norm.fill_(1.0)
        model.gate_weight.zero_()
        model.gate_bias.fill_(-1.0)
        for layer in model.layers:
            normal(layer.gate_up, _MATRIX * d**-0.5)
            normal(layer.down, _MATRIX * d**-0.5)
            query, value = orthogonal(), orthogonal()
            layer.qkv.copy_(torch.cat((query, query, value), 1))
            layer.o.copy_(value.t())
            for index, norm in enumerate(layer.norms):
                norm.fill_(_POST_NORM if index in (1, 3) else 1.0)
        _look_back(model, random)
    for tensor in parameters(model):
        tensor.requires_grad_()
    return model


def _look_back(model: Ouro, random: torch.Generator) -> None:
    """Let heads 0, 1, 2 of layer 0 attend 1, 2, 3 tokens back, by a direction u that all embeddings share.

    The key of every token gets the same vector c, the query the same c turned back by the offset, so the rotated pair
    is largest where the positions differ by it. The fastest half of the RoPE pairs is enough to tell the offsets apart.
    """
    d, size = model.shape.hidden, model.shape.head_dim
    common = torch.randn(d, generator=random)
    common *= _COMMON * d**0.5 / common.norm()
    model.embedding.mul_(_COMMON).add_(common)
    reader = common / common.square().sum()
    half = size // 2
    pairs = max(1, size // 4)
    frequencies = 10000.0 ** (-torch.arange(pairs) * 2 / size)
    length = math.sqrt(_LOOK_BACK_LOGIT * size**0.5 / pairs)
    qkv = model.layers[0].qkv
    for head in range(min(3, model.shape.heads - 1)):
        phases = torch.rand(pairs, generator=random) * 2 * math.pi
        for start, turned in ((0, phases - (head + 1) * frequencies), (d, phases)):
            wanted = torch.zeros(size)
            wanted[:pairs], wanted[half : half + pairs] = length * turned.cos(), length * turned.sin()
            columns = qkv[:, start + head * size : start + (head + 1) * size]
            columns.mul_(0.1).add_(torch.outer(reader, wanted))


def matrices(model: Ouro) -> list[Tensor]:
    """The stack's matrices, Muon's share."""
    return [matrix for layer in model.layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)]


def others(model: Ouro) -> list[Tensor]:
    """Embedding, head, norms and gate, AdamW's share."""
    norms = [norm for layer in model.layers for norm in layer.norms]
    return [model.embedding, model.head, model.norm, model.gate_weight, model.gate_bias, *norms]


def parameters(model: Ouro) -> list[Tensor]:
    """All weights, in one fixed order."""
    return matrices(model) + others(model)
