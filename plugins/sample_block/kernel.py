"""Triton kernels of SampleBlock: one pass over the vocabulary, then a small merge.

For row (b, r) with g = guide_row[b], cond = logits[b, r], un = logits[g, r], in float32:
    x = cond                                        if g == b
    x = un + (cfg_scale[b] + 1) * (cond - un)       otherwise;    x[suppress_ids[b]] = -inf
    token = argmax_v x_v                            if temperature[b] <= 0
    token = argmax_v x_v + temperature[b] * gumbel  otherwise (`noise`);  ties: lowest id
    y = x with y[confidence_exclude_ids[b]] = -inf,     p = softmax(y)
    confidence = p[token]     margin = p_1 - p_2     neg_entropy = sum p log p
NaN or +inf in x makes the three scores NaN (the token is then that of the finite logits).

Each program of the first kernel reduces CHUNK ids of one row to six numbers: best score, its id,
the two largest y (as a multiset), and with m = max y
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

from lacache_trt.plugins.sample_block import noise
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
MERGE_WARPS = 4
FIELDS = 6

_P = tl.constexpr(noise.PRIME)
_K0, _K1, _K2, _K3, _K4 = (tl.constexpr(key) for key in noise.KEYS)


@triton.jit
def _fold(value):
    """A uint32 below 2^32 - 1 modulo 2^31 - 1."""
    value = (value & _P) + (value >> 31)
    return tl.where(value >= _P, value - _P, value)


@triton.jit
def _times(left, right):
    """Product of two residues modulo 2^31 - 1, in 32-bit arithmetic."""
    low = left * right
    high = tl.umulhi(left, right)
    return _fold((low & _P) + ((high << 1) | (low >> 31)))


@triton.jit
def _mix(state, word, KEY: tl.constexpr):
    """(state + word + KEY)^5 modulo 2^31 - 1."""
    total = _fold(_fold(state + word) + KEY)
    square = _times(total, total)
    return _times(_times(square, square), total)


@triton.jit
def _residue(word):
    """A signed 32-bit word modulo 2^31 - 1, non-negative."""
    wide = word.to(tl.int64)
    wide = tl.where(wide < 0, wide + _P, wide)
    wide = tl.where(wide < 0, wide + _P, wide)
    return tl.where(wide >= _P, wide - _P, wide).to(tl.uint32)


@triton.jit
def gumbel_noise(seed, step, position, ids):
    """Gumbel noise of each id in float32."""
    state = _mix(_residue(seed), tl.zeros_like(_residue(seed)), _K0)
    state = _mix(state, _residue(step), _K1)
    state = _mix(state, _residue(position), _K2)
    state = _mix(state, ids.to(tl.uint32), _K3)
    state = _mix(state, tl.zeros_like(state), _K4)
    uniform = ((state >> 8).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(uniform))


@triton.jit
def _listed(ids, listed, batch, count):
    """Where `ids` occur in row `batch` of a list [B, count] padded with -1."""
    found = ids < 0
    for entry in range(count):
        found = found | (ids == tl.load(listed + batch * count + entry))
    return found


@triton.jit
def _mixed_logits(cond_row, guide_row, ids, keep, guided, weight):
    """x before suppression: the row's logits, or their mixture with the guide's."""
    x = tl.load(cond_row + ids, mask=keep, other=float("-inf")).to(tl.float32)
    if guided:
        un = tl.load(guide_row + ids, mask=keep, other=0.0).to(tl.float32)
        x = un + weight * (x - un)
    return x


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
    guide = tl.load(guide_row + batch)
    if ALIGNED:  # the same value, visibly a multiple of 16: 16-byte loads
        vocabulary = vocabulary // 16 * 16
    cond_offset = row.to(tl.int64) * vocabulary
    guide_offset = (guide * rows_per_batch + row % rows_per_batch).to(tl.int64) * vocabulary
    lane = tl.arange(0, CHUNK)
    ids = chunk * CHUNK + lane
    keep = ids < vocabulary
    x = _mixed_logits(
        logits + cond_offset, logits + guide_offset, ids, keep, guide != batch,
        tl.load(cfg_scale + batch) + 1.0,
    )  # fmt: skip
    x = tl.where(keep & ~_listed(ids, suppress_ids, batch, suppressed), x, float("-inf"))
    bad = (x != x) | (x == float("inf"))
    broken = tl.max(bad.to(tl.int32), 0) > 0
    x = tl.where(bad, float("-inf"), x)

    score = x
    heat = tl.load(temperature + batch)
    if heat > 0.0:
        score = x + heat * gumbel_noise(
            tl.load(seed + batch), tl.load(step + batch), tl.load(positions + row), ids
        )
    best, best_lane = tl.max(score, 0, return_indices=True)

    y = tl.where(_listed(ids, confidence_exclude_ids, batch, excluded), float("-inf"), x)
    first, first_lane = tl.max(y, 0, return_indices=True)
    second = tl.max(tl.where(lane == first_lane, float("-inf"), y), 0)
    shifted = y - safe_anchor(first)
    weight = tl.exp(shifted)
    total = tl.sum(weight, 0)
    moment = tl.sum(tl.where(weight > 0.0, shifted * weight, 0.0), 0)

    slot = workspace + row.to(tl.int64) * (6 * chunks) + chunk
    tl.store(slot, best)
    tl.store(slot + chunks, (chunk * CHUNK + best_lane).to(tl.float32))
    tl.store(slot + 2 * chunks, first)
    tl.store(slot + 3 * chunks, second)
    tl.store(slot + 4 * chunks, tl.where(broken, float("nan"), total))
    tl.store(slot + 5 * chunks, moment)


@unspecialised("rows_per_batch", "vocabulary", "suppressed", "excluded", "chunks")
def sample_merge_kernel(
    logits, guide_row, cfg_scale, suppress_ids, confidence_exclude_ids, workspace,
    token, confidence, margin, neg_entropy,
    rows_per_batch, vocabulary, suppressed, excluded, chunks,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Grid: (B * R,)."""
    row = tl.program_id(0)
    batch = row // rows_per_batch
    lane = tl.arange(0, CHUNKS)
    keep = lane < chunks
    slot = workspace + row.to(tl.int64) * (6 * chunks) + lane
    scores = tl.load(slot, mask=keep, other=float("-inf"))
    ids = tl.load(slot + chunks, mask=keep, other=16777216.0)
    firsts = tl.load(slot + 2 * chunks, mask=keep, other=float("-inf"))
    seconds = tl.load(slot + 3 * chunks, mask=keep, other=float("-inf"))
    totals = tl.load(slot + 4 * chunks, mask=keep, other=0.0)
    moments = tl.load(slot + 5 * chunks, mask=keep, other=0.0)

    best = tl.max(scores, 0)
    chosen = tl.min(tl.where(scores == best, ids, 16777216.0), 0).to(tl.int32)
    first, first_lane = tl.max(firsts, 0, return_indices=True)
    runner_up = tl.where(lane == first_lane, float("-inf"), firsts)
    second = tl.max(tl.maximum(runner_up, seconds), 0)
    anchor = safe_anchor(first)
    shift = tl.where(firsts == float("-inf"), 0.0, firsts - anchor)
    factor = tl.where(firsts == float("-inf"), 0.0, tl.exp(shift))
    total = tl.sum(totals * factor, 0)
    moment = tl.sum(factor * (moments + shift * totals), 0)
    broken = tl.max((totals != totals).to(tl.int32), 0) > 0
    total = tl.where(broken, float("nan"), total)

    guide = tl.load(guide_row + batch)
    guide_offset = (guide * rows_per_batch + row % rows_per_batch).to(tl.int64) * vocabulary
    y = _mixed_logits(
        logits + row.to(tl.int64) * vocabulary, logits + guide_offset, chosen,
        chosen < vocabulary, guide != batch, tl.load(cfg_scale + batch) + 1.0,
    )  # fmt: skip
    removed = _listed(chosen, suppress_ids, batch, suppressed)
    removed = removed | _listed(chosen, confidence_exclude_ids, batch, excluded)
    y = tl.where(removed, float("-inf"), y)

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
        logits, guide_row, cfg_scale, suppress_ids, confidence_exclude_ids, workspace,
        token, confidence, margin, neg_entropy, *shape,
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
            arguments={"logits": pointer} | mixing | outputs | scalars,
            constants={"CHUNKS": capacity},
            warps=MERGE_WARPS,
            stages=1,
        ),
    ]
