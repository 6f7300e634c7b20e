"""From tokens to answers: what one more token does to a request, and how it ends. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from anydepth.engine.plan import Read, Sequence
from anydepth.types import Chunk, FinishReason, Output, Score, Usage


def add_token(sequence: Sequence, read: Read) -> Chunk:
    """Account one output token. The Chunk carries a finish reason where the answer (or the last scored continuation)
    ends with it, a `score` where a continuation does."""
    request, usage = sequence.request, sequence.usage
    sequence.token_ids.append(read.token_id)
    sequence.depths.append(read.depth)
    usage.output_tokens += 1
    if read.logprob is not None:
        sequence.logprobs.append(read.logprob)
    if sequence.prefill_end < len(request.prompt_ids) or len(sequence.token_ids) > 1:
        usage.decode_tokens += 1
        usage.segments_read += read.depth
    if request.forced:
        sequence.argmax.append(read.greedy)
        return _scored(sequence, read)
    reason, text = _ending(sequence, read.token_id)
    if reason:
        return _last(sequence, reason, text, read)
    return Chunk(text, read.token_id, read.depth, read.logprob, request_id=request.id)


def cut_short(sequence: Sequence, reason: FinishReason) -> Chunk:
    """The last Chunk of a request that ends without another token, with the text that was held back."""
    text, rest = sequence.request.text, None
    if text is not None:
        try:
            rest = text.end()
        except Exception:  # what cannot be decoded may be why it ends; it must let go of what it holds all the same
            rest = ""
    return _last(sequence, reason, rest)


def _ending(sequence: Sequence, token: int) -> tuple[FinishReason | None, str | None]:
    """(finish reason or None, text that became certain). A stop id's own text is left out."""
    request = sequence.request
    text, full = request.text, len(sequence.token_ids) >= request.max_tokens
    if text is None:
        return "stop" if token in request.stop_ids else "length" if full else None, None
    if token in request.stop_ids:
        return "stop", text.end()
    piece = text.push(token)
    if full and not text.stopped:
        piece += text.end()
    return "stop" if text.stopped else "length" if full else None, piece


def _scored(sequence: Sequence, read: Read) -> Chunk:
    """A teacher-forced token. After a continuation's last one the next begins at the same prefilled context."""
    request, target = sequence.request, sequence.target
    assert target is not None
    if len(sequence.token_ids) < len(target):
        return Chunk(None, read.token_id, read.depth, read.logprob, request_id=request.id)
    score = Score(tuple(sequence.logprobs), tuple(sequence.depths), tuple(sequence.argmax), sequence.usage)
    sequence.scored += 1
    if sequence.scored == len(request.forced):
        return _last(sequence, "length", None, read, score)
    sequence.issued, sequence.token_ids, sequence.depths, sequence.logprobs = 0, [], [], []
    sequence.argmax, sequence.usage = [], Usage(prompt_tokens=sequence.usage.prompt_tokens)
    return Chunk(None, read.token_id, read.depth, read.logprob, request_id=request.id, score=score)


def _last(
    sequence: Sequence, reason: FinishReason, text: str | None, read: Read | None = None, score: Score | None = None
) -> Chunk:
    """The Chunk with the Output. Segments whose outcome the host has not seen ran for nothing."""
    request, sampling = sequence.request, sequence.request.sampling
    output = Output(
        request_id=request.id,
        prompt_ids=request.prompt_ids,
        token_ids=tuple(sequence.token_ids),
        depths=tuple(sequence.depths),
        text=request.text.text if request.text else None,
        finish_reason=reason,
        usage=replace(sequence.usage, segments_wasted=sequence.in_flight),
        seed=request.seed,
        logprobs=tuple(sequence.logprobs) if sampling.logprobs else None,
        logprobs_mode=sequence.logprobs_mode,
        prompt_index=request.prompt_index,
        answer_index=request.answer_index,
        weight_version=request.weight_version,
    )
    token, depth, logprob = (read.token_id, read.depth, read.logprob) if read else (None, None, None)
    return Chunk(text, token, depth, logprob, reason, request.id, output, score)
