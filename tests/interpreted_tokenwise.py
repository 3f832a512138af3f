"""RMS norm, RoPE and SwiGLU under Triton's interpreter; run by `test_kernels_interpreter.py`."""

from __future__ import annotations

import kernel_references as reference
import pytest
import torch

from lacache_trt.plugins.rms_norm import kernel as rms_norm
from lacache_trt.plugins.rope import kernel as rope
from lacache_trt.plugins.swiglu import kernel as swiglu

DTYPES = (torch.float32, torch.float16)


def normal(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 192, 3584])
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm(width: int, add: bool, dtype: torch.dtype) -> None:
    x = normal(2, 3, width, dtype=dtype)
    delta = normal(2, 3, width, dtype=dtype, seed=1) if add else None
    weight = normal(width, dtype=dtype, seed=2)
    residual = torch.full_like(x, torch.nan) if add else None
    out = torch.full_like(x, torch.nan)
    rms_norm.launch(x, delta, weight, residual, out, eps=1e-5)
    hidden = x if delta is None else x + delta
    if residual is not None:
        assert torch.equal(residual, hidden)
    want = reference.rms_norm(hidden, weight, 1e-5)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, rtol=1.1 * eps + 2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "head_dim"),
    [(1, 5, 2, 2, 64), (2, 19, 4, 1, 64), (1, 33, 7, 1, 128)],
)
def test_rope(
    batch: int, length: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    qkv = normal(batch, length, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    positions = torch.arange(length, dtype=torch.int32).expand(batch, -1) * 3
    frequencies = 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim)
    cos, sin = rope.angle_tables(positions, frequencies)
    outputs = [
        torch.full((batch, h, length, head_dim), torch.nan, dtype=dtype)
        for h in (heads, kv_heads, kv_heads)
    ]
    rope.launch(qkv, cos, sin, *outputs)
    eps = torch.finfo(dtype).eps
    wanted = reference.rope(qkv, cos, sin, heads, kv_heads)
    for got, want in zip(outputs, wanted, strict=True):
        bound = eps * qkv.double().abs().max() + 1e-6
        assert (got.double() - want).abs().max() <= bound
    assert torch.equal(outputs[2].double(), wanted[2])


def test_rope_copies_infinite_values() -> None:
    qkv = normal(1, 3, 3 * 64, dtype=torch.float32)
    qkv[0, 1, 130] = torch.inf
    q, k, v = (torch.zeros(1, 1, 3, 64) for _ in range(3))
    tables = torch.zeros(1, 3, 32)
    rope.launch(qkv, tables, tables, q, k, v)
    assert v[0, 0, 1, 2] == torch.inf
    assert not v.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 208, 3000])
def test_swiglu(width: int, dtype: torch.dtype) -> None:
    gate_up = normal(3, 2 * width, dtype=dtype) * 4
    out = torch.full((3, width), torch.nan, dtype=dtype)
    swiglu.launch(gate_up, out)
    eps = torch.finfo(dtype).eps
    want = reference.swiglu(gate_up)
    torch.testing.assert_close(out.double(), want, rtol=0.6 * eps + 2e-6, atol=1e-7)
