"""Groups of answers for reinforcement learning: n answers a prompt, each with a seed of its own, as they are done."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from types import TracebackType

from anydepth.engine.llm import LLM, Prompt
from anydepth.rollout.answers import Answer, answer_of
from anydepth.types import Output, Request, Sampling

Prompts = Prompt | Sequence[Prompt]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The answers to prompt `prompt_index`, by their index. A `partial` one was aborted: the answers that had not ended
    have finish_reason "abort" and the tokens they had come to."""

    prompt_index: int
    prompt_ids: tuple[int, ...]
    answers: tuple[Answer, ...]
    partial: bool


class Rollout:
    """Rollouts with an LLM. Several may be under way at once, and beside other work of the LLM.

    Each method takes prompts (strings or token ids) and one Sampling for all or one a prompt; `n`, if given, replaces
    theirs. Answer j to prompt i has the seed that `LLM.generate` gives it. Where the Sampling names no logprobs they
    are the processed ones, which are those of the distribution that was drawn from (greedy answers: raw). The prompt of
    a group is prefilled once: its first answer runs all positions, the others the last one, through all segments.

    Example: Rollout(LLM("nano")).generate("Ann has 5 . How many has Ann ?", Sampling(temperature=1.0), n=4)[0].answers
    """

    def __init__(self, llm: LLM) -> None:
        if not isinstance(llm, LLM):
            raise ValueError(f"llm is {llm!r}; allowed: an LLM, such as LLM('nano')")
        self.llm = llm

    def groups(self, prompts: Prompts, sampling: Sampling | Sequence[Sampling], *, n: int | None = None) -> Groups:
        """Groups in order of completion: each comes when the last of its answers is done. Everything is checked now,
        nothing runs before the first is asked for. ValueError names the prompt that is wrong."""
        return Groups(self.llm, self._requests(prompts, sampling, n))

    def answers(
        self,
        prompts: Prompts,
        sampling: Sampling | Sequence[Sampling],
        *,
        n: int | None = None,
        skip: Collection[tuple[int, int]] = (),
    ) -> Iterator[Answer]:
        """Single answers as they are done; closing the iterator aborts what is left. `skip`: (prompt_index,
        answer_index) of answers that are not wanted, which changes no other."""
        requests = self._requests(prompts, sampling, n)
        return _answers(self.llm, [r for r in requests if (r.prompt_index, r.answer_index) not in skip])

    def generate(
        self, prompts: Prompts, sampling: Sampling | Sequence[Sampling], *, n: int | None = None
    ) -> list[Group]:
        """All groups, in the order of the prompts."""
        return sorted(self.groups(prompts, sampling, n=n), key=lambda group: group.prompt_index)

    def _requests(self, prompts: Prompts, sampling: Sampling | Sequence[Sampling], n: int | None) -> list[Request]:
        if isinstance(sampling, Sampling):
            requests = self.llm.prepare(prompts, _asked(sampling, n))
        elif not isinstance(sampling, Sequence):
            raise ValueError(f"sampling is {sampling!r}; allowed: a Sampling, or a list of one a prompt")
        else:
            requests = self.llm.prepare(prompts, [_asked(each, n) for each in sampling])
        if not self.llm.engine.pages.sharing and any(request.answer_index for request in requests):
            raise ValueError(
                "this LLM was made with prefix_sharing=False, so that every answer of a group would prefill the prompt "
                "anew; make it without that, or ask with n=1"
            )
        return requests


class Groups:
    """Groups on their way: an iterator that can be ended early, one group at a time or as a whole. As a context
    manager it is closed at the end; answers under way go on until then."""

    def __init__(self, llm: LLM, requests: Sequence[Request]) -> None:
        self._llm = llm
        self._requests: dict[int, list[Request]] = {}  # by prompt, of groups that have not come out
        for request in requests:
            self._requests.setdefault(request.prompt_index, []).append(request)
        self._outputs: dict[str, Output] = {}
        self._unwanted: list[Request] = []
        self._chunks = llm.run(requests)
        self._started = False

    def __iter__(self) -> Groups:
        return self

    def __next__(self) -> Group:
        self._started = True
        for chunk in self._chunks:
            self._abort_unwanted()
            if chunk.output is None:
                continue
            self._outputs[chunk.request_id] = chunk.output
            requests = self._requests[chunk.output.prompt_index]
            if all(request.id in self._outputs for request in requests):
                del self._requests[chunk.output.prompt_index]
                return self._group(requests)
        raise StopIteration

    def abort(self, prompt_index: int) -> None:
        """End the answers to a prompt that are still under way: its group comes out next or soon, partial. Nothing
        happens to a group that has come out."""
        self._unwanted += self._requests.get(prompt_index, [])
        if self._started:
            self._abort_unwanted()

    def close(self) -> list[Group]:
        """End all that is under way; the groups that had not come out, [] if none was ever asked for."""
        if not self._started:
            self._requests.clear()
            self._chunks.close()
            return []
        for prompt_index in self._requests:
            self.abort(prompt_index)
        return list(self)

    def __enter__(self) -> Groups:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _abort_unwanted(self) -> None:
        while self._unwanted:
            self._llm.engine.abort(self._unwanted.pop().id)

    def _group(self, requests: Sequence[Request]) -> Group:
        answers = tuple(_answer(self._llm, request, self._outputs.pop(request.id)) for request in requests)
        return Group(
            prompt_index=requests[0].prompt_index,
            prompt_ids=requests[0].prompt_ids,
            answers=answers,
            partial=any(answer.finish_reason in ("abort", "error") for answer in answers),
        )


def _answers(llm: LLM, requests: Sequence[Request]) -> Iterator[Answer]:
    by_id = {request.id: request for request in requests}
    with closing(llm.run(requests)) as chunks:
        for chunk in chunks:
            if chunk.output is not None:
                yield _answer(llm, by_id[chunk.request_id], chunk.output)


def _answer(llm: LLM, request: Request, output: Output) -> Answer:
    return answer_of(output, sampling=replace(request.sampling, seed=request.seed), fill=llm.engine.fill.name)


def _asked(sampling: Sampling, n: int | None) -> Sampling:
    """As it is asked for here; what is no Sampling is for `LLM.prepare` to refuse."""
    if not isinstance(sampling, Sampling):
        return sampling
    return replace(sampling, n=sampling.n if n is None else n, logprobs=sampling.logprobs or "processed")
