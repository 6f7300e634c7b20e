"""From what a caller asks to a Request: everything resolved and checked before any work begins."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from anydepth.certificate import Certificate
from anydepth.engine.philox import fresh_seed
from anydepth.engine.text import TextStream
from anydepth.exits.base import Policy, bounds_of
from anydepth.exits.load import policy_name
from anydepth.types import Request, Sampling, Shape

if TYPE_CHECKING:
    from anydepth.models.tokenizer import Tokenizer


class Requests:
    """Makes the requests of one engine. `load` gives a policy by name; it is asked once for each. `default_policy`: of
    requests that name no exit setting."""

    def __init__(
        self,
        shape: Shape,
        *,
        load: Callable[[str], Policy],
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        certificate: Certificate | None,
        default_policy: str | None = None,
    ) -> None:
        self.shape, self.tokenizer, self.eos_ids, self.certificate = shape, tokenizer, eos_ids, certificate
        self._load, self._default_policy = load, default_policy
        self._policies: dict[str, Policy] = {}
        self._ids = itertools.count()

    def make(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None,
        *,
        id: str | None = None,
        forced: Sequence[Sequence[int]] = (),
        streaming: bool = True,
        seed: int | None = None,
        priority: int = 0,
        prompt_index: int = 0,
        answer_index: int = 0,
    ) -> Request:
        """See `Engine.prepare`."""
        sampling = self._settled(sampling)
        if forced:  # scored from the context's last token on, which is a decode row
            sampling = replace(sampling, first_token="policy")
        prompt_ids = self.prompt_ids(prompt)
        policy = self._policy(sampling)
        if sampling.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, which this checkpoint has not; use stop_token_ids")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority is {priority!r}; allowed: whole numbers, higher ones go first")
        room = self.shape.max_positions - len(prompt_ids) + 1
        self._check_forced(forced, len(prompt_ids), room)
        if seed is None:
            seed = fresh_seed() if sampling.seed is None else sampling.seed
        request = Request(
            id=id if id is not None else f"request-{next(self._ids)}",
            prompt_ids=prompt_ids,
            sampling=sampling,
            policy=policy,
            bounds=bounds_of(sampling, self.shape),
            stop_ids=frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.eos_ids),
            seed=seed,
            max_tokens=max(map(len, forced)) if forced else min(sampling.max_tokens, room),
            forced=tuple(tuple(ids) for ids in forced),
            text=TextStream(self.tokenizer.decode, sampling.stop, eager=streaming) if self.tokenizer else None,
            priority=priority,
            prompt_index=prompt_index,
            answer_index=answer_index,
        )
        self._check_depths(request)
        return request

    def prompt_ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Token ids of a prompt, checked. A string is encoded with the checkpoint's tokenizer."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    "the prompt is a string, but this checkpoint has no tokenizer; give token ids, or a "
                    "tokenizer= to LLM"
                )
            prompt = self.tokenizer.encode(prompt)
        self._check_ids("prompt", prompt)
        longest = self.shape.max_positions
        if len(prompt) > longest:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; this model's length is {longest}: shorten the prompt"
            )
        return tuple(prompt)

    def _settled(self, sampling: Sampling | None) -> Sampling:
        """The settings, with the certified exit where there is a certificate, or else the default policy."""
        sampling = Sampling() if sampling is None else sampling
        if not isinstance(sampling, Sampling):
            raise ValueError(f"sampling is {sampling!r}; allowed: a Sampling, or None for the defaults")
        name = policy_name(sampling)
        if self.certificate is not None:
            return self.certificate.hold(sampling, policy=name)
        unsaid = name == "never" and sampling.exit_policy is None
        return replace(sampling, exit_policy=self._default_policy) if unsaid else sampling

    def _policy(self, sampling: Sampling) -> Policy:
        name = policy_name(sampling)
        if name not in self._policies:
            self._policies[name] = self._load(name)
        self._policies[name].check(sampling, self.shape)
        return self._policies[name]

    def _check_ids(self, what: str, ids: Sequence[int]) -> None:
        vocab = self.shape.vocab
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise ValueError(
                f"the {what} is {ids!r}; allowed: a string or a list of token ids (of an array, .tolist())"
            )
        if len(ids) == 0:
            raise ValueError(f"the {what} is empty; give at least one token")
        for at, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                raise ValueError(f"the {what} has {token!r} at index {at}; allowed: token ids 0 .. {vocab - 1}")

    def _check_forced(self, forced: Sequence[Sequence[int]], prompt: int, room: int) -> None:
        for ids in forced:
            self._check_ids("continuation", ids)
            if len(ids) > room:
                raise ValueError(
                    f"the continuation has {len(ids)} tokens after a context of {prompt}; the "
                    f"model's length of {self.shape.max_positions} leaves room for {room}"
                )

    def _check_depths(self, request: Request) -> None:
        """A trace must reach to the end. An own policy's planned depths: a wrong one would read a state that is not
        there."""
        (low, high), sampling, policy = request.bounds, request.sampling, request.policy
        if sampling.trace is not None and len(sampling.trace) < request.max_tokens:
            raise ValueError(
                f"trace has {len(sampling.trace)} depths, but the request may produce {request.max_tokens} tokens; "
                f"give one depth for each, or lower max_tokens"
            )
        for index in range(request.max_tokens if ":" in policy_name(sampling) else 0):
            depth = policy.planned(sampling, index, self.shape.segments)
            if depth is None and getattr(policy, "needs", None) == "nothing":
                raise ValueError(
                    f"exit_policy {policy.name!r} plans no depth for output {index} and needs "
                    f"nothing to decide by; give it one of them"
                )
            if depth is not None and not low <= depth <= high:
                raise ValueError(
                    f"exit_policy {policy.name!r} plans depth {depth} for output {index}; allowed: {low} .. {high}"
                )
