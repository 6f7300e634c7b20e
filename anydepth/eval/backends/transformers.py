"""transformers as a backend: the plain model, with the released Ouro's `exit_at_step` and `exit_threshold`.

All loops are always computed there, an exit only chooses the readout (fill `full`). The prompt's pass is read at full
depth, as everywhere; the depths of an adaptive arm come from the output's `exit_steps`, or, for released code that has
none, from the gates that its base model gives out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anydepth.dtypes import DTYPES
from anydepth.engine.philox import uniforms
from anydepth.engine.sampling import Settings, greedy, pick, processed
from anydepth.engine.text import TextStream
from anydepth.eval.backends.base import Ask, Reply
from anydepth.eval.backends.checkpoint import CheckpointBackend
from anydepth.exits.load import policy_name
from anydepth.models.export import export_hf
from anydepth.types import FinishReason, Output, Sampling, Score, Usage

POLICIES = ("never", "fixed", "gate_cdf")


class TransformersBackend(CheckpointBackend):
    """A local folder or hub id as it is; a built-in model or GGUF file through an export of its own.

    trust_remote_code: the model's name again, where its folder brings code that may run.
    """

    name = "transformers"

    def __init__(
        self,
        model: str,
        *,
        trust_remote_code: str | None = None,
        fill: str | None = None,
        signals: str = "sync",
        dtype: str | None = None,
        gate_dtype: str | None = None,
        segments: object = None,
    ) -> None:
        if segments is not None:
            raise ValueError(f"segments is {segments!r}; transformers has no inner exits, leave it out")
        self.fill, self.dtype = fill or "full", dtype or "float32"
        self.know("fill", self.fill, ("full",))
        self.know("signals", signals, ("sync",))
        self.know("dtype", self.dtype, DTYPES)
        self.gate_dtype = "float32" if self.dtype in ("float32", "float64") else self.dtype
        if gate_dtype not in (None, self.gate_dtype):
            raise ValueError(
                f"gate_dtype is {gate_dtype!r}; in transformers a {self.dtype} model decides in {self.gate_dtype}"
            )
        place, weights = self.open(model)
        self.segments: int = weights.config.get("total_ut_steps", 1)
        self.max_positions: int = weights.config["max_position_embeddings"]
        own = place.path.is_file() or not (place.local or "/" in model)  # a file, or a built-in name
        self.model = _load(place.path, model, own=own, trusted=trust_remote_code == model, dtype=DTYPES[self.dtype])

    def settings(self, sampling: Sampling) -> dict[str, Any]:
        policy = policy_name(sampling)
        if policy not in POLICIES or (policy != "never" and self.segments == 1):
            raise ValueError(f"exit_policy is {policy!r}; this model in transformers knows never, fixed, gate_cdf")
        if sampling.min_depth != 1 or sampling.max_depth not in (None, self.segments):
            raise ValueError(
                f"min_depth is {sampling.min_depth}, max_depth {sampling.max_depth}; transformers has no bounds, leave "
                f"them out"
            )
        if sampling.depth is not None and sampling.depth > self.segments:
            raise ValueError(f"depth is {sampling.depth}; this model has {self.segments} segments")
        return self.told(sampling, policy=policy, low=1, high=self.segments)

    @torch.inference_mode()
    def replies(self, asks: Sequence[Ask], sampling: Sampling, *, concurrency: int) -> Iterator[Reply]:
        """Questions in batches of `concurrency`, padded on the left; a batch ends with its longest answer."""
        for first in range(0, len(asks), concurrency):
            batch = asks[first : first + concurrency]
            for ask in batch:
                if ask.continuations:
                    yield self._scores(ask, sampling)
            if generated := [ask for ask in batch if not ask.continuations]:
                yield from self._answers(generated, sampling)

    def _exit(self, sampling: Sampling) -> dict[str, Any]:
        """The model's exit argument for a decode pass."""
        if self.segments == 1:
            return {}
        if sampling.depth is not None:
            return {"exit_at_step": sampling.depth - 1}
        if policy_name(sampling) == "gate_cdf":
            return {"exit_threshold": sampling.exit_threshold}
        return {"exit_at_step": self.segments - 1}

    def _answers(self, asks: Sequence[Ask], sampling: Sampling) -> Iterator[Reply]:
        start = time.perf_counter()
        answers = [Answer(self, ask, sampling) for ask in asks]
        ids_BS, mask_BS = _padded([ask.prompt_ids for ask in asks])
        exit_ = self._exit(sampling)
        full = {"exit_at_step": self.segments - 1} if self.segments > 1 else {}
        logits_BV, depth_B, cache = self._pass(
            ids_BS, mask_BS, None, full if sampling.first_token == "prefill" else exit_
        )
        choose = _chooser(sampling, [ask.seed for ask in asks])
        index = 0
        while True:
            token_B = choose(logits_BV, index)
            for answer, token, depth in zip(answers, token_B.tolist(), depth_B.tolist(), strict=True):
                if answer.reason is None and answer.push(token, depth) is not None:
                    yield Reply(ask=answer.ask, output=answer.output(), seconds=time.perf_counter() - start)
            if all(answer.reason is not None for answer in answers):
                return
            index += 1
            mask_BS = torch.cat((mask_BS, torch.ones_like(mask_BS[:, :1])), 1)
            logits_BV, depth_B, cache = self._pass(token_B.unsqueeze(1), mask_BS, cache, exit_)

    def _scores(self, ask: Ask, sampling: Sampling) -> Reply:
        """Teacher-forced: the rows from the context's last token on are read where the policy leaves."""
        start, scores = time.perf_counter(), []
        for ids in ask.continuations:
            fed = torch.tensor([[*ask.prompt_ids, *ids[:-1]]])
            output, depths_BS = self._forward(fed, torch.ones_like(fed), None, self._exit(sampling))
            logits, depths = output.logits[0, -len(ids) :], depths_BS[0, -len(ids) :].tolist()
            target = torch.tensor(ids)
            wide = logits.double().log_softmax(-1)
            logprobs = wide.gather(1, target.unsqueeze(1)).squeeze(1).tolist()
            usage = Usage(
                prompt_tokens=len(ask.prompt_ids),
                output_tokens=len(ids),
                decode_tokens=len(ids),
                segments_read=sum(depths),
                segments_executed=self.segments * len(ids),
                segments_prefill=self.segments * (len(ask.prompt_ids) - 1),
            )
            scores.append(Score(tuple(logprobs), tuple(depths), tuple((greedy(logits) == target).tolist()), usage))
        return Reply(ask=ask, scores=tuple(scores), seconds=time.perf_counter() - start)

    def _pass(self, ids_BS: Tensor, mask_BS: Tensor, cache: Any, exit_: dict[str, Any]) -> tuple[Tensor, Tensor, Any]:
        """Logits [B, V] and depth [B] of the last position, and the cache with these positions in it."""
        output, depths_BS = self._forward(ids_BS, mask_BS, cache, exit_)
        return output.logits[:, -1], depths_BS[:, -1], output.get(_cache_name())

    def _forward(self, ids_BS: Tensor, mask_BS: Tensor, cache: Any, exit_: dict[str, Any]) -> tuple[Any, Tensor]:
        """The model's output, and the depth [B, S], from 1, that each row of logits was read at."""
        positions_BS = (mask_BS.cumsum(-1) - 1).clamp(min=0)[:, -ids_BS.shape[1] :]
        with _Gates(self.model) as gates:
            output = self.model(
                input_ids=ids_BS,
                attention_mask=mask_BS,
                position_ids=positions_BS,
                use_cache=True,
                **{_cache_name(): cache},
                **exit_,
            )
        if "exit_threshold" not in exit_:
            step = exit_.get("exit_at_step", self.segments - 1)
            return output, torch.full(output.logits.shape[:2], step + 1)
        steps = getattr(output, "exit_steps", None)
        return output, (released_exit(gates.seen, exit_["exit_threshold"]) if steps is None else steps) + 1


class Answer:
    """One row of a batch: its tokens so far, and why it ended."""

    def __init__(self, backend: TransformersBackend, ask: Ask, sampling: Sampling) -> None:
        self.ask, self.sampling, self.segments = ask, sampling, backend.segments
        self.stop = backend.stop_ids(sampling)
        self.most = min(sampling.max_tokens, backend.max_positions - len(ask.prompt_ids) + 1)
        self.text = TextStream(backend.tokenizer.decode, sampling.stop, eager=False)
        self.token_ids: list[int] = []
        self.depths: list[int] = []
        self.reason: FinishReason | None = None

    def push(self, token: int, depth: int) -> FinishReason | None:
        """Take a token; why the answer ends with it, or None."""
        self.token_ids.append(token)
        self.depths.append(depth)
        if token in self.stop:
            self.reason = "stop"
        else:
            self.text.push(token)
            if self.text.stopped:
                self.reason = "stop"
            elif len(self.token_ids) == self.most:
                self.reason = "length"
        return self.reason

    def output(self) -> Output:
        assert self.reason is not None
        self.text.end()
        first = self.sampling.first_token == "prefill"  # the first token is read off the prompt's pass
        decoded, prefilled = self.depths[first:], len(self.ask.prompt_ids) - (not first)
        return Output(
            request_id=f"{self.ask.key[0]}:{self.ask.key[1]}",
            prompt_ids=self.ask.prompt_ids,
            token_ids=tuple(self.token_ids),
            depths=tuple(self.depths),
            text=self.text.text,
            finish_reason=self.reason,
            usage=Usage(
                prompt_tokens=len(self.ask.prompt_ids),
                output_tokens=len(self.token_ids),
                decode_tokens=len(decoded),
                segments_read=sum(decoded),
                segments_executed=self.segments * len(decoded),
                segments_prefill=self.segments * prefilled,
            ),
            seed=self.ask.seed,
            answer_index=self.ask.key[1],
        )


class _Gates:
    """While open: `seen` holds the gate logits [B, S] of the base model's last pass, which released code gives out as
    the third of its results."""

    def __init__(self, model: Any) -> None:
        self.seen: list[Tensor] = []
        self._handle = model.base_model.register_forward_hook(self._look)

    def _look(self, module: Any, arguments: Any, result: Any) -> None:
        if isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], list | tuple):
            self.seen = [gate.squeeze(-1) for gate in result[2]]

    def __enter__(self) -> _Gates:
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.remove()


def released_exit(gates: Sequence[Tensor], threshold: float) -> Tensor:
    """The loop, from 0, that the released model reads: the first whose summed exit probability reaches the threshold,
    in the gates' own precision; the last one where none does. Gates are the R loops' logits, [B, S] each."""
    if not gates:
        raise ValueError("this model gives out neither exit_steps nor gates, so that its depths cannot be known")
    remaining, total, steps = torch.ones_like(gates[0]), torch.zeros_like(gates[0]), torch.zeros_like(gates[0]).long()
    left = torch.zeros_like(steps, dtype=torch.bool)
    for gate in gates[:-1]:
        hazard = gate.sigmoid()
        total, remaining = total + hazard * remaining, remaining * (1.0 - hazard)
        left = left | (total >= threshold)
        steps = steps + ~left
    return steps


def _chooser(sampling: Sampling, seeds: Sequence[int]) -> Any:
    """(logits [B, V], output index) -> token [B]: the argmax, or drawn as the engine draws."""
    if sampling.temperature == 0:
        return lambda logits_BV, index: greedy(logits_BV)
    drawn_BI = torch.stack([torch.from_numpy(uniforms(seed, sampling.max_tokens)) for seed in seeds])

    def draw(logits_BV: Tensor, index: int) -> Tensor:
        rows, vocab = logits_BV.shape
        top_k = min(sampling.top_k or vocab + 1, vocab)
        settings = Settings(
            torch.full((rows,), sampling.temperature, dtype=torch.float64),
            torch.full((rows,), top_k if sampling.top_k else vocab + 1),
            torch.full((rows,), sampling.top_p, dtype=torch.float64),
        )
        max_k = top_k if sampling.top_k else None
        return pick(processed(logits_BV, settings, max_k=max_k, any_top_p=sampling.top_p < 1), drawn_BI[:, index])

    return draw


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Ids [B, S] with zeros on the left, and a mask [B, S] that is 0 there."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def _cache_name() -> str:
    """Releases of transformers from mid-2026 on call the cache `cache`, earlier ones `past_key_values`."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def _load(path: Path, name: str, *, own: bool, trusted: bool, dtype: torch.dtype) -> Any:
    """The model in transformers. Its own code runs where it is `trusted`, or is ours, in a fresh export."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise ValueError("the transformers backend needs transformers; pip install anydepth[hf]") from error
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        source = export_hf(name, Path(folder) / "model") if own else path
        brings_code = not own and "auto_map" in (source / "config.json").read_text()
        if brings_code and not trusted:
            raise ValueError(
                f"model {name} brings code of its own, which runs only when it is asked for by name: "
                f"--trust-remote-code {name}"
            )
        return AutoModelForCausalLM.from_pretrained(source, trust_remote_code=own or trusted, dtype=dtype).eval()
