"""Float64 references of the kernels, written from the op rules alone, and random inputs for them.

Every function takes the tensors that a kernel takes and returns float64 (or int64) tensors of the
shapes that it writes, on the inputs' device. They are slow and literal on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lacache_trt.plugins.sample_block import noise


@dataclass(frozen=True)
class AttentionShape:
    """One attention case: sizes, and per batch row the valid range and the block's start."""

    heads: int
    kv_heads: int
    length: int
    head_dim: int
    block: int
    valid: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class AttentionInputs:
    """Tensors of one case. `q`, `k`, `v` hold NaN-free stale values at the block's columns."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_c: Tensor
    k_c: Tensor
    v_c: Tensor
    valid_from: Tensor
    valid_to: Tensor
    block_columns: Tensor


def attention_inputs(
    shape: AttentionShape, dtype: torch.dtype, device: str, seed: int, scale: float = 1.0
) -> AttentionInputs:
    """Random inputs; `scale` multiplies q, so that larger values sharpen the softmax."""
    generator = torch.Generator(device=device).manual_seed(seed)
    batch = len(shape.starts)

    def normal(heads: int, rows: int) -> Tensor:
        size = (batch, heads, rows, shape.head_dim)
        return torch.randn(size, generator=generator, device=device).to(dtype)

    def indices(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return AttentionInputs(
        q=normal(shape.heads, shape.length) * scale,
        k=normal(shape.kv_heads, shape.length),
        v=normal(shape.kv_heads, shape.length) + 0.5,
        q_c=normal(shape.heads, shape.block) * scale,
        k_c=normal(shape.kv_heads, shape.block),
        v_c=normal(shape.kv_heads, shape.block) - 0.5,
        valid_from=indices([low for low, _ in shape.valid]),
        valid_to=indices([high for _, high in shape.valid]),
        block_columns=indices([list(range(s, s + shape.block)) for s in shape.starts]),
    )


def _grouped(keys: Tensor, heads: int) -> Tensor:
    return keys.double().repeat_interleave(heads // keys.shape[0], dim=0)


def attention(q: Tensor, k: Tensor, v: Tensor, valid_from: Tensor, valid_to: Tensor) -> Tensor:
    """out [B, M, Hq * d]; 0 for a row of the batch without valid keys."""
    batch, heads, count, head_dim = q.shape
    out = torch.zeros(batch, count, heads * head_dim, dtype=torch.float64, device=q.device)
    for b in range(batch):
        low, high = int(valid_from[b]), int(valid_to[b])
        if high > low:
            out[b] = _softmax_rows(q[b], k[b, :, low:high], v[b, :, low:high])
    return out


def _softmax_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[M, Hq * d] for one batch row."""
    heads, count, head_dim = q.shape
    scores = q.double() @ _grouped(k, heads).transpose(1, 2) / head_dim**0.5
    mixed = torch.softmax(scores, dim=-1) @ _grouped(v, heads)
    return mixed.transpose(0, 1).reshape(count, heads * head_dim)


def outside_keys(length: int, low: int, high: int, block: list[int]) -> list[int]:
    """Columns that belong to U."""
    inside = set(block)
    return [n for n in range(length) if low <= n < high and n not in inside]


def attention_state(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """(fa_max, fa_sum, fa_acc) over the U keys, natural-log units."""
    batch, heads, length, head_dim = inputs.q.shape
    options = {"dtype": torch.float64, "device": inputs.q.device}
    maximum = torch.full((batch, heads, length), -torch.inf, **options)
    total = torch.zeros(batch, heads, length, **options)
    acc = torch.zeros(batch, heads, length, head_dim, **options)
    for b in range(batch):
        low, high = int(inputs.valid_from[b]), int(inputs.valid_to[b])
        keys = outside_keys(length, low, high, inputs.block_columns[b].tolist())
        if not keys:
            continue
        k = _grouped(inputs.k[b, :, keys], heads)
        scores = inputs.q[b].double() @ k.transpose(1, 2) / head_dim**0.5
        maximum[b] = scores.amax(-1)
        weights = torch.exp(scores - maximum[b, :, :, None])
        total[b] = weights.sum(-1)
        acc[b] = weights @ _grouped(inputs.v[b, :, keys], heads)
    return maximum, total, acc


def attention_reuse(inputs: AttentionInputs) -> Tensor:
    """out [B, N, Hq * d] of a step, the block's fresh q, k, v put in place of the stale ones."""
    fresh = []
    for whole, part in (
        (inputs.q, inputs.q_c), (inputs.k, inputs.k_c), (inputs.v, inputs.v_c)
    ):  # fmt: skip
        replaced = whole.clone()
        for b, columns in enumerate(inputs.block_columns.tolist()):
            replaced[b, :, columns] = part[b]
        fresh.append(replaced)
    return attention(*fresh, inputs.valid_from, inputs.valid_to)


@dataclass(frozen=True)
class SampleInputs:
    """Inputs of SampleBlock in the op's order."""

    logits: Tensor
    positions: Tensor
    temperature: Tensor
    seed: Tensor
    step: Tensor
    guide_row: Tensor
    cfg_scale: Tensor
    suppress_ids: Tensor
    confidence_exclude_ids: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the op's order."""
        return tuple(vars(self).values())


def sample_inputs(
    batch: int, rows: int, vocabulary: int, dtype: torch.dtype, device: str, seed: int,
    *, temperature: float = 0.0, guided: bool = False, scale: float = 3.0,
) -> SampleInputs:  # fmt: skip
    """Random inputs; with `guided`, even rows are guided by their right neighbour."""
    generator = torch.Generator(device=device).manual_seed(seed)
    logits = torch.randn((batch, rows, vocabulary), generator=generator, device=device) * scale

    def integers(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    guides = [b + 1 if guided and b % 2 == 0 and b + 1 < batch else b for b in range(batch)]
    return SampleInputs(
        logits=logits.to(dtype),
        positions=integers([[7 * b + r for r in range(rows)] for b in range(batch)]),
        temperature=torch.full((batch,), temperature, device=device),
        seed=integers([seed - 5 * b for b in range(batch)]),
        step=integers([3 + b for b in range(batch)]),
        guide_row=integers(guides),
        cfg_scale=torch.full((batch,), 1.5, device=device),
        suppress_ids=integers([[vocabulary - 1, -1]] * batch),
        confidence_exclude_ids=integers([[-1, vocabulary // 2]] * batch),
    )


def mixed_logits(inputs: SampleInputs) -> Tensor:
    """x after suppression, computed in float32 as the rule says, returned as float64."""
    logits = inputs.logits.float()
    x = logits.clone()
    for b, guide in enumerate(inputs.guide_row.tolist()):
        if guide != b:
            un = logits[guide]
            x[b] = un + (inputs.cfg_scale[b] + 1) * (logits[b] - un)
        listed = [i for i in inputs.suppress_ids[b].tolist() if i >= 0]
        x[b, :, listed] = -torch.inf
    return x.double()


def sample_scores(inputs: SampleInputs) -> Tensor:
    """What the argmax is taken of, float64 [B, R, V]."""
    x = mixed_logits(inputs)
    ids = np.arange(x.shape[-1])
    for b, heat in enumerate(inputs.temperature.tolist()):
        if heat > 0:
            drawn = noise.gumbel(
                int(inputs.seed[b]),
                int(inputs.step[b]),
                inputs.positions[b].cpu().numpy()[:, None],
                ids,
            )
            x[b] += heat * torch.from_numpy(drawn).to(x.device)
    return x


def sample_block(inputs: SampleInputs, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(confidence, margin, neg_entropy) for given tokens [B, R]."""
    y = mixed_logits(inputs)
    for b in range(y.shape[0]):
        listed = [i for i in inputs.confidence_exclude_ids[b].tolist() if i >= 0]
        y[b, :, listed] = -torch.inf
    logs = torch.log_softmax(y, dim=-1)
    p = logs.exp()
    confidence = p.gather(-1, token.long()[..., None])[..., 0]
    top = p.topk(2, dim=-1).values
    neg_entropy = torch.where(p > 0, p * logs, torch.zeros_like(p)).sum(-1)
    bad = (logs != logs).any(-1)
    nan = torch.full_like(confidence, torch.nan)
    return confidence, top[..., 0] - top[..., 1], torch.where(bad, nan, neg_entropy)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Float64 norm of `hidden` (already rounded), without the intermediate rounding."""
    wide = hidden.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * scale * weight.double()


def rope(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v head-major; q and k rotated."""
    batch, length, width = qkv.shape
    head_dim = width // (heads + 2 * kv_heads)
    split = qkv.double().reshape(batch, length, -1, head_dim).transpose(1, 2)
    x1, x2 = split.chunk(2, dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    turned = torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1)
    return turned[:, :heads], turned[:, heads : heads + kv_heads], split[:, heads + kv_heads :]


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
