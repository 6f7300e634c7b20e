"""Ouro (arXiv 2510.25741) for transformers: the same layers run R times, and a gate says after which loop to read.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model.generate(**inputs, exit_threshold=0.5)  # or exit_at_step=2; with neither, every token is read at full depth

h_0 = embed(ids); h_r = final_norm(stack(h_{r-1})); the normalised state is what the next loop, the gate and the LM head
read. All R loops are always computed: an exit chooses which of them is read, it saves no work. Loop u (from 0) of layer
l keeps its keys and values in slot u * num_hidden_layers + l of the cache, which therefore has R slots a layer.

Exits, with hazards l_r = sigmoid(gate logit r):
- `exit_at_step=s` reads loop s, counted from 0, and wins over the threshold.
- `exit_threshold=tau` reads the first loop at which 1 - prod_{j<=r}(1 - l_j) >= tau; the last loop where there is none.
  Float32 and float64 models: the hazard in the model's precision, the product in float64, and tau >= 1 means off. A
  bfloat16 or float16 model repeats the released arithmetic: exit probability, its running sum and tau are rounded to
  the model's precision. In bfloat16 a hazard is 1 from a logit of 6.24 on, so that even tau = 1 may leave early.
- With neither, the last loop is read: `config.early_exit_threshold` is kept for the record and never applied.
The output's `exit_steps` says for every row of logits which loop it was read from, counted from 0.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

# Newer releases of transformers call the cache `cache` (5.24 does), older ones `past_key_values`. Both are accepted.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
PRECISE = (torch.float32, torch.float64)


class OuroConfig(PretrainedConfig):
    """Sizes of a looped model. `total_ut_steps` is R; `early_exit_threshold` is not applied (see the module)."""

    model_type = "ouro"
    keys_to_ignore_at_inference = [CACHE]  # noqa: RUF012 (as its base class declares it)

    def __init__(
        self,
        vocab_size: int = 49152,
        hidden_size: int = 2048,
        intermediate_size: int = 5632,
        num_hidden_layers: int = 24,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        total_ut_steps: int = 4,
        early_exit_threshold: float = 1.0,
        max_position_embeddings: int = 65536,
        rope_theta: float = 1000000.0,
        rms_norm_eps: float = 1e-6,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **others: Any,
    ) -> None:
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.total_ut_steps, self.early_exit_threshold = total_ut_steps, early_exit_threshold
        self.max_position_embeddings, self.rope_theta = max_position_embeddings, rope_theta
        self.rms_norm_eps, self.initializer_range, self.use_cache = rms_norm_eps, initializer_range, use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)


@dataclass
class OuroOutput(CausalLMOutputWithPast):  # type: ignore[misc]
    """Logits [B, S, V], the cache, and `exit_steps` [B, S]: the loop, from 0, that each row of logits was read from."""

    exit_steps: Tensor | None = None


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of norms, softmax, RoPE angles and hazards."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class OuroRMSNorm(nn.Module):
    """x / rms(x) in float32 or wider, cast back, times the weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.to(wide(x.dtype)), x.shape[-1:], None, self.eps).to(x.dtype) * self.weight


class OuroAttention(nn.Module):
    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.config, hidden, head = config, config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head, hidden, bias=False)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], visible: Tensor, cache: Cache | None, slot: int
    ) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        if cache is not None:
            k, v = cache.update(k, v, slot)
        if (group := q.shape[1] // k.shape[1]) > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if self.config._attn_implementation == "eager":
            scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
            mixed = scores.to(wide(q.dtype)).softmax(-1).to(q.dtype) @ v
        else:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [B, H, S, D]: channels i and i + D/2 are a pair."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class OuroMLP(nn.Module):
    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class OuroLayer(nn.Module):
    """Attention and SwiGLU, each between two norms."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = OuroAttention(config), OuroMLP(config)
        self.input_layernorm = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm_2 = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm_2 = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, h: Tensor, *attention: Any) -> Tensor:
        h = h + self.input_layernorm_2(self.self_attn(self.input_layernorm(h), *attention))
        return h + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(h)))


class OuroPreTrainedModel(PreTrainedModel):
    config_class = OuroConfig
    base_model_prefix = "model"
    _no_split_modules = ["OuroLayer"]  # noqa: RUF012 (as its base class declares it)
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _supports_sdpa = True


class OuroModel(OuroPreTrainedModel):
    """Embedding, layers, final norm and gate."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([OuroLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **others: Any,
    ) -> tuple[BaseModelOutputWithPast, list[Tensor], list[Tensor]]:
        """(outputs, hidden states, gate logits): one state [B, S, d] and one logit [B, S, 1] a loop, in order.

        attention_mask is [B, positions so far], 0 where a prompt is padded; positions are counted from its first 1.
        """
        refuse(others)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        h = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        layers, loops = self.config.num_hidden_layers, self.config.total_ut_steps
        if self.config.use_cache if use_cache is None else use_cache:
            cache = with_slots(cache, layers * loops)
        past = cache.get_seq_length() if cache is not None else 0
        seen = visible(attention_mask, past, h)
        if position_ids is None:
            position_ids = positions(attention_mask, past, h)
        rotary = self.rotary(position_ids, h)
        hidden_states, gates = [], []
        for loop in range(loops):
            for index, layer in enumerate(self.layers):
                h = layer(h, rotary, seen, cache, loop * layers + index)
            h = self.norm(h)
            hidden_states.append(h)
            gates.append(self.early_exit_gate(h))
        return BaseModelOutputWithPast(last_hidden_state=h, **{CACHE: cache}), hidden_states, gates

    def rotary(self, position_ids: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, 1, S, D]. Made anew for every call: a buffer would not survive a load on "meta"."""
        channels = torch.arange(0, self.config.head_dim, 2, dtype=wide(h.dtype), device=h.device)
        frequencies = 1.0 / (self.config.rope_theta ** (channels / self.config.head_dim))
        angles = position_ids[:, None, :, None].to(frequencies) * frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(h.dtype), angles.sin().to(h.dtype)


def refuse(others: dict[str, Any]) -> None:
    """TypeError for arguments that would be ignored, but for what transformers adds on its own."""
    given = sorted(name for name, value in others.items() if value is not None and value is not False)
    if given := [name for name in given if name != "cache_position"]:
        raise TypeError(f"forward() of Ouro does not know {', '.join(given)}")


def with_slots(cache: Cache | None, slots: int) -> Cache:
    """The cache with a slot for every loop of every layer: transformers makes it with one a layer."""
    if cache is None:
        return DynamicCache()
    if getattr(cache, "is_compileable", False):
        raise ValueError(f"{type(cache).__name__} is a cache of fixed length; Ouro works with DynamicCache")
    if getattr(cache, "layer_class_to_replicate", None) is None and len(cache.layers) < slots:
        if cache.get_seq_length():
            raise ValueError(
                f"the cache holds {len(cache.layers)} slots, this model fills {slots} (loops x layers); "
                f"give one that this model has made, or an empty DynamicCache()"
            )
        cache.layers.extend(copy.deepcopy(cache.layers[0]) for _ in range(slots - len(cache.layers)))
    return cache


def visible(attention_mask: Tensor | None, past: int, h: Tensor) -> Tensor:
    """Which keys a query sees, [B or 1, 1, S, past + S]: those before it that are no padding, and itself.

    A row of padding sees itself too. Nothing reads it, but a softmax over nothing is NaN, and 0 * NaN would spread.
    """
    total = past + h.shape[1]
    keys = torch.arange(total, device=h.device)
    queries = keys[past:, None]
    if attention_mask is None:
        return (keys <= queries)[None, None]
    if attention_mask.shape != (h.shape[0], total):
        raise ValueError(
            f"attention_mask has the shape {list(attention_mask.shape)}; needed: [{h.shape[0]}, {total}], a number for "
            f"each of {past} cached and {h.shape[1]} new positions"
        )
    return ((keys <= queries) & attention_mask[:, None, None].bool()) | (keys == queries)


def positions(attention_mask: Tensor | None, past: int, h: Tensor) -> Tensor:
    """Positions of the new rows, [B or 1, S], counted from each prompt's first token."""
    if attention_mask is None:
        return torch.arange(past, past + h.shape[1], device=h.device)[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]


def first_exit(gates: list[Tensor], threshold: float) -> Tensor:
    """The loop, from 0, that the threshold reads at each position; gates are the R loops' logits, [B, S] each."""
    if not threshold >= 0:
        raise ValueError(f"exit_threshold is {threshold!r}; allowed: 0 to 1, 1 is off")
    dtype = gates[0].dtype
    going = torch.ones_like(gates[0], dtype=torch.bool)
    steps = torch.zeros_like(gates[0], dtype=torch.long)
    remaining: Tensor = torch.ones_like(gates[0], dtype=torch.float64 if dtype in PRECISE else dtype)
    mass, rounded = torch.zeros_like(remaining), torch.tensor(threshold, dtype=dtype, device=remaining.device)
    for gate in gates[:-1]:  # the last loop's gate is not asked
        hazard = gate.sigmoid().to(remaining.dtype)
        if dtype in PRECISE:
            remaining = remaining * (1.0 - hazard)
            leaves = (1.0 - remaining >= threshold) & (threshold < 1)
        else:
            mass, remaining = mass + hazard * remaining, remaining * (1.0 - hazard)
            leaves = mass >= rounded
        going = going & ~leaves
        steps = steps + going
    return steps


class OuroForCausalLM(OuroPreTrainedModel, GenerationMixin):
    # A mapping from release 5 of transformers on, a list of names before.
    _tied_weights_keys = TIED if int(transformers.__version__.split(".")[0]) >= 5 else list(TIED)

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.model = OuroModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        exit_at_step: int | None = None,
        exit_threshold: float | None = None,
        return_dict: bool | None = None,
        cache: Cache | None = None,
        **others: Any,
    ) -> OuroOutput | tuple[Any, ...]:
        """Logits of every position, each read at the loop that the exit arguments choose (see the module).

        logits_to_keep: only the last so many positions (0: all), or their indices; `exit_steps` is of the same ones.
        """
        outputs, hidden_states, gates = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=cache,
            **others,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        h, steps = self.choose([h[:, kept] for h in hidden_states], [gate[:, kept, 0] for gate in gates], exit_at_step,
                               exit_threshold)  # fmt: skip
        output = OuroOutput(logits=self.lm_head(h), exit_steps=steps, **{CACHE: outputs.get(CACHE)})
        return output.to_tuple() if return_dict is False else output

    def choose(
        self, hidden_states: list[Tensor], gates: list[Tensor], step: int | None, threshold: float | None
    ) -> tuple[Tensor, Tensor]:
        """The state each position is read from [B, S, d], and its loop [B, S]."""
        loops = len(hidden_states)
        if step is None and threshold is not None:
            steps = first_exit(gates, threshold)
            index = steps[None, ..., None].expand(1, -1, -1, hidden_states[0].shape[-1])
            return torch.stack(hidden_states).gather(0, index)[0], steps
        step = loops - 1 if step is None else step
        if not 0 <= step < loops:
            raise ValueError(f"exit_at_step is {step}; allowed: 0 to {loops - 1}, this model has {loops} loops")
        return hidden_states[step], torch.full_like(gates[0], step, dtype=torch.long)
