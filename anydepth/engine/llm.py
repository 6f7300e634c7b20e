"""Text in, text out: the face of the engine for everyone who does not drive it themselves."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from anydepth.certificate import Certificate
from anydepth.dtypes import dtype_name
from anydepth.engine.engine import Engine
from anydepth.engine.philox import derive, fresh_seed
from anydepth.engine.submission import Submission
from anydepth.models.attach import load_with_heads, read_profiles
from anydepth.models.update import Source
from anydepth.progress import bars
from anydepth.types import Chunk, Output, Request, Sampling, Score, strict_options

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@strict_options
class LLM:
    """A loaded model and its engine.

    model: "nano", "nano-plain", "smollm2-135m", a folder of safetensors, a .gguf file, or a hub id.
    fill: "full" (default of layered models), "last_exited" (default of looped ones), "deferred", "project" (layered
    only), "shared" (looped only): the K/V of depths that were skipped. pending_positions: how many positions of a
    request may wait under "deferred", 256 unless given (docs/deferred.md). segments: for layered models, layers a
    segment or the list of exit layers. signals, lateness, submission: when the host learns what a turn decided, how
    many turns late, and how turns reach a GPU (docs/late-signals.md). kv_pages: size of the K/V pool in pages of
    page_size positions; max_batched_tokens: prompt tokens a turn may carry; prefix_sharing, host_kv_bytes:
    docs/scheduling.md.
    heads: a folder of exit heads for a layered model, whose exits are then the segments unless `segments` has others
    too; profile: thresholds of `confidence` and `probe`, one or several .toml files or names in that folder
    (docs/heads.md). gate_dtype="bfloat16" repeats the released model's exit arithmetic, for parity.
    certificate: a certificate.json, or what was read from it. The model and these options must be those that were
    certified (its weights are read once more for their hash); a request without an exit setting gets the certified
    one, another exit setting, temperature, top_k or top_p is refused. batch_invariant: a request's logits have the same
    bits whatever else is in the batch, on a CPU, at some cost (docs/batch-invariance.md).

    One thread at a time: several streams may be open and interleaved, but not stepped from several threads.

    Example: LLM("nano").generate("Ann has 5 . Bob has 3 more than Ann . How many has Bob ?")[0].text
    """

    def __init__(
        self,
        model: str | Path,
        *,
        fill: str | None = None,
        signals: str = "sync",
        lateness: int | None = None,
        submission: Submission | None = None,
        segments: int | Sequence[int] | None = None,
        dtype: str | None = None,
        device: str = "cpu",
        max_batch: int = 32,
        page_size: int = 16,
        kv_pages: int | None = None,
        max_batched_tokens: int = 512,
        pending_positions: int | None = None,
        prefix_sharing: bool = True,
        host_kv_bytes: int | None = None,
        heads: str | Path | None = None,
        profile: str | Path | Sequence[str | Path] = (),
        revision: str | None = None,
        tokenizer: str | Path | None = None,
        gate_dtype: str = "float32",
        certificate: str | Path | Certificate | None = None,
        batch_invariant: bool = False,
    ) -> None:
        if certificate is not None and not isinstance(certificate, Certificate):
            certificate = Certificate.read(certificate)
        self.certificate = certificate
        self.checkpoint, head_hash = load_with_heads(
            model, heads, dtype=dtype, device=device, segments=segments, revision=revision, tokenizer=tokenizer
        )
        self.heads = None if heads is None or head_hash is None else (Path(heads).name, head_hash)  # folder, its hash
        profiles = read_profiles(profile, heads, model_hash=lambda: self.checkpoint.model_hash, head_hash=head_hash)
        self.tokenizer = self.checkpoint.tokenizer
        make_engine = functools.partial(
            Engine,
            self.checkpoint.model,
            tokenizer=self.tokenizer,
            eos_ids=self.checkpoint.eos_ids,
            fill=fill,
            max_batch=max_batch,
            page_size=page_size,
            kv_pages=kv_pages,
            max_batched_tokens=max_batched_tokens,
            pending_positions=pending_positions,
            prefix_sharing=prefix_sharing,
            host_kv_bytes=host_kv_bytes,
            gate_dtype=gate_dtype,
            certificate=certificate,
            profiles=profiles,
            batch_invariant=batch_invariant,
        )
        self.engine = make_engine(signals=signals, lateness=lateness, submission=submission)
        # Scores are made without lateness: where the engine's signals come late, by one of its own, once it is needed.
        self._make_scorer = functools.partial(
            make_engine, signals="delayed" if signals == "delayed" else "sync", lateness=0
        )
        self._scorer = self.engine if self.engine.lateness == 0 and signals != "resident" else None
        if certificate is not None:
            certificate.match(
                model_hash=self.checkpoint.model_hash,
                head_hash=head_hash,
                segments=self.checkpoint.model.shape.segments,
                fill=self.engine.fill.name,
                signals=signals,
                dtype=dtype_name(self.checkpoint.model.dtype),
                gate_dtype=gate_dtype,
                profiles={profile.name: profile.hash for profile in profiles},
            )
        self._inbox: dict[str, list[Chunk]] = {}  # of iterators under way
        self._mail: set[str] = set()  # whose inbox is not empty

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        priority: int = 0,
        progress: bool = False,
    ) -> list[Output]:
        """Answers to all prompts, n each, prompt-major. One Sampling for all or one a prompt. Every prompt is checked
        before any work begins; ValueError names the one that is wrong. Requests of a higher `priority` that are under
        way at the same time go first. `progress` draws a bar on stderr."""
        requests = self.prepare(prompts, sampling, streaming=False, priority=priority)
        outputs: dict[str, Output] = {}
        for chunk in _with_progress(self.run(requests), len(requests)) if progress else self.run(requests):
            if chunk.output is not None:
                outputs[chunk.request_id] = chunk.output
        return [outputs[request.id] for request in requests]

    def chat(self, messages: Messages | Sequence[Messages], sampling: Sampling | None = None) -> list[Output]:
        """Answers to one conversation (a list of {"role", "content"}) or to several, through the chat template."""
        return self.generate(self.chat_ids(messages), sampling)

    def chat_ids(self, messages: Messages | Sequence[Messages]) -> list[list[int]]:
        """Token ids of conversations, as the template writes them and with the answer's opening."""
        if self.tokenizer is None:
            raise ValueError("a chat needs a tokenizer, which this checkpoint has not; give token ids to generate")
        chats = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        return [self.tokenizer.chat(chat) for chat in chats]  # type: ignore[arg-type]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        priority: int = 0,
    ) -> Iterator[Chunk]:
        """Tokens of one or several answers as they come (`Chunk.request_id` tells answers apart). Closing the
        iterator early aborts what is left. Checks are made before the first token is asked for."""
        return self.run(self.prepare(prompts, sampling, streaming=True, priority=priority))

    def score(
        self,
        contexts: Prompt | Sequence[Prompt],
        continuations: Prompt | Sequence[Prompt],
        sampling: Sampling | None = None,
    ) -> list[Score]:
        """Log-likelihood of each continuation after its context, under the policy of `sampling`.

        The context is prefilled without its last token; that one and each continuation token but the last run as
        decode rows. Pairs of equal context prefill it once. For strings, the continuation's ids are what
        encode(context + continuation) adds to encode(context). Raw logprobs, one a continuation token.
        """
        pairs = self._pairs(_listed(contexts), _listed(continuations))
        if self._scorer is None:
            self._scorer = self._make_scorer()
        engine = self._scorer
        groups: dict[Any, list[int]] = {}
        for index, (context, _) in enumerate(pairs):
            groups.setdefault(context if engine.mode.name == "sync" else index, []).append(index)
        requests, owners = [], {}
        for members in groups.values():
            forced = [pairs[i][1] for i in members]
            request = engine.prepare(pairs[members[0]][0], sampling, forced=forced, streaming=False)
            requests.append(request)
            owners[request.id] = iter(members)
        scores: dict[int, Score] = {}
        for chunk in self.run(requests) if engine is self.engine else engine.run(requests):
            if chunk.score is not None:
                scores[next(owners[chunk.request_id])] = chunk.score
        return [scores[i] for i in range(len(pairs))]

    def update_weights(self, source: Source, *, in_flight: Literal["finish", "abort"] = "finish") -> int:
        """Exchange the model's weights for those in a state dict (by the released names), a .safetensors file or a
        folder of them; the new version. `Output.weight_version` says which weights an answer is of: 0 those that were
        loaded, then one more each time.

        in_flight: what becomes of answers that were begun: they are finished on the old weights first ("finish"; their
        chunks wait for whoever iterates), or end with finish_reason "abort". Iterators whose first chunk has not been
        asked for run on the new ones. Prompt beginnings that are known are forgotten.

        Everything is checked before the first weight is written: ValueError, with weights, version and answers as they
        were, for names that are missing or unknown, other shapes, numbers that are not finite, and an LLM that keeps to
        a certificate. `checkpoint` goes on describing what was loaded.
        """
        before = self.engine.weight_version
        try:
            return self.engine.update_weights(source, in_flight=in_flight)
        finally:
            scorer = self._scorer
            if scorer is not None and scorer is not self.engine and self.engine.weight_version != before:
                scorer.weights_changed()

    def stats(self) -> dict[str, Any]:
        """Counters of the engine: turns, tokens, segments, pages."""
        return self.engine.stats()

    def prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        streaming: bool = False,
        priority: int = 0,
    ) -> list[Request]:
        """Checked requests for `run`, n a prompt, prompt-major; nothing is queued. ValueError names the prompt that is
        wrong."""
        prompts = _listed(prompts)
        each = (
            list(sampling)
            if isinstance(sampling, Sequence)
            else [Sampling() if sampling is None else sampling] * len(prompts)
        )
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} Samplings for {len(prompts)} prompts; give one, or one a prompt")
        requests = []
        for i, (prompt, ask) in enumerate(zip(prompts, each, strict=True)):
            if not isinstance(ask, Sampling):
                raise ValueError(f"prompt {i}: its sampling is {ask!r}; allowed: a Sampling")
            seed = fresh_seed() if ask.seed is None else ask.seed
            # One Sampling for several prompts gives each its own randomness; a prompt's own Sampling counts from 0.
            own = 0 if isinstance(sampling, Sequence) else i
            for j in range(ask.n):
                try:
                    requests.append(
                        self.engine.prepare(
                            prompt,
                            replace(ask, n=1),
                            seed=derive(seed, own, j),
                            streaming=streaming,
                            priority=priority,
                            prompt_index=i,
                            answer_index=j,
                        )
                    )
                except ValueError as error:
                    raise ValueError(f"prompt {i}: {error}") from error
        return requests

    def _pairs(
        self, contexts: Sequence[Prompt], continuations: Sequence[Prompt]
    ) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        if len(contexts) != len(continuations):
            raise ValueError(f"{len(contexts)} contexts for {len(continuations)} continuations; give as many of each")
        pairs = []
        for context, continuation in zip(contexts, continuations, strict=True):
            ids = self.engine.requests.prompt_ids(context)
            if isinstance(context, str) and isinstance(continuation, str):
                assert self.tokenizer is not None
                continuation = self.tokenizer.encode(context + continuation)[len(ids) :]
            elif isinstance(context, str) or isinstance(continuation, str):
                raise ValueError("a context and its continuation must both be strings or both be token ids")
            pairs.append((ids, tuple(continuation)))
        return pairs

    def run(self, requests: Sequence[Request]) -> Generator[Chunk]:
        """Chunks of prepared requests as they come. Closing the iterator early aborts what is left.

        The requests are queued when the first chunk is asked for (an iterator that never starts holds nothing), and the
        engine is stepped until all have ended. Chunks of others wait in their inbox; ours may be in our own when
        another iterator stepped the engine meanwhile."""
        left: set[str] = set()
        try:
            for request in requests:
                self.engine.submit(request)
                self._inbox[request.id] = []
                left.add(request.id)
            while left:
                ready = [chunk for id in self._mail & left for chunk in self._taken(id)]
                for chunk in self.engine.step() if not ready else ():
                    if chunk.request_id in left:
                        ready.append(chunk)
                    elif chunk.request_id in self._inbox:
                        self._inbox[chunk.request_id].append(chunk)
                        self._mail.add(chunk.request_id)
                for chunk in ready:
                    if chunk.finish_reason:
                        left.discard(chunk.request_id)
                        self._inbox.pop(chunk.request_id)
                    yield chunk
        finally:
            for id in left:
                self.engine.abort(id)
                self._inbox.pop(id, None)
                self._mail.discard(id)

    def _taken(self, id: str) -> list[Chunk]:
        self._mail.discard(id)
        waiting, self._inbox[id] = self._inbox[id], []
        return waiting


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, also from one string or one list of ids."""
    if isinstance(prompts, str) or (isinstance(prompts, list | tuple) and prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise ValueError(f"{prompts!r} is no prompt; allowed: a string, a list of token ids, or a list of such prompts")
    return prompts  # type: ignore[return-value]


def _with_progress(chunks: Iterator[Chunk], total: int) -> Iterator[Chunk]:
    with bars("answers", total=total) as (answers,):
        for chunk in chunks:
            if chunk.finish_reason:
                answers.advance()
            yield chunk
