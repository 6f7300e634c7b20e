"""From logits to a token: Philox4x32-10, softmax, top-k, top-p, in plain Python integers and floats.

One uniform a token: key = the 64-bit seed (low word first), counter = (output index, 0, 0, 0),
`u = ((x0 * 2^32 + x1) >> 11) * 2^-53`. The token is the first id, ascending, whose cumulative processed probability
exceeds u; if none does, the last id of non-zero probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

MASK = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al. 2011): four 32-bit words of counter and two of key give four random words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_2 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (product_2 >> 32) ^ c1 ^ k0, product_2 & MASK, (product_0 >> 32) ^ c3 ^ k1, product_0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def uniform(seed: int, index: int) -> float:
    """The uniform of output token `index` (0-based), in [0, 1), a multiple of 2^-53."""
    x0, x1, _, _ = philox((index, 0, 0, 0), (seed & MASK, seed >> 32))
    return ((x0 << 32 | x1) >> 11) * 2.0**-53


@dataclass(frozen=True)
class Processed:
    """Probabilities after temperature, top-k and top-p, renormalised; one a vocabulary id.

    cut_gap: the last kept logit of top-k minus the first one cut (inf without a cut). mass_gap: the least distance of a
    cumulative mass of top-p from top_p (inf without top-p). Both say how near another set of tokens was.
    """

    probabilities: list[float]
    cut_gap: float = math.inf
    mass_gap: float = math.inf


def process(logits: list[float], *, temperature: float, top_k: int | None, top_p: float) -> Processed:
    """temperature > 0. Top-k keeps exactly k, of equal logits the lower ids. Top-p keeps, in descending probability
    (equal ones in ascending id), every token before which less than top_p was reached: the crossing token stays."""
    ids = range(len(logits))
    kept, cut_gap, mass_gap = list(ids), math.inf, math.inf
    if top_k is not None and top_k < len(logits):
        ranked = sorted(ids, key=lambda i: (-logits[i], i))
        kept, cut_gap = ranked[:top_k], logits[ranked[top_k - 1]] - logits[ranked[top_k]]
    highest = max(logits)
    weight = {i: math.exp((logits[i] - highest) / temperature) for i in kept}
    if top_p < 1.0:
        total = math.fsum(weight.values())
        before, inside = 0.0, []
        for i in sorted(kept, key=lambda i: (-weight[i], i)):
            if before < top_p:
                inside.append(i)
            before += weight[i] / total
            mass_gap = min(mass_gap, abs(before - top_p))
        kept = inside
    total = math.fsum(weight[i] for i in kept)
    probabilities = [0.0] * len(logits)
    for i in kept:
        probabilities[i] = weight[i] / total
    return Processed(probabilities, cut_gap, mass_gap)


@dataclass(frozen=True)
class Draw:
    """How one token was chosen, and how nearly another one was.

    token: the id. top_gap: largest minus second largest raw logit. Greedy leaves the rest as it is. u fell into
    [low, high), the token's interval of cumulative processed probability; cut_gap, mass_gap: see Processed.
    """

    token: int
    top_gap: float
    sampled: bool = False
    u: float = math.nan
    low: float = math.nan
    high: float = math.nan
    cut_gap: float = math.inf
    mass_gap: float = math.inf


def argmax(logits: list[float]) -> int:
    """The lowest id among equals."""
    return logits.index(max(logits))


def log_softmax(logits: list[float]) -> list[float]:
    highest = max(logits)
    log_total = math.log(math.fsum(math.exp(z - highest) for z in logits))
    return [z - highest - log_total for z in logits]


def pick(probabilities: list[float], u: float) -> tuple[int, float, float]:
    """The first id whose cumulative probability exceeds u, or the last of non-zero probability; its interval."""
    token, low, high = -1, 0.0, 0.0
    for i, probability in enumerate(probabilities):
        if probability > 0.0:
            token, low, high = i, high, high + probability
            if high > u:
                break
    return token, low, high


def sample(
    logits_V: Tensor, *, index: int, seed: int, temperature: float, top_k: int | None, top_p: float, logprobs: str
) -> tuple[Draw, float]:
    """The token of output `index` and its logprob: of the raw logits, or "processed" (greedy: raw in both)."""
    logits = logits_V.tolist()
    first, second = sorted(logits, reverse=True)[:2]
    if temperature == 0.0:
        token = argmax(logits)
        return Draw(token, first - second), log_softmax(logits)[token]
    processed = process(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    u = uniform(seed, index)
    token, low, high = pick(processed.probabilities, u)
    draw = Draw(token, first - second, True, u, low, high, processed.cut_gap, processed.mass_gap)
    chosen = processed.probabilities[token]
    return draw, math.log(chosen) if logprobs == "processed" else log_softmax(logits)[token]
