"""Suffix dropout (DPad): far masks after the block are mostly left out of the canvas.

Of the masks behind the current block, the one at distance i = 0, 1, ... from it is kept with
probability
    p_i = scale * phi(z_i), z_i evenly spaced over [0, sigma] for i = 0 .. window - 1
    p_i = 0 for i >= window
with phi the standard normal density; above 1 it is always kept. Kept columns keep their rotary
positions. Source: Crys-Chen/DPad (GaussianSampler; arXiv 2508.14148). Typical settings there:
sigma 4, scale 2.0, window 256 (about 64 kept). Difference: the reference draws from the global
generator once a block; here the draw is a hash of (suffix_seed, block, distance), the same for
every row, so a batch stays rectangular and equals its rows run alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding.draws import SUFFIX_ID, token_bits, uniform
from lacache_trt.generation import GenerationConfig


def keep_probabilities(length: int, window: int, sigma: float, scale: float) -> NDArray[np.float64]:
    """p_i of the distances 0 .. length - 1: float64 [length], not clipped at 1."""
    inside = min(length, window)
    z = np.linspace(0.0, sigma, window)[:inside]
    p = np.zeros(length)
    p[:inside] = scale * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    return p


def kept_distances(config: GenerationConfig, block: int) -> NDArray[np.int64]:
    """Distances behind the block that stay in the canvas, ascending; all with suffix='full'."""
    distances = np.arange(config.gen_length - (block + 1) * config.block_length)
    if config.suffix == "full":
        return distances
    p = keep_probabilities(
        len(distances), config.suffix_window, config.suffix_sigma, config.suffix_scale
    )
    key = (np.int64(config.suffix_seed), np.int32(block), np.int32(0))
    draws = uniform(token_bits(*key, distances + SUFFIX_ID))
    kept: NDArray[np.int64] = distances[draws < p]
    return kept
