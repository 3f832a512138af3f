"""Triton kernels of SampleBlock: one pass over the vocabulary, then a small merge.

For row (b, r) with g = guide_row[b], cond = logits[b, r], un = logits[g, r], in float32:
    x = cond                                        if g == b
    x = un + (cfg_scale[b] + 1) * (cond - un)       otherwise;    x[suppress_ids[b]] = -inf
    token = argmax_v x_v                            if temperature[b] <= 0
    token = argmax_v x_v + temperature[b] * gumbel  otherwise (`noise`);  ties: lowest id
    y = x with y[confidence_exclude_ids[b]] = -inf,     p = softmax(y)
    confidence = p[token]     margin = p_1 - p_2     neg_entropy = sum p log p
NaN or +inf in x makes the three scores NaN through the sums, and the token any valid id.

Each program of the first kernel reduces CHUNK ids of one row to seven numbers: best score, its id
and its x, the two largest y (as a multiset), and with m = max y
    l = sum e^(y - m)       a = sum (y - m) e^(y - m)
The second kernel, one program per row, shifts them to the common maximum M: with d = m - M,
l -> e^d l and a -> e^d (a + d l); then confidence = e^(y_token - M) / l,
margin = (1 - e^(y_2 - M)) / l and neg_entropy = a / l - log l. No probability is stored, no atomic
used. Ids are exact in float32 (V < 2^24).

Layout: logits [B, R, V] in T or fp32, contiguous; positions, token [B, R]; scores [B, R] fp32;
id lists [B, S] and [B, E] padded with -1. Workspace: `workspace_size` float32.
Error bound against float64 on the same logits: 2e-6 absolute for confidence and margin, 2e-6
times (1 + log V) for neg_entropy; the token is exact up to ties of x in float32.
Bytes: the logits once (twice for guided rows).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lacache_trt.plugins.sample_block.gumbel import gumbel_noise
from lacache_trt.plugins.triton_support import (
    POINTER_TYPES,
    Configuration,
    ceil_div,
    dtype_label,
    next_power_of_two,
    safe_anchor,
    unspecialised,
)

CHUNK = 2048
WARPS = 4
MERGE_WARPS = 1
FIELDS = 7


@triton.jit
def _blanked(
    x, ids, first_id, listed, batch, count, CHUNK: tl.constexpr, FINITE_ONLY: tl.constexpr
):
    """(x with -inf at the ids of row `batch` of a list [B, count], whether any was met).

    The list is read 16 entries at a time and compared with the chunk's range; only a chunk that
    holds a listed id compares every id. FINITE_ONLY leaves NaN and +inf as they are.
    """
    met = count < 0
    for start in range(0, count, 16):
        entry = start + tl.arange(0, 16)
        found = tl.load(listed + batch * count + entry, mask=entry < count, other=-1)
        inside = (found >= first_id) & (found < first_id + CHUNK)
        if tl.max(inside.to(tl.int32), 0) > 0:
            met = met | True
            for index in range(start, tl.minimum(start + 16, count)):
                here = ids == tl.load(listed + batch * count + index)
                if FINITE_ONLY:
                    here = here & (x < float("inf"))
                x = tl.where(here, float("-inf"), x)
    return x, met


@triton.jit
def _two_largest(first, second, other_first, other_second):
    """The two largest of two pairs, the larger one of each first."""
    middle = tl.maximum(tl.minimum(first, other_first), tl.maximum(second, other_second))
    return tl.maximum(first, other_first), middle


@triton.jit
def _add_pairs(left, right, other_left, other_right):
    return left + other_left, right + other_right


@unspecialised("rows_per_batch", "vocabulary", "suppressed", "excluded", "chunks")
def sample_chunk_kernel(
    logits, positions, temperature, seed, step, guide_row, cfg_scale,
    suppress_ids, confidence_exclude_ids, workspace,
    rows_per_batch, vocabulary, suppressed, excluded, chunks,
    CHUNK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks, B * R)."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    batch = row // rows_per_batch
    if ALIGNED:  # the same value, visibly a multiple of 16: 16-byte loads
        vocabulary = vocabulary // 16 * 16
    lane = tl.arange(0, CHUNK)
    first_id = chunk * CHUNK
    ids = first_id + lane
    keep = ids < vocabulary
    offset = row.to(tl.int64) * vocabulary
    x = tl.load(logits + offset + ids, mask=keep, other=float("-inf")).to(tl.float32)
    heat = tl.load(temperature + batch)
    guide = tl.load(guide_row + batch)
    if guide != batch:
        offset = (guide * rows_per_batch + row % rows_per_batch).to(tl.int64) * vocabulary
        un = tl.load(logits + offset + ids, mask=keep, other=0.0).to(tl.float32)
        x = un + (tl.load(cfg_scale + batch) + 1.0) * (x - un)
    x, _ = _blanked(x, ids, first_id, suppress_ids, batch, suppressed, CHUNK, False)
    y, differs = _blanked(
        x, ids, first_id, confidence_exclude_ids, batch, excluded, CHUNK, True
    )  # fmt: skip

    nothing = tl.full((CHUNK,), float("-inf"), tl.float32)
    first, second = tl.reduce((y, nothing), 0, _two_largest)
    shifted = y - safe_anchor(first)
    shifted = tl.maximum(shifted, -200.0, propagate_nan=tl.PropagateNan.ALL)  # e^-200 is 0
    weight = tl.exp(shifted)
    total, moment = tl.reduce((weight, weight * shifted), 0, _add_pairs)

    score = x
    best = first
    if heat > 0.0:
        score = x + heat * gumbel_noise(
            tl.load(seed + batch), tl.load(step + batch), tl.load(positions + row), ids
        )
    if (heat > 0.0) | differs:
        best = tl.max(score, 0)
    best_lane = tl.min(tl.where(score == best, lane, CHUNK), 0)
    picked = best
    if heat > 0.0:
        picked = tl.max(tl.where(lane == best_lane, x, float("-inf")), 0)

    slot = workspace + row.to(tl.int64) * (7 * chunks) + chunk
    tl.store(slot, best)
    tl.store(slot + chunks, (first_id + best_lane).to(tl.float32))
    tl.store(slot + 2 * chunks, picked)
    tl.store(slot + 3 * chunks, first)
    tl.store(slot + 4 * chunks, second)
    tl.store(slot + 5 * chunks, total)
    tl.store(slot + 6 * chunks, moment)


@unspecialised("rows_per_batch", "vocabulary", "excluded", "chunks")
def sample_merge_kernel(
    confidence_exclude_ids, workspace, token, confidence, margin, neg_entropy,
    rows_per_batch, vocabulary, excluded, chunks,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Grid: (B * R,)."""
    row = tl.program_id(0)
    lane = tl.arange(0, CHUNKS)
    keep = lane < chunks
    slot = workspace + row.to(tl.int64) * (7 * chunks) + lane
    scores = tl.load(slot, mask=keep, other=float("-inf"))
    ids = tl.load(slot + chunks, mask=keep, other=16777216.0)
    picked = tl.load(slot + 2 * chunks, mask=keep, other=float("-inf"))
    firsts = tl.load(slot + 3 * chunks, mask=keep, other=float("-inf"))
    seconds = tl.load(slot + 4 * chunks, mask=keep, other=float("-inf"))
    totals = tl.load(slot + 5 * chunks, mask=keep, other=0.0)
    moments = tl.load(slot + 6 * chunks, mask=keep, other=0.0)

    first, second = tl.reduce((firsts, seconds), 0, _two_largest)
    anchor = safe_anchor(first)
    shift = tl.where(firsts == float("-inf"), 0.0, firsts - anchor)
    factor = tl.where(firsts == float("-inf"), 0.0, tl.exp(shift))
    total, moment = tl.reduce((totals * factor, factor * (moments + shift * totals)), 0, _add_pairs)

    best = tl.max(scores, 0)
    lowest = tl.min(tl.where(scores == best, ids, 16777216.0), 0)
    y = tl.max(tl.where(ids == lowest, picked, float("-inf")), 0)
    chosen = tl.minimum(lowest.to(tl.int32), vocabulary - 1)
    batch = row // rows_per_batch
    for start in range(0, excluded, 16):
        entry = start + tl.arange(0, 16)
        found = tl.load(
            confidence_exclude_ids + batch * excluded + entry, mask=entry < excluded, other=-1
        )
        y = tl.where(tl.max((found == chosen).to(tl.int32), 0) > 0, float("-inf"), y)

    tl.store(token + row, chosen)
    tl.store(confidence + row, tl.exp(y - first) / total)
    tl.store(margin + row, (1.0 - tl.exp(second - first)) / total)
    tl.store(neg_entropy + row, moment / total - tl.log(total))


def chunks_for(vocabulary: int, chunk: int = CHUNK) -> int:
    """Programs per row of the first kernel."""
    return ceil_div(vocabulary, chunk)


def workspace_size(batch: int, rows: int, vocabulary: int, chunk: int = CHUNK) -> int:
    """Float32 elements of workspace that `launch` needs."""
    return FIELDS * batch * rows * chunks_for(vocabulary, chunk)


def launch(
    logits: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    step: Tensor,
    guide_row: Tensor,
    cfg_scale: Tensor,
    suppress_ids: Tensor,
    confidence_exclude_ids: Tensor,
    workspace: Tensor,
    token: Tensor,
    confidence: Tensor,
    margin: Tensor,
    neg_entropy: Tensor,
    chunk: int = CHUNK,
    warps: int = WARPS,
) -> None:
    """Write the last four tensors [B, R]. `workspace`: float32 of `workspace_size` elements."""
    batch, rows, vocabulary = logits.shape
    chunks = chunks_for(vocabulary, chunk)
    shape = (rows, vocabulary, suppress_ids.shape[1], confidence_exclude_ids.shape[1], chunks)
    sample_chunk_kernel[(chunks, batch * rows)](
        logits, positions, temperature, seed, step, guide_row, cfg_scale,
        suppress_ids, confidence_exclude_ids, workspace, *shape,
        CHUNK=chunk, ALIGNED=vocabulary % 16 == 0, num_warps=warps, num_stages=1,
    )  # fmt: skip
    sample_merge_kernel[(batch * rows,)](
        confidence_exclude_ids, workspace, token, confidence, margin, neg_entropy,
        rows, vocabulary, confidence_exclude_ids.shape[1], chunks,
        CHUNKS=next_power_of_two(chunks), num_warps=MERGE_WARPS, num_stages=1,
    )  # fmt: skip


def configurations(dtype: torch.dtype, vocabulary: int) -> list[Configuration]:
    """The instances that ship for a model (any SM)."""
    pointer = POINTER_TYPES[dtype]
    scalars = dict.fromkeys(
        ("rows_per_batch", "vocabulary", "suppressed", "excluded", "chunks"), "i32"
    )
    mixing = {"guide_row": "*i32", "cfg_scale": "*fp32"}
    mixing |= dict.fromkeys(("suppress_ids", "confidence_exclude_ids"), "*i32")
    mixing |= {"workspace": "*fp32"}
    merged = {"confidence_exclude_ids": "*i32", "workspace": "*fp32"}
    merge_scalars = {name: kind for name, kind in scalars.items() if name != "suppressed"}
    drawing = {"positions": "*i32", "temperature": "*fp32", "seed": "*i32", "step": "*i32"}
    outputs = {"token": "*i32"} | dict.fromkeys(("confidence", "margin", "neg_entropy"), "*fp32")
    label = f"v{vocabulary}.{dtype_label(dtype)}"
    capacity = next_power_of_two(chunks_for(vocabulary))
    return [
        Configuration(
            name=f"sample_chunk.{label}.c{CHUNK}w{WARPS}",
            kernel=sample_chunk_kernel,
            arguments={"logits": pointer} | drawing | mixing | scalars,
            constants={"CHUNK": CHUNK, "ALIGNED": vocabulary % 16 == 0},
            warps=WARPS,
            stages=1,
        ),
        Configuration(
            name=f"sample_merge.{label}.c{capacity}",
            kernel=sample_merge_kernel,
            arguments=merged | outputs | merge_scalars,
            constants={"CHUNKS": capacity},
            warps=MERGE_WARPS,
            stages=1,
        ),
    ]
