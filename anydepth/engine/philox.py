"""Counter-based randomness: one uniform a token that depends on the seed and the output index alone.

Philox4x32-10 (Salmon et al., SC 2011). Key = the 64-bit seed, low word first; counter = (output index, 0, 0, 0);
u = ((x0 * 2^32 + x1) >> 11) * 2^-53.
"""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(counter: NDArray[np.uint64], key: tuple[int, int]) -> NDArray[np.uint64]:
    """Ten rounds over `counter` [4, n] of 32-bit words held in uint64; returns [4, n]."""
    low = np.uint64(_LOW)
    x0, x1, x2, x3 = counter
    for round_ in range(10):
        k0, k1 = (np.uint64((k + round_ * w) & _LOW) for k, w in zip(key, _WEYL, strict=True))
        a, b = (np.uint64(m) * x for m, x in zip(_MULTIPLIERS, (x0, x2), strict=True))
        x0, x1, x2, x3 = (b >> np.uint64(32)) ^ x1 ^ k0, b & low, (a >> np.uint64(32)) ^ x3 ^ k1, a & low
    return np.stack((x0, x1, x2, x3))


def uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """u in [0, 1) of outputs 0 .. count-1 of the answer with this seed, [count] float64."""
    counter = np.zeros((4, count), dtype=np.uint64)
    counter[0] = np.arange(count, dtype=np.uint64)
    x = philox(counter, (seed & _LOW, seed >> 32))
    return ((x[0] << np.uint64(32) | x[1]) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive(seed: int, prompt: int, answer: int) -> int:
    """The seed of answer `answer` to prompt `prompt`; derive(seed, 0, 0) == seed.

    Philox once more, with (prompt, answer, 0, 1) as its counter: the 1 keeps it apart from every token's counter.
    """
    if prompt == answer == 0:
        return seed
    x = philox(np.array([[prompt], [answer], [0], [1]], dtype=np.uint64), (seed & _LOW, seed >> 32))
    return int(x[0, 0]) << 32 | int(x[1, 0])


def fresh_seed() -> int:
    """A seed nobody chose, 63 bits so that every JSON reader keeps it whole."""
    return secrets.randbits(63)
