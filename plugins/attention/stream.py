"""The inner loop of every attention kernel: an online softmax over runs of consecutive keys.

For a tile of query rows i and the keys j streamed so far, with t_ij = (q_i . k_j) * SCALE in log2
units (SCALE = d**-0.5 * log2 e), the state is
    m_i = max_j t_ij     l_i = sum_j 2^(t_ij - m_i)     a_i = sum_j 2^(t_ij - m_i) v_j
all float32. The keys come as two runs A and B of consecutive columns (before and behind the block;
either may be empty). Tiles that lie inside one run are streamed first without a mask; what is left
of both runs, fewer than two tiles, is gathered together and masked. So the tile boundaries depend
on the runs and not on the query tile, and every query row of a batch row sees the same order.

Layout: q [ROWS, D], k and v rows of D contiguous elements.
dtypes: q, k, v in T (fp16, bf16, fp32); products and state fp32; 2^(t-m) is rounded to T for the
second product, whose relative error bound is therefore about 2 ulp of T.
Source: FlashAttention-2's online softmax (Dao 2023), without the final division.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lacache_trt.plugins.triton_support import LOG2_E, Tiles, safe_anchor


@triton.jit
def empty_state(ROWS: tl.constexpr, D: tl.constexpr):
    """The state over no keys: (-inf, 0, 0)."""
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    return maximum, total, acc


@triton.jit
def stream_runs(
    q, k_base, v_base, a_start, a_count, b_start, b_count, maximum, total, acc,
    D: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr,
    REST_KEYS: tl.constexpr = 32,
):  # fmt: skip
    """Absorb the keys of both runs (starts and counts in rows of k_base) into the state."""
    column = tl.arange(0, D)
    a_tiles = a_count // KEYS
    b_tiles = b_count // KEYS
    inside = tl.arange(0, KEYS)[:, None] * D + column[None, :]
    for tile in range(0, a_tiles + b_tiles):
        start = tl.where(tile < a_tiles, a_start + tile * KEYS, b_start + (tile - a_tiles) * KEYS)
        k = tl.load(k_base + start * D + inside)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * SCALE)
        weights = tl.exp2(scores * SCALE - new_maximum[:, None])
        decay = tl.exp2(maximum - new_maximum)
        v = tl.load(v_base + start * D + inside)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        maximum = new_maximum

    a_rest = a_count - a_tiles * KEYS
    rest = a_rest + b_count - b_tiles * KEYS
    a_next = a_start + a_tiles * KEYS
    b_next = b_start + b_tiles * KEYS
    rest_key = tl.arange(0, REST_KEYS)
    for first in tl.range(0, rest, REST_KEYS, num_stages=1):
        index = first + rest_key
        row = tl.where(index < a_rest, a_next + index, b_next + index - a_rest)
        keep = index < rest
        offsets = row[:, None] * D + column[None, :]
        k = tl.load(k_base + offsets, mask=keep[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(keep[None, :], scores * SCALE, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        anchor = safe_anchor(new_maximum)
        weights = tl.exp2(scores - anchor[:, None])
        decay = tl.exp2(maximum - anchor)
        v = tl.load(v_base + offsets, mask=keep[:, None], other=0.0)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        maximum = new_maximum
    return maximum, total, acc


@triton.jit
def outside_runs(low, high, block_start, block_stop):
    """Runs (a_start, a_count, b_start, b_count) of [low, high) without the block."""
    a_count = tl.maximum(tl.minimum(block_start, high) - low, 0)
    b_start = tl.maximum(block_stop, low)
    b_count = tl.maximum(high - b_start, 0)
    return low, a_count, b_start, b_count


@triton.jit
def normalised(total, acc):
    """acc / total, and 0 where no key was seen."""
    return acc * tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]


def stream_constants(tiles: Tiles, head_dim: int) -> dict[str, object]:
    """The constants of a kernel that streams tiles."""
    return {
        "D": head_dim,
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "SCALE": head_dim**-0.5 * LOG2_E,
    }
