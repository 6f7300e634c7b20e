"""What of a request a pipeline can honour. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection

from anydepth.pipeline.manifest import Manifest
from anydepth.types import Request


def asked_depths(request: Request) -> list[int]:
    """Depths at which an adaptive policy has to say whether the request's rows leave."""
    policy, (_, high) = request.policy, request.bounds
    return [d for d in range(1, high) if policy.everywhere or policy.asks(request.sampling, request.bounds, d)]


def check_request(request: Request, manifest: Manifest, *, segments: int, readouts: Collection[int]) -> None:
    """ValueError for what a pipeline does not do, or not with these sizes and readouts (depths)."""
    if request.forced:
        raise ValueError("a pipeline answers; score continuations with LLM.score on one device")
    if request.sampling.n != 1 or request.priority:
        raise ValueError(
            f"n is {request.sampling.n}, priority {request.priority}; submit makes one answer (n = 1), and a "
            f"pipeline's requests go in the order they come (priority 0)"
        )
    positions = len(request.prompt_ids) + request.max_tokens - 1
    most = manifest.pages * manifest.page_size
    if positions > most:
        raise ValueError(
            f"prompt and answer may need {positions} K/V positions; every worker has {most}: raise kv_pages, or "
            f"shorten the prompt or max_tokens"
        )
    if missing := sorted(_read_depths(request, segments) - set(readouts)):
        raise ValueError(
            f"the request may be read at depths {missing}, where these artifacts have no readout; allowed: "
            f"{sorted(readouts)} (readouts in the manifest)"
        )


def _read_depths(request: Request, segments: int) -> set[int]:
    """Depths at which any of its tokens may be read."""
    planned = {request.policy.planned(request.sampling, n, segments) for n in range(request.max_tokens)}
    found = {depth for depth in planned if depth is not None}
    low, high = request.bounds
    if None in planned:
        found |= {high, *(depth for depth in asked_depths(request) if depth >= low)}
    return found | ({segments} if request.sampling.first_token == "prefill" else set())
