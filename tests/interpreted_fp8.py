"""FP8 kernels under Triton's interpreter; run by `test_kernels_interpreter.py`.

GroupLinear is compared with float64 on the same quantised inputs. The interpreter adds a group's
products in float32, so what is left are its roundings: 256 additions of float32 at most. The
quantising kernels are compared with the op's reference, byte for byte where the values agree.
"""

from __future__ import annotations

import interpreter_repair  # noqa: F401
import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lacache_trt.plugins import fp8
from lacache_trt.plugins.fp8_kernel import odd_half
from lacache_trt.plugins.group_linear import kernel as group_linear
from lacache_trt.plugins.group_linear.kernel import Geometry
from lacache_trt.plugins.group_quant import kernel as group_quant
from lacache_trt.plugins.rms_norm_quant import kernel as rms_norm_quant
from lacache_trt.plugins.rms_norm_quant.op import RMS_NORM_QUANT
from lacache_trt.plugins.swiglu_quant import kernel as swiglu_quant
from lacache_trt.plugins.swiglu_quant.op import SWIGLU_QUANT

DTYPES = (torch.float32, torch.float16)
GEOMETRIES = {
    "stream": Geometry(16, 32, 4, 2, streams=True),
    "tiled": Geometry(16, 64, 4, 2),
}
BOUND = 256 * 2.0**-24


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def operands(rows: int, columns: int, width: int, seed: int) -> tuple[Tensor, ...]:
    """(quantised, scale, weight, weight_scale) of uneven groups, one of them zero."""
    x = normal(rows, width, seed=seed) * torch.logspace(-4, 2, width // 128).repeat_interleave(128)
    x[rows // 2, :128] = 0
    weight = normal(columns, width, seed=seed + 1)
    return (*fp8.quantise_groups(x), *fp8.quantise_blocks(weight))


def truth(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """(product, product of the magnitudes) in float64."""
    quantised, scale, weight, weight_scale = inputs
    x = fp8.dequantise_groups(quantised, scale, torch.float64)
    w = fp8.dequantise_blocks(weight, weight_scale, torch.float64).t()
    return x @ w, x.abs() @ w.abs()


def run_linear(
    inputs: tuple[Tensor, ...],
    geometry: Geometry | None,
    dtype: torch.dtype = torch.float32,
    residual: Tensor | None = None,
) -> Tensor:
    """The product of poisoned outputs and workspace; in place where there is a residual."""
    rows, columns = inputs[0].shape[0], inputs[2].shape[0]
    out = torch.full((rows, columns), torch.nan, dtype=dtype)
    if residual is not None:
        out = residual.clone()
    size = 16 * rows * columns
    group_linear.launch(
        *inputs,
        None if residual is None else out,
        torch.full((size,), torch.nan),
        out,
        geometry,
    )
    return out


@pytest.mark.parametrize("programs", [0, 64])
@pytest.mark.parametrize("name", GEOMETRIES)
@settings(max_examples=6, deadline=None)
@given(
    rows=st.integers(1, 70),
    columns=st.integers(1, 270),
    groups=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_group_linear(
    name: str, programs: int, rows: int, columns: int, groups: int, seed: int
) -> None:
    geometry = Geometry(**(vars(GEOMETRIES[name]) | {"programs": programs}))
    inputs = operands(rows, columns, 128 * groups, seed)
    want, magnitude = truth(inputs)
    got = run_linear(inputs, geometry)
    assert ((got.double() - want).abs() <= BOUND * magnitude).all()
    turned = (inputs[0], inputs[1].t().contiguous().t(), *inputs[2:])
    assert torch.equal(run_linear(turned, geometry), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sm", [89, 90])
@pytest.mark.parametrize("rows", [1, 17, 40, 100])
def test_what_ships_adds_the_residual(rows: int, sm: int, dtype: torch.dtype) -> None:
    inputs = operands(rows, 130, 384, rows)
    residual = normal(rows, 130, seed=3).to(dtype)
    geometry = group_linear.choose(rows, 130, sm)
    got = run_linear(inputs, geometry, dtype, residual)
    want, magnitude = truth(inputs)
    want += residual
    rounding = torch.finfo(dtype).eps * want.abs()
    assert ((got.double() - want).abs() <= BOUND * magnitude + rounding).all()


def test_a_broken_row_stays_a_broken_row() -> None:
    x = normal(20, 256)
    weight = fp8.quantise_blocks(normal(64, 256, seed=1))
    good = run_linear((*fp8.quantise_groups(x), *weight), None)
    for broken in (torch.nan, torch.inf, -torch.inf):
        x[7, 200] = broken
        got = run_linear((*fp8.quantise_groups(x), *weight), None)
        assert got[7].isnan().all()
        others = torch.arange(20) != 7
        assert torch.equal(got[others], good[others])


def empty_groups(*shape: int, innermost: bool = False) -> tuple[Tensor, Tensor]:
    """Poisoned outputs; the scales row-major, or with the rows innermost (the CUDA engine)."""
    quantised, groups = torch.full(shape, torch.nan).to(fp8.E4M3), shape[-1] // 128
    scale = torch.full((groups, quantised.numel() // shape[-1]), torch.nan)
    scale = scale.t() if innermost else scale.view(-1, groups)
    return quantised, scale.view(*shape[:-1], groups)


def assert_equal_groups(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """The same bytes and scales."""
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8))


def assert_same_groups(got: tuple[Tensor, ...], want: tuple[Tensor, ...], slack: float) -> None:
    """Equal scales up to `slack`; equal bytes wherever the scale is the same."""
    torch.testing.assert_close(got[1], want[1], rtol=slack, atol=0)
    same = (got[1] == want[1]).repeat_interleave(128, -1)
    assert same.float().mean() > 0.8
    different = (got[0].view(torch.uint8) != want[0].view(torch.uint8)) & same
    assert different.float().mean() < 2e-3
    step = (got[0].float() - want[0].float()).abs()[different]
    assert (step <= got[0].float().abs()[different] / 7 + 2.0**-9).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 384, 3584])
def test_rms_norm_quant(width: int, dtype: torch.dtype) -> None:
    hidden = normal(2, 3, width).to(dtype)
    hidden[1, 1] = 0
    weight = normal(width, seed=1).to(dtype)
    weight[:128] *= 1e-4
    eps = torch.tensor([1e-5])
    got = empty_groups(2, 3, width)
    rms_norm_quant.launch(hidden, weight, eps, *got)
    want = RMS_NORM_QUANT.call(hidden, weight, eps)
    assert_same_groups(got, want, 2e-6 if dtype == torch.float32 else 2e-3)
    assert (got[1][1, 1] == 1).all()
    assert not got[0][1, 1].float().any()
    turned = empty_groups(2, 3, width, innermost=True)
    rms_norm_quant.launch(hidden, weight, eps, *turned)
    assert_equal_groups(turned, got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 2176])
def test_swiglu_quant(width: int, dtype: torch.dtype) -> None:
    gate_up = normal(5, 2 * width).to(dtype) * 4
    gate_up[2] = 0
    got = empty_groups(5, width)
    swiglu_quant.launch(gate_up, *got)
    want = [value[0] for value in SWIGLU_QUANT.call(gate_up[None])]
    assert_same_groups(got, tuple(want), 2e-6 if dtype == torch.float32 else 2e-3)
    assert (got[1][2] == 1).all()
    turned = empty_groups(5, width, innermost=True)
    swiglu_quant.launch(gate_up, *turned)
    assert_equal_groups(turned, got)


def test_broken_values_reach_the_bytes_or_the_scale() -> None:
    for broken in (torch.nan, torch.inf, -torch.inf):
        gate_up = torch.ones(2, 512)
        gate_up[1, 300] = broken
        quantised, scale = empty_groups(2, 256)
        swiglu_quant.launch(gate_up, quantised, scale)
        restored = fp8.dequantise_groups(quantised, scale)
        assert restored[0].isfinite().all()
        assert restored[1, :128].isnan().all()
        assert restored[1, 128:].isfinite().all()


@settings(max_examples=20, deadline=None)
@given(exponent=st.integers(-149, 100), seed=st.integers(0, 9))
def test_bytes_are_those_of_torch_at_every_magnitude(exponent: int, seed: int) -> None:
    """With gate 60, silu is the gate: the products are exact and must quantise alike."""
    up = torch.ldexp(normal(3, 256, seed=seed), torch.tensor(exponent))
    gate_up = torch.cat([torch.full_like(up, 64.0), up], dim=-1)
    got = empty_groups(3, 256)
    swiglu_quant.launch(gate_up, *got)
    assert_equal_groups(got, fp8.quantise_groups(64.0 * up))
    values = empty_groups(3, 256, innermost=bool(seed % 2))
    group_quant.launch(up, *values)
    assert_equal_groups(values, fp8.quantise_groups(up))


@triton.jit
def odd_half_kernel(values, out, COUNT: tl.constexpr):
    """Grid: (tiles of COUNT values,)."""
    place = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out + place, odd_half(tl.load(values + place)))


def truncated_half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """float16 toward zero, as SM 89 converts on its way to E4M3."""
    with np.errstate(over="ignore"):
        nearest = values.astype(np.float16)
    below = nearest.view(np.uint16) - np.uint16(1)
    larger = np.abs(nearest.astype(np.float32)) > np.abs(values)
    return np.where(larger, below, nearest.view(np.uint16)).astype(np.uint16).view(np.float16)


@pytest.mark.parametrize("sign", [0, 1])
def test_e4m3_through_half_is_e4m3(sign: int) -> None:
    """Every exponent and every 10 leading mantissa bits that a quotient or a NaN can have, with
    the remaining 13 bits at and beside every place where a rounding could turn."""
    rest = np.array([0, 1, 2, 0xFFE, 0xFFF, 0x1000, 0x1001, 0x1FFE, 0x1FFF], np.uint32)
    leading = np.arange(1 << 18, dtype=np.uint32) << 13 | sign << 31
    values = (leading[:, None] | rest).flatten().astype(np.uint32).view(np.float32)
    values = values[~(np.abs(values) > 448)]
    count = 1 << 16
    values = np.pad(values, (0, -len(values) % count))
    odd = torch.empty(len(values))
    odd_half_kernel[(len(values) // count,)](torch.from_numpy(values), odd, count)
    want = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    for half in (truncated_half(odd.numpy()), odd.numpy().astype(np.float16)):
        np.testing.assert_array_equal(half.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), want)
    plain = truncated_half(values).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert (plain != want).any()


def test_the_kernels_of_sm_89_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With VIA_HALF the interpreter converts the odd values directly, which changes nothing."""
    monkeypatch.setattr(group_quant, "device_sm", lambda _: 89)
    x = normal(40, 640)
    got = empty_groups(40, 640)
    group_quant.launch(x, *got)
    assert_equal_groups(got, fp8.quantise_groups(x))
    assert group_quant.constants(640, 89)["VIA_HALF"]
    assert not group_quant.constants(640, 90)["VIA_HALF"]
