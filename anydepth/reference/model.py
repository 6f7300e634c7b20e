"""The two kinds of model, dense and slow, from their definitions alone.

Looped (Ouro, arXiv 2510.25741): `h_r = final_norm(stack(h_{r-1}))`, the same layers for every loop r = 1..R; a layer is
sandwich-normed, the normalised state is what the gate and the LM head read.
Layered (Llama family): segment k is a run of consecutive layers with their own weights; an inner readout is the model's
final norm and LM head.

Shapes: T positions, S positions seen, D hidden, V vocabulary, H heads, K key/value heads, C channels of a head. Depths,
segments and planes are counted 1..R. One request at a time, float32 or float64, no batch, no cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]
KV = tuple[Tensor, Tensor]


class Model:
    """Weights under their released names, and the arithmetic of one layer, one segment and one readout.

    config: a plain dict with the keys of a Hugging Face `config.json`; `total_ut_steps` makes the model a looped one.
    segments: layered models only, the ascending exit layers, the last of them `num_hidden_layers`: `[2, 4, 6]` makes
    three segments of two layers. None is one segment.
    """

    def __init__(self, config: Mapping[str, Any], weights: Weights, *, segments: Sequence[int] | None = None) -> None:
        self.config, self.weights = dict(config), weights
        self.looped = "total_ut_steps" in config
        self.num_layers = config["num_hidden_layers"]
        self.num_heads = config["num_attention_heads"]
        self.num_kv_heads = config.get("num_key_value_heads") or self.num_heads
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.num_heads
        self.max_positions = config["max_position_embeddings"]
        self.dtype = weights["model.embed_tokens.weight"].dtype
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"the reference computes in float32 or float64, not {self.dtype}")
        if config.get("rope_scaling"):
            raise ValueError("the reference knows plain RoPE only, not rope_scaling")
        if self.looped:
            if segments is not None:
                raise ValueError("segments split a layered model; this one is looped")
            self.segments = config["total_ut_steps"]
            self.layers_of = [range(self.num_layers)] * self.segments
        else:
            ends = list(segments) if segments is not None else [self.num_layers]
            starts = [0, *ends[:-1]]
            if ends[-1] != self.num_layers or any(a >= b for a, b in zip(starts, ends, strict=True)):
                raise ValueError(f"segments are {ends}: ascending exit layers, ending at {self.num_layers}")
            self.segments = len(ends)
            self.layers_of = [range(a, b) for a, b in zip(starts, ends, strict=True)]
        self.has_gate = self.looped and "model.early_exit_gate.weight" in weights

    # -- the pieces of a layer ---------------------------------------------------------------------------------------

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, name: str, x: Tensor) -> Tensor:
        """RMSNorm: x / sqrt(mean(x^2) + eps), then times the weight."""
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def rotate(self, x_THC: Tensor, positions: Sequence[int]) -> Tensor:
        """RoPE: channels c and c + C/2 are one plane, turned by position * theta^(-2c/C)."""
        half = self.head_dim // 2
        frequency = self.config["rope_theta"] ** -(torch.arange(half, dtype=self.dtype) * 2 / self.head_dim)
        angle = (torch.tensor(positions, dtype=self.dtype)[:, None] * frequency)[:, None, :]  # same for every head
        cos, sin = torch.cos(angle), torch.sin(angle)
        a, b = x_THC[..., :half], x_THC[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def qkv(self, layer: int, h_TD: Tensor, positions: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, C], keys [T, K, C] and values [T, K, C] of a layer, queries and keys after RoPE."""
        x = self.norm(f"model.layers.{layer}.input_layernorm", h_TD)
        attention = f"model.layers.{layer}.self_attn"
        q, k, v = (
            self.linear(f"{attention}.{name}_proj", x).reshape(len(h_TD), -1, self.head_dim) for name in ("q", "k", "v")
        )
        return self.rotate(q, positions), self.rotate(k, positions), v

    def attend(self, q_THC: Tensor, k_SKC: Tensor, v_SKC: Tensor) -> Tensor:
        """The last T of S positions attend to themselves and all before them; the result is [T, H * C]."""
        queries, seen = len(q_THC), len(k_SKC)
        hidden = torch.ones(queries, seen, dtype=torch.bool).triu(diagonal=seen - queries + 1)
        heads = []
        for head in range(self.num_heads):
            kv_head = head // (self.num_heads // self.num_kv_heads)
            scores = q_THC[:, head] @ k_SKC[:, kv_head].T / self.head_dim**0.5
            heads.append(torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1) @ v_SKC[:, kv_head])
        return torch.cat(heads, dim=-1)

    def after_attention(self, layer: int, h_TD: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer: output projection, residual, SwiGLU, residual."""
        name = f"model.layers.{layer}"
        x = self.linear(f"{name}.self_attn.o_proj", attended)
        h = h_TD + (self.norm(f"{name}.input_layernorm_2", x) if self.looped else x)
        x = self.norm(f"{name}.post_attention_layernorm", h)
        gate, up = self.linear(f"{name}.mlp.gate_proj", x), self.linear(f"{name}.mlp.up_proj", x)
        x = self.linear(f"{name}.mlp.down_proj", gate * torch.sigmoid(gate) * up)
        return h + (self.norm(f"{name}.post_attention_layernorm_2", x) if self.looped else x)

    def end_of_segment(self, h: Tensor) -> Tensor:
        """A loop ends with the final norm; a run of layers does not."""
        return self.norm("model.norm", h) if self.looped else h

    # -- into and out of the stack -----------------------------------------------------------------------------------

    def embed(self, ids: Sequence[int]) -> Tensor:
        return self.weights["model.embed_tokens.weight"][list(ids)]

    def readout(self, h: Tensor) -> Tensor:
        """Logits of a state at any depth; [D] -> [V] or [T, D] -> [T, V]."""
        x = h if self.looped else self.norm("model.norm", h)
        tied = self.config.get("tie_word_embeddings", False)
        return x @ self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T

    def gate_logit(self, h_D: Tensor) -> Tensor | None:
        """`g = w . h + b` of one state, a scalar; None for a model without a gate."""
        if not self.has_gate:
            return None
        return h_D @ self.weights["model.early_exit_gate.weight"][0] + self.weights["model.early_exit_gate.bias"][0]

    # -- whole sequences ---------------------------------------------------------------------------------------------

    def segment(self, k: int, h_TD: Tensor) -> tuple[Tensor, KV]:
        """Segment k over a whole sequence: the state after it, and its K and V, [layers, T, K, C] each."""
        positions = range(len(h_TD))
        keys, values = [], []
        for layer in self.layers_of[k - 1]:
            q, key, value = self.qkv(layer, h_TD, positions)
            h_TD = self.after_attention(layer, h_TD, self.attend(q, key, value))
            keys.append(key)
            values.append(value)
        return self.end_of_segment(h_TD), (torch.stack(keys), torch.stack(values))

    def dense(self, ids: Sequence[int]) -> tuple[list[Tensor], list[KV]]:
        """Everything about a sequence at full depth, nothing cached: the states h_1..h_R ([T, D] each) and R planes."""
        h, states, planes = self.embed(ids), [], []
        for k in range(1, self.segments + 1):
            h, plane = self.segment(k, h)
            states.append(h)
            planes.append(plane)
        return states, planes

    def truncated_logits(self, ids: Sequence[int], depth: int) -> Tensor:
        """Logits [T, V] of the model that has only its first `depth` segments, then its readout."""
        h = self.embed(ids)
        for k in range(1, depth + 1):
            h, _ = self.segment(k, h)
        return self.readout(h)
