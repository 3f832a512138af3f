"""GPU checks of every kernel against float64: all elements, odd shapes, fp16 and bf16.

Outputs are poisoned with NaN first, every launch is done twice and must give the same bits, and
what a kernel must not read (the stale block) is overwritten with NaN for a third.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT))
import lacache_trt  # noqa: E402

if str(ROOT) not in lacache_trt.__path__:  # not installed: plugins/ lies beside the package
    lacache_trt.__path__.append(str(ROOT))

import kernel_references as reference  # noqa: E402
from kernel_jobs import Ledger  # noqa: E402
from kernel_references import AttentionInputs, AttentionShape  # noqa: E402

from lacache_trt.plugins.attention import kernel as attention  # noqa: E402
from lacache_trt.plugins.attention_fill import kernel as fill  # noqa: E402
from lacache_trt.plugins.attention_reuse import kernel as reuse  # noqa: E402
from lacache_trt.plugins.rms_norm import kernel as rms_norm  # noqa: E402
from lacache_trt.plugins.rope import kernel as rope  # noqa: E402
from lacache_trt.plugins.sample_block import kernel as sample_block  # noqa: E402
from lacache_trt.plugins.swiglu import kernel as swiglu  # noqa: E402
from lacache_trt.plugins.triton_support import Tiles  # noqa: E402

DEVICE = "cuda"


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


ODD = [
    AttentionShape(8, 8, 384, 0, 32, ((0, 384),), (128,)),
    AttentionShape(4, 4, 383, 0, 32, ((1, 383), (64, 383)), (351, 70)),
    AttentionShape(8, 2, 1153, 0, 33, ((0, 1153), (129, 1150), (3, 1153)), (0, 1000, 517)),
    AttentionShape(7, 1, 200, 0, 1, ((0, 200), (199, 200)), (5, 199)),
    AttentionShape(4, 1, 65, 0, 65, ((0, 65), (10, 60)), (0, 0)),
    AttentionShape(2, 2, 700, 0, 512, ((100, 700),), (101,)),
    AttentionShape(2, 2, 96, 0, 64, ((32, 96), (0, 96)), (32, 16)),
    AttentionShape(2, 2, 17, 0, 4, ((0, 17),), (13,)),
    AttentionShape(1, 1, 1, 0, 1, ((0, 1),), (0,)),
    AttentionShape(4, 2, 300, 0, 8, tuple((5 * b, 300 - b) for b in range(8)),
                   tuple(30 * b for b in range(8))),
]  # fmt: skip
VOCABULARIES = (126464, 1001, 64, 152064)
NORM_WIDTHS = (4096, 3584, 64, 448)
FFN_WIDTHS = (12288, 18944, 16, 3008)
LONG = [
    AttentionShape(32, 32, 1152, 0, 32, ((0, 1152),), (512,)),
    AttentionShape(4, 4, 2048, 0, 32, ((0, 2048),), (1024,)),
    AttentionShape(4, 2, 4095, 0, 32, ((63, 4095),), (2017,)),
    AttentionShape(2, 1, 5000, 0, 16, ((11, 5000),), (4970,)),
]


def sized(shapes: list[AttentionShape], head_dim: int) -> list[AttentionShape]:
    return [AttentionShape(**(vars(s) | {"head_dim": head_dim})) for s in shapes]


def run_fill(inputs: AttentionInputs, tiles: Tiles | None) -> list[Tensor]:
    state = [poisoned(*inputs.q.shape[:3]), poisoned(*inputs.q.shape[:3])]
    state.append(poisoned(*inputs.q.shape))
    fill.launch(
        inputs.q, inputs.k, inputs.v, inputs.valid_from, inputs.valid_to, inputs.block_columns,
        *state, tiles=tiles,
    )  # fmt: skip
    return state


def run_reuse(
    inputs: AttentionInputs, state: list[Tensor], tiles: Tiles | None, block_keys: int
) -> Tensor:
    batch, heads, length, head_dim = inputs.q.shape
    size = reuse.workspace_size(
        batch, heads, inputs.k.shape[1], length, inputs.q_c.shape[2], head_dim
    )
    out = poisoned(batch, length, heads * head_dim, dtype=inputs.q.dtype)
    reuse.launch(
        inputs.q_c, inputs.k_c, inputs.v_c, inputs.q, inputs.k, inputs.v, *state,
        inputs.valid_from, inputs.valid_to, inputs.block_columns, poisoned(size), out,
        tiles=tiles, block_keys=block_keys,
    )  # fmt: skip
    return out


def run_attention(inputs: AttentionInputs, q: Tensor, split: bool, tiles: Tiles | None) -> Tensor:
    batch, heads, count, head_dim = q.shape
    size = attention.workspace_size(
        batch, heads, inputs.k.shape[1], count, inputs.k.shape[2], head_dim
    )
    out = poisoned(batch, count, heads * head_dim, dtype=q.dtype)
    attention.launch(
        q, inputs.k, inputs.v, inputs.valid_from, inputs.valid_to,
        poisoned(size) if split else None, out, tiles=tiles,
    )  # fmt: skip
    return out


def output_bound(inputs: AttentionInputs) -> float:
    largest = max(float(v.double().abs().max()) for v in (inputs.v, inputs.v_c))
    return (1.5 * torch.finfo(inputs.q.dtype).eps + 2e-5) * largest


def attention_cases(
    dtype: torch.dtype, head_dim: int, wide: bool
) -> Iterable[tuple[AttentionShape, AttentionInputs]]:
    shapes = sized(ODD + LONG if wide else [*ODD[:4], LONG[1]], head_dim)
    for shape in shapes:
        for seed in range(3 if wide and shape.length < 1000 else 1):
            yield shape, reference.attention_inputs(shape, dtype, DEVICE, seed, scale=1.0 + seed)


def check_state(ledger: Ledger, name: str, inputs: AttentionInputs, state: list[Tensor]) -> None:
    maximum, total, acc = reference.attention_state(inputs)
    columns = torch.arange(inputs.q.shape[2], device=DEVICE)
    outside = ~(inputs.block_columns[:, :, None] == columns).any(1)[:, None, :].expand_as(total)
    eps = torch.finfo(inputs.q.dtype).eps
    ledger.bounded(f"{name} max", state[0][outside], maximum[outside], 2e-5)
    ledger.bounded(f"{name} sum", state[1][outside], total[outside], 1e-6 + 5e-5 * total[outside])
    bound = 1e-6 + (eps + 5e-5) * total[outside] * inputs.v.double().abs().max()
    ledger.bounded(f"{name} acc", state[2][outside], acc[outside], bound[:, None])


def check_fill(
    ledger: Ledger, dtype: torch.dtype, head_dim: int, tiles: Tiles | None, wide: bool
) -> None:
    for shape, inputs in attention_cases(dtype, head_dim, wide):
        state = run_fill(inputs, tiles)
        check_state(ledger, f"fill {shape}", inputs, state)
        ledger.same(f"fill {shape}", state, run_fill(inputs, tiles))


def check_reuse(
    ledger: Ledger, dtype: torch.dtype, head_dim: int, tiles: Tiles | None, wide: bool,
    block_keys: int = 64,
) -> None:  # fmt: skip
    for shape, inputs in attention_cases(dtype, head_dim, wide):
        state = run_fill(inputs, None)
        out = run_reuse(inputs, state, tiles, block_keys)
        want = reference.attention_reuse(inputs)
        ledger.bounded(f"reuse {shape}", out, want, output_bound(inputs))
        again = run_reuse(inputs, state, tiles, block_keys)
        ledger.same(f"reuse {shape}", [out], [again])
        for b, block in enumerate(inputs.block_columns.tolist()):  # stale values are never read
            for tensor in (inputs.k, inputs.v, inputs.q, *state):
                tensor[b, :, block] = torch.nan
        ledger.same(
            f"reuse {shape}, stale block", [out], [run_reuse(inputs, state, tiles, block_keys)]
        )


def check_attention(
    ledger: Ledger, dtype: torch.dtype, head_dim: int, tiles: Tiles | None, wide: bool,
    split: bool = False,
) -> None:  # fmt: skip
    for shape, inputs in attention_cases(dtype, head_dim, wide):
        for q in (inputs.q, inputs.q_c):
            if split and q.shape[2] > attention.SPLIT_ROWS:
                continue
            want = reference.attention(q, inputs.k, inputs.v, inputs.valid_from, inputs.valid_to)
            out = run_attention(inputs, q, split, tiles)
            ledger.bounded(f"attention {shape}", out, want, output_bound(inputs))
            ledger.same(f"attention {shape}", [out], [run_attention(inputs, q, split, tiles)])


def check_sample(ledger: Ledger, dtype: torch.dtype, chunk: int, warps: int) -> None:
    sizes = ((2, 5), (3, 4), (1, 1), (1, 3))
    for vocabulary, (batch, rows) in zip(VOCABULARIES, sizes, strict=True):
        for temperature, guided in ((0.0, False), (0.0, True), (0.8, False), (1.3, True)):
            inputs = reference.sample_inputs(
                batch, rows, vocabulary, dtype, DEVICE, 11 + rows, temperature=temperature,
                guided=guided,
            )  # fmt: skip
            name = f"sample {vocabulary} t{temperature} guided={guided}"
            first, second = (run_sample(inputs, chunk, warps) for _ in range(2))
            ledger.same(name, first, second)
            scores = reference.sample_scores(inputs)
            chosen = scores.gather(-1, first[0].long()[..., None])[..., 0]
            slack = 2e-5 if temperature or guided else 1e-12
            ledger.bounded(f"{name} token", chosen, scores.amax(-1), slack)
            wanted = reference.sample_block(inputs, first[0])
            for label, got, want in zip(
                ("confidence", "margin", "neg_entropy"), first[1:], wanted, strict=True
            ):
                ledger.bounded(f"{name} {label}", got, want, 3e-6 + 2e-5 * want.abs())


def run_sample(inputs: reference.SampleInputs, chunk: int, warps: int) -> list[Tensor]:
    batch, rows, vocabulary = inputs.logits.shape
    token = torch.full((batch, rows), -7, dtype=torch.int32, device=DEVICE)
    scores = [poisoned(batch, rows) for _ in range(3)]
    workspace = poisoned(sample_block.workspace_size(batch, rows, vocabulary, chunk))
    sample_block.launch(*inputs.tensors(), workspace, token, *scores, chunk=chunk, warps=warps)
    return [token, *scores]


def check_tokenwise(ledger: Ledger, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    for rows, width in zip((1153, 77, 5, 9, 3), (*NORM_WIDTHS, NORM_WIDTHS[0]), strict=True):
        x, delta = (torch.randn(rows, width, device=DEVICE).to(dtype) for _ in range(2))
        weight = torch.randn(width, device=DEVICE).to(dtype)
        residual, out = poisoned(rows, width, dtype=dtype), poisoned(rows, width, dtype=dtype)
        rms_norm.launch(x, delta, weight, residual, out, 1e-5)
        want = reference.rms_norm(x + delta, weight, 1e-5)
        ledger.same(f"rms_norm residual {rows}x{width}", [residual], [x + delta])
        ledger.bounded(f"rms_norm add {rows}x{width}", out, want, 1.2 * eps * want.abs() + 1e-6)
        rms_norm.launch(x, None, weight, None, out, 1e-5)
        want = reference.rms_norm(x, weight, 1e-5)
        ledger.bounded(f"rms_norm {rows}x{width}", out, want, 1.2 * eps * want.abs() + 1e-6)
    for rows, width in zip((5, 333, 64, 7), FFN_WIDTHS, strict=True):
        gate_up = torch.randn(rows, 2 * width, device=DEVICE).to(dtype) * 4
        out = poisoned(rows, width, dtype=dtype)
        swiglu.launch(gate_up, out)
        want = reference.swiglu(gate_up)
        tiny = 1e-7 if dtype == torch.float16 else 1e-9
        ledger.bounded(f"swiglu {rows}x{width}", out, want, 0.6 * eps * want.abs() + tiny)
    for batch, length, heads, kv_heads, head_dim in (
        (1, 384, 32, 32, 128), (2, 333, 28, 4, 128), (3, 17, 4, 2, 64)
    ):  # fmt: skip
        for grid in (None, rope.FEW, rope.MANY):
            check_rope(ledger, dtype, batch, length, heads, kv_heads, head_dim, grid)


def check_rope(
    ledger: Ledger, dtype: torch.dtype, batch: int, length: int, heads: int, kv_heads: int,
    head_dim: int, grid: rope.Grid | None,
) -> None:  # fmt: skip
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(batch, length, width, device=DEVICE).to(dtype)
    positions = torch.arange(length, dtype=torch.int32, device=DEVICE).expand(batch, -1)
    frequencies = 5e5 ** (-torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
    tables = rope.angle_tables(positions, frequencies)
    outputs = [
        poisoned(batch, count, length, head_dim, dtype=dtype)
        for count in (heads, kv_heads, kv_heads)
    ]
    rope.launch(qkv, *tables, *outputs, grid)
    bound = torch.finfo(dtype).eps * float(qkv.double().abs().max())
    for name, got, want in zip(
        "qkv", outputs, reference.rope(qkv, *tables, heads, kv_heads), strict=True
    ):
        ledger.bounded(f"rope {name} {tuple(got.shape)}", got, want, bound)


CHECKS: dict[str, Callable[..., None]] = {
    "fill": check_fill,
    "reuse": check_reuse,
    "attention": check_attention,
    "sample": check_sample,
    "tokenwise": check_tokenwise,
}
