"""GRPO by TRL on answers of anydepth's engine, trained with the probabilities that the answers were sampled with.

TRL shows what a rollout returns beside its tokens (here: depths) to reward functions only, and then asks the model for
full-depth probabilities. `RolloutGRPOTrainer` asks `replay` instead, at the depths and K/V semantics of the rollout,
and compares: before the weights have moved, replay and rollout must say the same. GRPO: arXiv 2402.03300.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from anydepth.engine.llm import LLM
from anydepth.engine.philox import derive
from anydepth.models.base import Model
from anydepth.models.load import Checkpoint, load_checkpoint
from anydepth.rollout.answers import Answer
from anydepth.rollout.logprobs import Replay, replay
from anydepth.rollout.rollout import Rollout
from anydepth.types import Sampling

try:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    raise ImportError(f"the adapter for TRL needs more packages ({error}); pip install 'anydepth[rl]'") from error

# What would make the trainer's probabilities others than the engine's, or asks for what a replay does not give.
_NEEDED: Mapping[str, tuple[Any, ...]] = {
    "bf16": (False,),
    "fp16": (False,),
    "gradient_checkpointing": (False,),
    "use_vllm": (False,),
    "world_size": (1,),
    "beta": (0.0,),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
    "top_entropy_quantile": (1.0,),
    "entropy_coef": (0.0,),
    "use_adaptive_entropy": (False,),
    "mask_truncated_completions": (False,),
}
# Fields of Sampling that the trainer decides, and where it has them from.
_TRAINERS: Mapping[str, str] = {
    "temperature": "GRPOConfig's temperature",
    "top_k": "GRPOConfig's top_k",
    "top_p": "GRPOConfig's top_p",
    "max_tokens": "GRPOConfig's max_completion_length",
    "n": "GRPOConfig's num_generations",
    "seed": "GRPOConfig's seed",
    "logprobs": "the trainer, to processed",
}


class Trainable(PreTrainedModel):  # type: ignore[misc]
    """A checkpoint of anydepth as a module of transformers: parameters under their released names, replay as forward.

    `save_pretrained` writes the folder that `LLM` loads (a trainer adds the tokenizer). A forward pass copies the
    weights into the layout of `anydepth.models`, so it needs room for them once more.
    """

    config_class = PretrainedConfig

    def __init__(self, checkpoint: Checkpoint) -> None:
        eos = sorted(checkpoint.eos_ids)
        super().__init__(PretrainedConfig(name_or_path=str(checkpoint.path), eos_token_id=eos))
        self.generation_config = GenerationConfig(eos_token_id=eos)
        self.files = {"config.json": checkpoint.config, "generation_config.json": checkpoint.generation_config}
        self._layout = copy.deepcopy(checkpoint.model)  # its weights are never read
        for name, slot in self._layout.slots().items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(slot.detach().clone(memory_format=torch.contiguous_format)))
        self.post_init()

    @classmethod
    def load(cls, name: str | Path, *, dtype: str = "float32") -> Trainable:
        """From whatever `LLM` loads; ValueError as there."""
        return cls(load_checkpoint(name, dtype=dtype))

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: all weights come from the checkpoint."""

    def model_of_parameters(self) -> Model:
        """anydepth's model whose tensors are functions of this module's parameters, as they are now."""
        model = copy.deepcopy(self._layout)
        for name, slot in model.slots().items():
            # A view made afresh: one older than what its base was computed from cannot be written.
            slot.view_as(slot).copy_(self.get_parameter(name))
        if getattr(model, "tied", False):
            model.head = model.embedding.t()  # type: ignore[attr-defined]
        return model

    def forward(self, answers: Sequence[Answer]) -> Replay:
        """The answers' log-probabilities at their depths, with gradients to the parameters."""
        return replay(self.model_of_parameters(), answers)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, state_dict: Mapping[str, Tensor] | None = None, **options: Any
    ) -> None:
        """Write config.json, generation_config.json and model.safetensors. `options` are transformers' and not read."""
        from safetensors.torch import save_file

        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in self.files.items():
            (folder / file).write_text(json.dumps(content, indent=2) + "\n")
        save_file(dict(state_dict or self.state_dict()), folder / "model.safetensors", metadata={"format": "pt"})


class RolloutGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer whose answers come from `llm` and whose log-probabilities are `replay`'s.

    `llm` holds the same weights in the same dtype as `model`; every generation first gives it the model's own, under a
    new version. `sampling` says how deep each token thinks (and stop strings); how tokens are drawn, how many and with
    which seed is for `args` to say. Reward functions also get `depths` and `segments_executed`, one entry an answer.
    For each piece of a batch whose weights are still those of the rollout a line is printed, and logged as
    `rollout/largest_difference`: the largest |replayed - sampled| log-probability. The metric `entropy` is the mean
    -log-probability of the sampled tokens, an estimate.

    Raises ValueError for settings under which the two could not agree, RuntimeError where the difference exceeds
    `largest_difference`, or ten times that once the weights have moved: a long run meets the rare tokens that rounding
    makes the most of (nano in float32: 1e-5 or so in a step, 1.6e-4 once in 300; in float64 5e-14).
    """

    def __init__(
        self,
        model: Trainable,
        *,
        llm: LLM,
        args: GRPOConfig,
        sampling: Sampling | None = None,
        largest_difference: float = 1e-4,
        **options: Any,
    ) -> None:
        if not isinstance(model, Trainable) or not isinstance(llm, LLM):
            raise ValueError(
                f"model is a {type(model).__name__} and llm a {type(llm).__name__}; give Trainable.load(...) and "
                f"LLM(...)"
            )
        sampling, default = sampling or Sampling(), Sampling()
        if given := [name for name in _TRAINERS if getattr(sampling, name) != getattr(default, name)]:
            name = given[0]
            raise ValueError(
                f"sampling has {name} = {getattr(sampling, name)!r}, which is set by {_TRAINERS[name]}; leave it out"
            )
        for name, allowed in _NEEDED.items():
            if (value := getattr(args, name)) not in allowed:
                raise ValueError(
                    f"GRPOConfig has {name} = {value!r}; with rollouts of anydepth allowed: "
                    f"{' or '.join(map(repr, allowed))}"
                )
        self.llm, self.limit = llm, largest_difference
        self.sampling = replace(
            sampling,
            temperature=args.temperature,
            top_k=args.top_k or None,
            top_p=args.top_p,
            max_tokens=args.max_completion_length,
            logprobs="processed",
        )
        self._answers: list[Answer] = []
        self._evaluated = 0  # rollouts since the last one to train with
        self._fresh: tuple[int, set[int]] = (-1, set())  # step and version at which the engine got the weights
        super().__init__(model, args=args, rollout_func=_rollout, **options)

    def answer(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """One answer a prompt, of the model's present weights; equal neighbours are a group and share their prefill."""
        self.llm.update_weights(self.model.state_dict())
        groups = [(list(prompt), len(list(same))) for prompt, same in groupby(prompts)]
        # Counted within an optimiser step, which is where a resumed run begins again; an evaluation lies between two.
        self._evaluated = 0 if self.model.training else self._evaluated + 1
        rollout = self._evaluated or self._step % self.args.gradient_accumulation_steps
        seed = derive(self.args.seed, self.state.global_step + 1, 2 * rollout + self.model.training)
        asks = [replace(self.sampling, n=n, seed=derive(seed, i, 0)) for i, (_, n) in enumerate(groups)]
        made = Rollout(self.llm).generate([prompt for prompt, _ in groups], asks)
        answers = [answer for group in made for answer in group.answers]
        self._answers, self._fresh = answers, (self.state.global_step, {answer.weight_version for answer in answers})
        return answers

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        # TRL shuffles and splits lists like tensors, so the answers stay beside their rows.
        return batch | {"answers": self._answers, "old_per_token_logps": batch["sampling_per_token_logps"]}

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        self._answers = inputs["answers"]
        return cast(Tensor, super()._compute_loss(model, inputs))

    def _get_per_token_logps_and_entropies(
        self, model: nn.Module, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **unused: Any
    ) -> tuple[Tensor, Tensor, None]:
        for row, answer in zip(input_ids[:, -logits_to_keep:].tolist(), self._answers, strict=True):
            assert tuple(row[: len(answer.token_ids)]) == answer.token_ids, "rows and answers are not in the same order"
        found: Replay = model(self._answers)
        if self._fresh == (self.state.global_step, {answer.weight_version for answer in self._answers}):
            self._compare(found)
        missing = logits_to_keep - found.logprobs_NT.shape[1]
        logps = nn.functional.pad(found.logprobs_NT, (0, missing)).float()
        return logps, -logps.detach(), None

    def _compare(self, found: Replay) -> None:
        step, versions = self._fresh
        print(
            f"step {step}: weights {max(versions)}, |replayed - sampled| at most {found.max_difference:.1e}, "
            f"mean {found.mean_difference:.1e}, {int(found.mask_NT.sum())} tokens"
        )
        limit = self.limit if step == 0 else 10 * self.limit
        if not found.max_difference <= limit:
            raise RuntimeError(
                f"replay and rollout of the same weights differ by {found.max_difference:.2e}, allowed: "
                f"{limit:g}; give llm ({self.llm.checkpoint.model.dtype}) and model ({self.model.dtype}) one dtype"
            )
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["rollout/weight_version"] = [float(max(versions))]
        # TRL logs the mean of each list; of this one the maximum is wanted.
        metrics["rollout/largest_difference"] = [max([found.max_difference, *metrics["rollout/largest_difference"]])]


def _rollout(prompts: list[Any], trainer: RolloutGRPOTrainer) -> dict[str, list[Any]]:
    """TRL's rollout_func: one answer for each of the prompts, of which equal neighbours are a group."""
    ids, _, _ = trainer._tokenize_prompts(prompts)
    answers = trainer.answer(ids)
    return {
        "prompt_ids": [list(answer.prompt_ids) for answer in answers],
        "completion_ids": [list(answer.token_ids) for answer in answers],
        "logprobs": [list(answer.logprobs) for answer in answers],
        "depths": [list(answer.depths) for answer in answers],
        "segments_executed": [answer.usage.segments_executed for answer in answers],
    }
