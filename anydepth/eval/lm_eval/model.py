"""The engine as a model of the lm-evaluation-harness: `AnydepthLM` answers its three kinds of request under one arm.

`anydepth.eval.lm_eval.command` registers it as "anydepth" and hands over to the harness's own command.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anydepth.eval.arms import SAMPLING_FIELDS
from anydepth.provenance import source
from anydepth.types import Chunk, Request, Sampling, Score, Usage, unknown

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from tqdm import tqdm
except ModuleNotFoundError as error:
    raise ValueError(f"the lm-eval bridge needs lm-eval ({error}); pip install 'anydepth[eval]'") from error

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

NAME = "anydepth"
MAX_GEN_TOKENS = 256  # lm-eval's default where a task names no cap
# Settings of other models, with the value that changes nothing; the last four never do without beams.
NEUTRAL = dict.fromkeys(("n", "num_beams", "num_return_sequences", "repetition_penalty"), 1)
NEUTRAL |= dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p"), 0)
MEANINGLESS = ("use_cache", "pad_token_id", "early_stopping", "length_penalty")
Groups = dict[tuple[int, ...], list[int]]  # context ids -> numbers of the continuations after them
log = logging.getLogger("lm_eval.anydepth")  # below lm-eval's logger, so that its level and format hold


@dataclass(slots=True)
class Spent:
    """What one kind of request has cost so far."""

    questions: int = 0
    requests: int = 0
    usage: Usage = field(default_factory=Usage)

    def summary(self) -> dict[str, float | int | None]:
        decoded, each = self.usage.decode_tokens, max(self.questions, 1)
        return {
            "questions": self.questions,
            "requests": self.requests,
            "decode_tokens": decoded,
            "mean_depth": round(self.usage.segments_read / decoded, 4) if decoded else None,
            "segments_read_per_question": round(self.usage.segments_read / each, 2),
            "segments_executed_per_question": round(self.usage.segments_executed / each, 2),
        }


class AnydepthLM(TemplateLM):
    """lm-eval's requests, answered by one engine under one arm.

    model_args: `model` and every other option of LLM, and every field of Sampling (`policy` is `exit_policy`), which
    hold over what a task asks for. max_length: positions that context and answer may take together, at most the
    model's. batch_size: max_batch of LLM, "auto" for its default (or max_batch_size). device: "auto" for LLM's default.

    Answers drawn at a temperature depend on the seed (torch's own where none is given, which lm-eval's --seed sets),
    the context and how often it was asked before, not on the order of requests.

    Example: AnydepthLM(model="nano", exit_threshold=0.5, min_depth=2, fill="last_exited")
    """

    def __init__(
        self,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        trust_remote_code: bool | None = None,  # lm-eval hands its flag on; the engine runs no remote code
        **model_args: Any,
    ) -> None:
        import torch

        from anydepth.engine.llm import LLM
        from anydepth.eval.backends.engine import EngineBackend

        super().__init__()
        options, self._arm = parted(model_args)
        options |= {} if device in (None, "auto") else {"device": device}
        options |= slots(batch_size, max_batch_size, options.get("max_batch"))
        self.llm = LLM(**options)
        backend = EngineBackend(self.llm)
        if "profile" in self._arm:  # named as a file, perhaps, and now loaded
            (self._arm["profile"],) = self.llm.engine.profiles
        # What the arm asks of this model is checked before any task is loaded.
        self._settings = backend.settings(Sampling(**{**self._arm, "max_tokens": 1}))
        self.engine, self.tokenizer = self.llm.engine, backend.tokenizer
        longest = self.engine.context
        if max_length is not None and (not isinstance(max_length, int) or not 2 <= max_length <= longest):
            raise ValueError(f"max_length is {max_length!r}; allowed: 2 .. {longest}, the model's")
        self.max_length = longest if max_length is None else max_length
        self.max_gen_toks = min(MAX_GEN_TOKENS, self.max_length // 2)
        self._seed = self._arm["seed"] if self._arm.get("seed") is not None else torch.initial_seed()
        self._spent: dict[str, Spent] = {}

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> AnydepthLM:
        """As lm-eval builds its models, but for the device or batch size that model_args give too."""
        given = dict(arg_dict)
        for name, value in (additional_config or {}).items():
            if value is not None and value != "auto" and str(given.setdefault(name, value)) != str(value):
                raise ValueError(f"{name} is {given[name]!r} in model_args and {value!r} beside them; give it once")
        return cls(**given)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> AnydepthLM:
        return cls.create_from_arg_obj(utils.simple_parse_args_string(arg_string), additional_config)

    # Text and ids

    @property
    def eot_token_id(self) -> int:
        named = self.tokenizer.id_of(self.tokenizer.named_tokens.get("eos_token", ""))
        if named is None and not self.llm.checkpoint.eos_ids:
            raise ValueError(f"{self.llm.checkpoint.name} has no end-of-text token, which an empty context needs")
        return min(self.llm.checkpoint.eos_ids) if named is None else named

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text, with the one BOS that the tokenizer says, or without any where add_special_tokens is False."""
        return self.tokenizer.encode(string, add_bos=False if add_special_tokens is False else None)

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval's cache of prompts is kept under."""
        return f"{self.llm.checkpoint.name}-{self.tokenizer.hash[:16]}".replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The chat's text. Without the generation prompt the last message is left open, to be continued."""
        text = self.tokenizer.render(chat_history, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"]
        for kept in (last.lstrip(), last.strip()):  # templates may strip a message
            if kept and (at := text.rfind(kept)) >= 0:
                return text[: at + len(kept)]
        raise ValueError(f"the chat template does not write its last message, {last!r}, which is to be continued")

    # Generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers, in the order of requests; the engine works on all of them at once."""
        asked, cut, prepared = Counter[str](), 0, []
        for context, gen_kwargs in (request.args for request in requests):
            sampling = self.sampling(gen_kwargs)
            ids, room = self.tok_encode(context) or [self.prefix_token_id], self.max_length - sampling.max_tokens
            if room < 1:
                raise ValueError(
                    f"an answer may have {sampling.max_tokens} tokens, and the model's length is {self.max_length}: no "
                    f"room for the context; lower it with --gen_kwargs max_gen_toks=..."
                )
            cut += len(ids) > room
            base = self._seed if sampling.seed is None else sampling.seed
            seed = hashlib.sha256(f"{base}:{asked[context]}:{context}".encode()).digest()[:8]
            asked[context] += 1
            prepared.append(
                self.engine.prepare(ids[-room:], sampling, seed=int.from_bytes(seed, "big"), streaming=False)
            )
        self._warn_of_cuts(cut, len(requests))
        index = {request.id: at for at, request in enumerate(prepared)}
        answers = [""] * len(requests)
        for chunk in self._run(prepared, "generate_until", len(requests), disable_tqdm):
            assert chunk.output is not None and chunk.output.text is not None
            at = index[chunk.request_id]
            answers[at] = chunk.output.text
            self.cache_hook.add_partial("generate_until", requests[at].args, answers[at])
        self._account("generate_until", requests)
        return answers

    def sampling(self, gen_kwargs: Mapping[str, Any]) -> Sampling:
        """The Sampling of one request: what its task asks for, and over it what model_args give.

        Raises ValueError for a setting that the engine does not have, naming the nearest, or that would be ignored.
        """
        asked = normalize_gen_kwargs(dict(gen_kwargs), self.max_gen_toks)
        del asked["do_sample"]  # the temperature is 0 where it is false
        options = {"max_tokens": asked.pop("max_gen_toks"), "temperature": asked.pop("temperature", 0.0)}
        stop = [*asked.pop("until"), *listed(asked.pop("stop", ()))]
        options["stop"] = [text for text in stop if text not in ("", None)]
        for name, value in asked.items():
            if name in NEUTRAL and value != NEUTRAL[name]:
                raise ValueError(f"gen_kwargs: {name} is {value!r}; allowed: {NEUTRAL[name]}, the engine has no other")
            if name in SAMPLING_FIELDS or name == "exit_policy":
                options["exit_policy" if name == "policy" else name] = value
            elif name not in NEUTRAL and name not in MEANINGLESS:
                known = ("do_sample", "until", "max_gen_toks", *SAMPLING_FIELDS)
                raise ValueError(f"gen_kwargs: {unknown('setting', name, known)}")
        for name, value in options.items():
            if self._arm.get(name, value) != value:
                utils.warning_once(log, f"{name} is {self._arm[name]!r} as model_args say, not {value!r}")
        options |= self._arm
        if options.get("top_k") in (0, -1):  # how others write "off"
            del options["top_k"]
        if options["temperature"] == 0:  # nothing is drawn, and a top_p of 0 is no error
            options = {name: value for name, value in options.items() if name not in ("top_k", "top_p")}
        # A special token has no text that could be waited for.
        ids = {id for text in listed(options["stop"]) if (id := self.tokenizer.id_of(text)) is not None}
        special = [id for id in sorted(ids) if not self.tokenizer.decode([id])]
        try:
            return Sampling(**{**options, "stop_token_ids": [*options.get("stop_token_ids", ()), *special]})
        except ValueError as error:
            raise ValueError(f"gen_kwargs {dict(gen_kwargs)}: {error}") from error

    # Log-likelihood

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(sum of logprobs, whether greedy decoding gives it) of each continuation, under the arm's policy."""
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        self._account("loglikelihood", requests)
        return scores

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        kind: str = "loglikelihood",
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Scores of (texts for the cache, context ids, continuation ids). Equal contexts are prefilled together, in as
        few requests as keep the engine's rows busy."""
        groups, cut = Groups(), 0
        for at, (texts, context, continuation) in enumerate(requests):
            if not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens; allowed: 1 .. {self.max_length}, the length: "
                    f"{texts!r}"
                )
            ids, room = context or [self.prefix_token_id], self.max_length + 1 - len(continuation)
            cut += len(ids) > room
            groups.setdefault(tuple(ids[-room:]), []).append(at)
        self._warn_of_cuts(cut, len(requests))
        continuations = [continuation for _, _, continuation in requests]
        made = self._scored if self.engine.mode.name == "sync" else self._scored_without_lateness
        scores = [(0.0, False)] * len(requests)
        for at, score in made(groups, continuations, kind, disable_tqdm):
            scores[at] = math.fsum(score.logprobs), score.greedy
            if (texts := requests[at][0]) is not None:
                self.cache_hook.add_partial(kind, texts, scores[at])
        return scores

    def _scored(
        self, groups: Groups, continuations: Sequence[list[int]], kind: str, disable_tqdm: bool
    ) -> Iterator[tuple[int, Score]]:
        """(number, score) of every continuation after its context, as it is done."""
        share = -(-len(continuations) // len(self.engine.slots)) or 1
        sampling, prepared, order = self._scoring, [], {}
        for prompt, every in groups.items():
            for members in (every[start : start + share] for start in range(0, len(every), share)):
                forced = [continuations[at] for at in members]
                prepared.append(self.engine.prepare(prompt, sampling, forced=forced, streaming=False))
                order[prepared[-1].id] = iter(members)
        for chunk in self._run(prepared, kind, len(continuations), disable_tqdm):
            assert chunk.score is not None
            yield next(order[chunk.request_id]), chunk.score

    def _scored_without_lateness(
        self, groups: Groups, continuations: Sequence[list[int]], kind: str, disable_tqdm: bool
    ) -> Iterator[tuple[int, Score]]:
        """The same where the engine's signals are late, which scores never are: through `LLM.score`, some at a time."""
        spent = self._spent.setdefault(kind, Spent())
        order = [(at, prompt) for prompt, members in groups.items() for at in members]
        rows = len(self.engine.slots)
        with tqdm(total=len(order), desc=f"Running {kind} requests", disable=disable_tqdm) as bar:
            for some in (order[start : start + rows] for start in range(0, len(order), rows)):
                contexts, forced = [prompt for _, prompt in some], [continuations[at] for at, _ in some]
                for (at, _), score in zip(some, self.llm.score(contexts, forced, self._scoring), strict=True):
                    spent.usage += score.usage
                    bar.update()
                    yield at, score

    @property
    def _scoring(self) -> Sampling:
        return Sampling(**{**self._arm, "stop": ()})

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the model's length, each token scored once."""
        windows, owners = [], []
        for at, (text,) in enumerate(request.args for request in requests):
            ids = self.tok_encode(text, add_special_tokens=False)
            for window in utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(at)
        sums = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm, "loglikelihood_rolling")
        for at, (score, _) in zip(owners, scores, strict=True):
            sums[at] += score
        for request, score in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, score)
        self._account("loglikelihood_rolling", requests)
        return sums

    # What both need

    def _run(self, requests: Sequence[Request], kind: str, total: int, disable_tqdm: bool) -> Iterator[Chunk]:
        """Every answer or score as it is done. Leaves the engine empty, however it ends."""
        spent = self._spent.setdefault(kind, Spent())
        left = {request.id for request in requests}
        try:
            for request in requests:
                self.engine.submit(request)
            with tqdm(total=total, desc=f"Running {kind} requests", disable=disable_tqdm) as bar:
                while left:
                    for chunk in self.engine.step():
                        if chunk.request_id in left and (ended := chunk.score or chunk.output):
                            spent.usage += ended.usage
                            if chunk.finish_reason:
                                left.discard(chunk.request_id)
                            bar.update()
                            yield chunk
        finally:
            for id in left:
                self.engine.abort(id)
            if left:
                self.engine.step()  # takes the last chunks of what was aborted away

    def _account(self, kind: str, requests: Sequence[Instance]) -> None:
        spent = self._spent.setdefault(kind, Spent())
        spent.requests += len(requests)
        spent.questions += len({(request.task_name, request.doc_id) for request in requests})
        cost, segments = spent.summary(), self._settings["segments"]
        log.info(
            f"{kind} of {cost['questions']} questions: mean depth {cost['mean_depth']} of {segments}, "
            f"{cost['segments_read_per_question']} segments a question read, "
            f"{cost['segments_executed_per_question']} executed"
        )

    def _warn_of_cuts(self, cut: int, total: int) -> None:
        if cut:
            log.warning(f"{cut} of {total} contexts are too long for {self.max_length} positions: cut at the left")

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results' config: provenance, settings in force, and depths of what was run."""
        checkpoint = self.llm.checkpoint
        return {
            "model_dtype": self._settings["dtype"],
            "model_revision": checkpoint.revision,
            "model_sha": checkpoint.model_hash,
            "tokenizer_sha": checkpoint.tokenizer_hash,
            "anydepth": {
                **source(),
                "settings": {**self._arm, **self._settings, "max_length": self.max_length, "seed": self._seed},
                "depths": {kind: spent.summary() for kind, spent in self._spent.items()},
            },
        }


def parted(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """model_args as (options of LLM, fields of Sampling). ValueError for what is neither, naming the nearest."""
    from anydepth.engine.llm import LLM

    of_llm, of_sampling = set(inspect.signature(LLM).parameters), {*SAMPLING_FIELDS, "exit_policy"}
    if "pretrained" in given:
        raise ValueError(f"model_args: the model is named by model=, not pretrained=; give model={given['pretrained']}")
    for name in given:
        if name not in of_llm | of_sampling:
            raise ValueError(f"model_args: {unknown('setting', name, of_llm | of_sampling | {'max_length'})}")
    if "model" not in given:
        raise ValueError("model_args name no model; give --model_args model=nano (or a folder, a .gguf, a hub id)")
    if given.get("n", 1) != 1:
        raise ValueError(f"model_args: n is {given['n']}; allowed: 1; a task's `repeats` asks for several answers")
    if {"policy", "exit_policy"} <= given.keys():
        raise ValueError("model_args: policy and exit_policy are the same; give one of them")
    options = {name: value for name, value in given.items() if name in of_llm}
    for name in ("model", "revision", "tokenizer"):  # lm-eval makes numbers of what looks like one
        if options.get(name) is not None:
            options[name] = str(options[name])
    arm = {"exit_policy" if name == "policy" else name: given[name] for name in given if name in of_sampling}
    Sampling(**arm)
    return options, arm


def slots(batch_size: int | str | None, max_batch_size: int | None, max_batch: int | None) -> dict[str, int]:
    """max_batch of LLM from lm-eval's batch size: a number, or "auto" or "auto:4" for the default."""
    automatic = batch_size is None or str(batch_size).partition(":")[0] == "auto"
    if not automatic and not str(batch_size).isdecimal():
        raise ValueError(f"batch_size is {batch_size!r}; allowed: a whole number from 1, or 'auto'")
    size = max_batch_size if automatic else int(batch_size or 0)
    if max_batch is not None and size not in (None, max_batch):
        raise ValueError(f"max_batch is {max_batch} and batch_size {size}; they are the same, give one of them")
    return {} if size is None else {"max_batch": size}


def listed(value: Any) -> list[Any]:
    """A list of one text, of none, or of several."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)
