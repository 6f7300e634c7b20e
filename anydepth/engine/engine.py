"""The loop: requests in, tokens out, one turn a step. Drive it yourself, or let `LLM` do it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from anydepth.certificate import Certificate
from anydepth.engine.deferral import Deferral
from anydepth.engine.invariant import Invariant, in_blocks
from anydepth.engine.pages import Pages
from anydepth.engine.plan import TurnWork
from anydepth.engine.requests import Requests
from anydepth.engine.signals import load_mode
from anydepth.engine.sizes import check_flags, check_whole, default_pages, host_pages, pending
from anydepth.engine.submission import Submission, default_submission
from anydepth.exits.base import Policy, Thresholds, known_profiles
from anydepth.exits.load import load_policy
from anydepth.models.base import Model
from anydepth.models.update import NewWeights, Source
from anydepth.ops.fill import load_fill
from anydepth.profile import Profile, policy_of
from anydepth.types import Chunk, FinishReason, Request, Sampling, Usage, strict_options

if TYPE_CHECKING:
    from anydepth.models.tokenizer import Tokenizer  # its library is not needed to run on token ids


@strict_options
class Engine:
    """Continuous batching by depth over one model.

    `submit` a prompt, call `step` until `idle`; each step runs one segment for every row and returns the tokens that
    came out. `work`, when set to a list, collects a TurnWork a step. Every request keeps to the `certificate`, if there
    is one; whether that is for this model is the caller's to check (`LLM` does). `batch_invariant`: a request's logits
    have the same bits whatever else is in the batch (`engine.invariant`).
    """

    def __init__(
        self,
        model: Model,
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: frozenset[int] = frozenset(),
        fill: str | None = None,
        signals: str = "sync",
        lateness: int | None = None,
        submission: Submission | None = None,
        max_batch: int = 32,
        page_size: int = 16,
        kv_pages: int | None = None,
        max_batched_tokens: int = 512,
        pending_positions: int | None = None,
        prefix_sharing: bool = True,
        host_kv_bytes: int | None = None,
        gate_dtype: str = "float32",
        certificate: Certificate | None = None,
        profiles: Sequence[Profile] = (),
        batch_invariant: bool = False,
    ) -> None:
        check_whole(
            max_batch=max_batch,
            page_size=page_size,
            kv_pages=1 if kv_pages is None else kv_pages,
            max_batched_tokens=max_batched_tokens,
        )
        check_flags(prefix_sharing=prefix_sharing, batch_invariant=batch_invariant)
        if gate_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"gate_dtype is {gate_dtype!r}; allowed: 'float32', 'bfloat16' (parity arms)")
        self.model = model
        self.fill = load_fill(fill, model.shape)
        self.gate_dtype = gate_dtype
        self._invariant = Invariant(model) if batch_invariant else None
        shape = model.shape
        if kv_pages is None:
            kv_pages = default_pages(model, self.fill.planes(shape), max_batch, page_size)
        self.mode, self.lateness = load_mode(signals, lateness, self.fill, shape)
        if submission is not None and not isinstance(submission, Submission):
            raise ValueError(
                f"submission is {submission!r}; allowed: a Submission, or None for all that the device can"
            )
        self.submission = submission or default_submission(self.mode.name, model.device)
        self.submission.check(self.mode.name, model.device)
        self.pages = Pages(kv_pages, page_size, sharing=prefix_sharing)
        self.context = min(shape.max_positions, kv_pages * page_size)
        sizes = {"slots": max_batch, "pages": kv_pages, "page_size": page_size, "context": self.context}
        most_pending = pending(pending_positions, self.fill, self.context)
        deferral = None
        if most_pending:
            sizes["states_per_slot"] = most_pending + 1
            deferral = Deferral(shape.segments, most=most_pending, rows_per_turn=max_batched_tokens)
        self.slots = self.mode.slots(model, self.fill, **sizes)
        self.scheduler = self.mode.scheduler(
            self.fill,
            segments=shape.segments,
            slots=max_batch,
            pages=self.pages,
            layered=not shape.shared_weights,
            max_batched_tokens=max_batched_tokens,
            prefill_rows=self.fill.prefill_rows,
            host_pages=host_pages(host_kv_bytes, self.slots.pool, self.context),
            deferral=deferral,
        )
        self.runner = self.mode.runner(
            self._invariant or model, self.fill, self.slots, lateness=self.lateness, submission=self.submission
        )
        self.requests = Requests(
            shape,
            load=_policies(gate_dtype, known_profiles(profiles, shape), batch_invariant=batch_invariant),
            tokenizer=tokenizer,
            eos_ids=eos_ids,
            certificate=certificate,
            default_policy=policy_of(profiles),
        )
        self.profiles = {profile.name: profile for profile in profiles}
        self.work: list[TurnWork] | None = None
        self.tallied: dict[str, dict[str, int]] | None = None  # by request that has ended, if somebody asks
        self.weight_version = 0
        self._aborted: list[Chunk] = []
        self._held: list[Chunk] = []  # came while weights were exchanged, and are accounted for
        self._stepping, self._to_abort = False, list[str]()
        self._usage, self._ends, self._peak_pages = Usage(), Counter[str](), 0

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._aborted and not self._held

    def prepare(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        id: str | None = None,
        forced: Sequence[Sequence[int]] = (),
        streaming: bool = True,
        seed: int | None = None,
        priority: int = 0,
        prompt_index: int = 0,
        answer_index: int = 0,
    ) -> Request:
        """A checked Request for one answer, without queueing it. ValueError for anything that cannot be honoured.

        `forced` are continuations to score instead of sampling (one a request but with signals="sync"). Without
        `streaming`, text is made at the end only.
        """
        if forced and (self.lateness or self.mode.name == "resident"):
            raise ValueError(
                f"continuations are scored without lateness; this engine has signals={self.mode.name!r}, "
                f"lateness={self.lateness}: use LLM.score, or an engine with signals='sync'"
            )
        request = self.requests.make(
            prompt,
            sampling,
            id=id,
            forced=forced,
            streaming=streaming,
            seed=seed,
            priority=priority,
            prompt_index=prompt_index,
            answer_index=answer_index,
        )
        self._check_pool(request)
        return request

    def submit(
        self,
        prompt: str | Sequence[int] | Request,
        sampling: Sampling | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Queue one answer; those of higher `priority` go first. ValueError for bad input or an id in use; what is
        under way is not touched."""
        if not isinstance(prompt, Request):
            request = self.prepare(prompt, sampling, id=id, priority=priority)
        elif sampling is not None or id is not None or priority:
            raise ValueError(f"request {prompt.id!r} has its sampling, id and priority; give them to prepare")
        else:
            request = prompt
        if request.sampling.n != 1:
            raise ValueError(f"n is {request.sampling.n}; submit makes one answer, LLM.generate makes n")
        if request.id in self.scheduler.sequences:
            raise ValueError(f"request id {request.id!r} is in use; give another or abort the first")
        if request.submitted:
            raise ValueError(f"request {request.id!r} was submitted before; prepare a new one for another answer")
        request.submitted, request.weight_version = True, self.weight_version
        self.scheduler.submit(request)
        return request

    def step(self) -> list[Chunk]:
        """Run one turn and return the tokens that came out of it; [] when idle. If a turn raises, the requests that
        were running end with `error`, those that wait stay, and the error goes to the caller."""
        if self._held:
            held, self._held = self._held, []
            return held
        aborted, self._aborted = self._aborted, []
        if self.scheduler.idle:
            self.runner.drain()
            self._account(None, aborted)
            return aborted
        self._stepping = True
        self.scheduler.said = []
        try:
            plan = self.scheduler.next()
            self._peak_pages = max(self._peak_pages, self.pages.in_use)
            result = self.runner.run(plan)
            seats = [(s.request, s.slot) for s in self.scheduler.running.values()] if self.tallied is not None else []
            chunks = self.scheduler.update(plan, result)
            self._tally(seats)
        except BaseException:
            self._aborted += aborted + [chunk for chunk in self.scheduler.said if chunk.finish_reason]
            for request_id in self.scheduler.unfinished():
                self._drop(request_id, "error")
            raise
        finally:
            self._stepping = False
            while self._to_abort:
                self._drop(self._to_abort.pop(), "abort")
        self._account(result.work, aborted + chunks)
        if self.scheduler.idle:
            self.runner.drain()
        return aborted + chunks

    def _tally(self, seats: list[tuple[Request, int]]) -> None:
        """Keep what the policies tallied of those of these requests that have ended."""
        for request, slot in seats:
            policy = request.policy
            assert isinstance(policy, Policy) and self.tallied is not None
            if policy.tallies and request.id not in self.scheduler.sequences:
                self.tallied[request.id] = self.slots.tallied(policy, slot)

    def run(self, requests: Iterable[Request]) -> Iterator[Chunk]:
        """Queue the requests and step until all has ended; every token as it comes. For callers who have the engine to
        themselves; an iterator that is closed early aborts what is left."""
        left: list[str] = []
        try:
            for request in requests:
                left.append(self.submit(request).id)
            while not self.idle:
                yield from self.step()
        finally:
            for request_id in left:
                self.abort(request_id)

    def abort(self, request_id: str) -> bool:
        """Stop a request wherever it stands and free what it holds; whether it was here. The next step returns its
        last Chunk."""
        if self._stepping:  # a stream that the garbage collector closes can ask in the middle of a turn
            self._to_abort.append(request_id)
            return request_id in self.scheduler.sequences
        return self._drop(request_id, "abort")

    def _drop(self, request_id: str, reason: FinishReason) -> bool:
        sequence = self.scheduler.running.get(request_id)
        slot = -1 if sequence is None else sequence.slot
        chunk = self.scheduler.abort(request_id, reason)
        if slot >= 0:
            self.slots.vacate(slot)
        if chunk is not None:
            self._aborted.append(chunk)
        return chunk is not None

    def update_weights(self, source: Source, *, in_flight: Literal["finish", "abort"] = "finish") -> int:
        """Exchange the model's weights; the new version, which every request submitted from now on carries.

        source: see `NewWeights`. in_flight: whether requests that were submitted and have not ended are finished on
        the old weights first, those that wait included, or end with `abort`; the next step returns their Chunks.
        Known prompt beginnings are forgotten. Raises ValueError, with weights, version and requests as they were, for
        weights that do not fit and where there is a certificate, which is for the weights it was made with.
        """
        if in_flight not in ("finish", "abort"):
            raise ValueError(f"in_flight is {in_flight!r}; allowed: 'finish', 'abort'")
        if self.requests.certificate is not None:
            raise ValueError(
                "this engine keeps to a certificate, which is for the weights it was made with; load the model without "
                "it to exchange them, and calibrate the result"
            )
        if self.model.shape.headed or self.model.shape.probed:
            raise ValueError(
                "this model has exit heads, which were made for its weights; load it without heads= to exchange them, "
                "and train heads for the result"
            )
        assert not self._stepping
        weights = NewWeights(source, self.model)
        for request_id in list(self.scheduler.sequences) if in_flight == "abort" else ():
            self.abort(request_id)
        held = list[Chunk]()
        try:
            while not self.idle:
                held += self.step()
        finally:
            self._held = held + self._held
        self.runner.drain()
        try:
            weights.write()
        finally:
            self.weights_changed()
        return self.weight_version

    def weights_changed(self) -> None:
        """Say that the model's weights are others now, for engines that share a model. None of its requests may be
        under way."""
        assert self.scheduler.idle, "requests are under way"
        self.pages.forget()
        if self._invariant is not None:
            self._invariant.measure()
        self.weight_version += 1

    def stats(self) -> dict[str, Any]:
        """Counters since the engine was made, and what is held now."""
        shape = self.model.shape
        tallies = Counter[str]()
        for policy, state in self.slots.states.items():
            for name, column in policy.tallies.items():
                tallies[name] += int(state[:, column].sum())
        return {
            "turns": self.scheduler.turn,
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "finished": dict(self._ends),
            "usage": asdict(self._usage),
            "fill": self.fill.name,
            "signals": self.mode.name,
            "lateness": self.lateness,
            "segments": shape.segments,
            "pages": self.pages.count,
            "pages_in_use": self.pages.in_use,
            "pages_peak": self._peak_pages,
            "preempted": self.scheduler.preempted,
            "prefix_tokens": self.pages.shared_tokens,
            "prefix_pages": self.pages.known,
            "prefix_pages_copied": self.pages.copied,
            "prefix_pages_evicted": self.pages.evicted,
            "kv_bytes": self.slots.pool.data.nbytes,
            **self._pending(),
            "weight_version": self.weight_version,
            "batch_invariant": self._invariant.counts if self._invariant else None,
            **tallies,
        }

    def _pending(self) -> dict[str, int]:
        """Positions that wait under `deferred`: now, at most so far, in bytes, and the size of their pool."""
        deferral, states = self.scheduler.deferral, self.slots.h_Wd
        if deferral is None:
            return {}
        now = sum(map(deferral.waiting, self.scheduler.running.values()))
        return {
            "pending": now,
            "pending_peak": deferral.peak,
            "pending_peak_bytes": deferral.peak * states.shape[1] * states.itemsize,
            "pending_pool_bytes": states.nbytes,
        }

    def _check_pool(self, request: Request) -> None:
        positions = self.scheduler.positions_of(request)
        needed, size = self.pages.needed(positions), self.pages.size
        if needed > self.pages.count:
            raise ValueError(
                f"prompt and answer may need {positions} K/V positions, {needed} pages of {size}; the "
                f"pool has {self.pages.count}: raise kv_pages, or shorten the prompt or max_tokens"
            )

    def _account(self, work: TurnWork | None, chunks: list[Chunk]) -> None:
        if work is not None and self.work is not None:
            self.work.append(work)
        for chunk in chunks:
            if chunk.output is not None:
                self._ends[chunk.output.finish_reason] += 1
            if ended := chunk.score or chunk.output:
                self._usage += ended.usage


def _policies(gate_dtype: str, profiles: Mapping[str, Thresholds], *, batch_invariant: bool) -> Callable[[str], Policy]:
    """What loads a policy by its name."""

    def load(name: str) -> Policy:
        policy = load_policy(name, gate_dtype=gate_dtype, profiles=profiles)
        return in_blocks(policy) if batch_invariant else policy

    return load
