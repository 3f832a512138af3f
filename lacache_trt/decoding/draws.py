"""Seeded draws of the policies, on top of the token noise's hash.

Token noise is keyed on (seed, step, position, vocabulary id). A draw about a position uses an id
that no vocabulary reaches, one per purpose, so it is independent of the tokens' noise and of the
other purposes. The same row draws the same in every batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding.policy import StepView
from lacache_trt.plugins.sample_block.noise import gumbel_bits

RANDOM_REMASKING_ID = 2**30 + 1
ORIGIN_TRANSFER_ID = 2**30 + 2
ALG_TEMP_ID = 2**30 + 3
# Suffix dropout draws for distances: the ids from here on, up to the longest canvas.
SUFFIX_ID = 2**30 + 2**20


def position_bits(view: StepView, purpose_id: int) -> NDArray[np.int64]:
    """23 bits per block position, int64 [B, Bk]."""
    bits: NDArray[np.int64] = gumbel_bits(
        view.seed[:, None], view.step[:, None], view.positions, purpose_id
    )
    return bits


def token_bits(
    seed: np.int64, step: np.int32, position: np.int32, ids: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The 23 bits of the token noise of one position, int64, one per id."""
    bits: NDArray[np.int64] = gumbel_bits(seed, step, position, ids)
    return bits


def uniform(bits: NDArray[np.int64]) -> NDArray[np.float64]:
    """u = (bits + 1/2) 2**-23, strictly inside (0, 1)."""
    return (bits.astype(np.float64) + 0.5) * 2.0**-23


def gumbel(bits: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise, -log(-log u)."""
    noise: NDArray[np.float64] = -np.log(-np.log(uniform(bits)))
    return noise
