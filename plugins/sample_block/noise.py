"""The seeded Gumbel noise: a counter-based hash whose integer bits are the same on every engine.

With the prime p = 2^31 - 1 and mix(h, w, k) = (h + w + k)^5 mod p, all words reduced into [0, p)
first (Python's modulo, so negative seeds are fine):
    h = mix(0, seed, K0)    h = mix(h, step, K1)    h = mix(h, position, K2)
and for each vocabulary id
    h = mix(h, id, K3)      h = mix(h, 0, K4)       bits = h >> 8   (23 bits)
    u = (bits + 1/2) * 2^-23                        gumbel = -log(-log(u))
x -> x^5 permutes the residues (5 does not divide p - 1), and every product stays below 2^62, so
int64 arithmetic is exact. u is exact in float32 and lies strictly inside (0, 1). The value depends
on nothing but (seed, step, position, id): a batch draws what its rows draw alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

PRIME = 2**31 - 1
KEYS = (374761393, 668265263, 1274126177, 1103515245, 987666666)
BITS = 23


def mix(state: ArrayLike, word: ArrayLike, key: int) -> NDArray[np.int64]:
    """One round of the hash on residues and any int64 word."""
    total = (np.asarray(state, np.int64) + np.asarray(word, np.int64) % PRIME + key) % PRIME
    square = total * total % PRIME
    mixed: NDArray[np.int64] = square * square % PRIME * total % PRIME
    return mixed


def gumbel_bits(
    seed: ArrayLike, step: ArrayLike, position: ArrayLike, ids: ArrayLike
) -> NDArray[np.int64]:
    """The 23 bits for each id; the arguments broadcast."""
    state = mix(mix(mix(0, seed, KEYS[0]), step, KEYS[1]), position, KEYS[2])
    return mix(mix(state, ids, KEYS[3]), 0, KEYS[4]) >> (31 - BITS)


def gumbel(
    seed: ArrayLike, step: ArrayLike, position: ArrayLike, ids: ArrayLike
) -> NDArray[np.float64]:
    """The noise in float64."""
    uniform = (gumbel_bits(seed, step, position, ids) + 0.5) * 2.0**-BITS
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise
