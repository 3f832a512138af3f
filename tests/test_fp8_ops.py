"""The FP8 ops: torch reference and ONNX function against formulas written out in float64.

Bounds, over all elements, T the dtype of the op, u its unit roundoff, s the formula's scale:
    GroupQuant               scales and bytes are those of NumPy and ml_dtypes, bit for bit
    RMSNormQuant, SwiGLUQuant   |scale - s| <= (4 u + 2^-21) s; the values times their scales within
                             half a step of E4M3 (2^-4 |y|, 2^-10 scale) and 8 u |y| of the formula
    GroupLinear              (2^-22 + (K + 2) 2^-24) sum_k |x_k w_k| + u |result|
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from canvases import bounded
from fp8_op_runs import E4M3, run_function, run_reference
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lacache_trt.errors import QuantisationError
from lacache_trt.plugins.group_linear.op import GROUP_LINEAR
from lacache_trt.plugins.group_quant.op import GROUP_QUANT
from lacache_trt.plugins.rms_norm_quant.op import RMS_NORM_QUANT
from lacache_trt.plugins.spec import OpSpec
from lacache_trt.plugins.swiglu_quant.op import SWIGLU_QUANT

Array = NDArray[Any]
Run = Callable[[OpSpec, list[Tensor]], list[Tensor]]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31 - 1)


RUNS = (run_reference, run_function)


def groups_of(values: Array) -> Array:
    return values.reshape(*values.shape[:-1], -1, 128)


def grouped_input(rows: tuple[int, int], groups: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Values of T whose groups have many magnitudes; one of them is zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*rows, groups, 128)) * np.exp(2 * rng.standard_normal((groups, 1)))
    x[:, rows[1] // 2, seed % groups] = 0
    return torch.from_numpy(x.reshape(*rows, -1)).to(dtype)


def check_groups(outputs: list[Tensor], exact: Array, dtype: torch.dtype) -> None:
    """Values and scales against the float64 values that were to be quantised."""
    unit = torch.finfo(dtype).eps / 2
    quantised, scale = (value.double().numpy() for value in outputs)
    largest = np.abs(groups_of(exact)).max(-1)
    wanted = np.where(largest == 0, 1.0, largest / 448)
    assert scale.shape == wanted.shape
    assert (np.abs(scale - wanted) <= (4 * unit + 2.0**-21) * wanted).all()
    restored = groups_of(quantised) * scale[..., None]
    size = np.abs(groups_of(exact))
    step = np.maximum(size * 2.0**-4, 2.0**-10 * scale[..., None])
    tiny = torch.finfo(dtype).tiny if dtype == torch.float16 else 0.0
    bound = step * (1 + 2.0**-10) + 8 * unit * size + tiny
    assert (np.abs(restored - groups_of(exact)) <= bound).all()
    assert np.abs(quantised).max() <= 448


@bounded(25)
@given(
    rows=st.tuples(st.integers(1, 3), st.integers(1, 6)),
    groups=st.integers(1, 5),
    power=st.integers(-40, 40),
    seed=seeds,
    dtype=dtypes,
)
def test_group_quant(
    rows: tuple[int, int], groups: int, power: int, seed: int, dtype: torch.dtype
) -> None:
    x = grouped_input(rows, groups, seed, torch.float64) * 2.0**power
    x = x.clamp(-60000, 60000).to(dtype)
    values = groups_of(x.float().numpy())
    largest = np.abs(values).max(-1)
    wanted = np.where(largest < 2.0**-80, np.float32(1), largest / np.float32(448))
    expected = (values / wanted[..., None]).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    for run in RUNS:
        quantised, scale = run(GROUP_QUANT, [x])
        np.testing.assert_array_equal(scale.numpy(), wanted)
        found = groups_of(quantised.numpy())
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@bounded(20)
@given(
    rows=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    groups=st.integers(1, 5),
    eps=st.sampled_from([1e-6, 1e-5, 1e-2]),
    seed=seeds,
    dtype=dtypes,
)
def test_rms_norm_quant(
    rows: tuple[int, int], groups: int, eps: float, seed: int, dtype: torch.dtype
) -> None:
    hidden = grouped_input(rows, groups, seed, dtype)
    weight = torch.randn(128 * groups, generator=torch.Generator().manual_seed(seed % 999))
    weight = weight.to(dtype)
    wide = hidden.double().numpy()
    exact = wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + np.float32(eps))
    exact = exact * weight.double().numpy()
    for run in RUNS:
        check_groups(run(RMS_NORM_QUANT, [hidden, weight, torch.tensor([eps])]), exact, dtype)


@bounded(20)
@given(
    rows=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    groups=st.integers(1, 4),
    seed=seeds,
    dtype=dtypes,
)
def test_swiglu_quant(rows: tuple[int, int], groups: int, seed: int, dtype: torch.dtype) -> None:
    gate = grouped_input(rows, groups, seed, torch.float64).clamp(-12, 40).to(dtype)
    up = grouped_input(rows, groups, seed + 1, torch.float64).clamp(-40, 40).to(dtype)
    wide = gate.double().numpy()
    exact = wide / (1 + np.exp(-wide)) * up.double().numpy()
    for run in RUNS:
        check_groups(run(SWIGLU_QUANT, [torch.cat([gate, up], -1)]), exact, dtype)


def linear_inputs(rows: tuple[int, int], columns: int, groups: int, seed: int) -> list[Tensor]:
    """Random E4M3 values, among them the largest and the smallest, and random scales."""
    generator = torch.Generator().manual_seed(seed)

    def values(*size: int) -> Tensor:
        spread = torch.randn(size, generator=generator) * 60
        return spread.clamp(-448, 448).to(E4M3)

    def scales(*size: int) -> Tensor:
        return torch.exp(2 * torch.randn(size, generator=generator))

    return [
        values(*rows, 128 * groups),
        scales(*rows, groups),
        values(columns, 128 * groups),
        scales(-(-columns // 128), groups),
    ]


def linear_formula(inputs: list[Tensor]) -> tuple[Array, Array]:
    """(result, sum of the magnitudes of its terms) in float64, one group after the other."""
    quantised, scale, weight, weight_scale = (value.double().numpy() for value in inputs)
    total = np.zeros((*quantised.shape[:-1], len(weight)))
    magnitude = np.zeros_like(total)
    block = np.arange(len(weight)) // 128
    for group in range(scale.shape[-1]):
        part = slice(128 * group, 128 * group + 128)
        x, w = quantised[..., part], weight[:, part].T
        factor = scale[..., group, None] * weight_scale[block, group]
        total += factor * (x @ w)
        magnitude += factor * (np.abs(x) @ np.abs(w))
    return total, magnitude


@bounded(25)
@given(
    rows=st.tuples(st.integers(1, 3), st.integers(1, 9)),
    columns=st.integers(1, 300),
    groups=st.integers(1, 6),
    seed=seeds,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_group_linear(
    rows: tuple[int, int], columns: int, groups: int, seed: int, dtype: torch.dtype
) -> None:
    inputs = linear_inputs(rows, columns, groups, seed)
    exact, magnitude = linear_formula(inputs)
    rounding = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    bound = (2.0**-22 + (128 * groups + 2) * 2.0**-24) * magnitude
    bound += rounding * (np.abs(exact) + bound)
    for run in RUNS:
        (out,) = run(GROUP_LINEAR, [*inputs, torch.zeros(1, dtype=dtype)])
        assert out.shape == (*rows, columns)
        assert (np.abs(out.double().numpy() - exact) <= bound).all()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_groups_of_zeros(run: Run, dtype: torch.dtype) -> None:
    """Scale 1 and values of zero, of their sign, also for what counts as zero."""
    x = torch.ones(1, 2, 384)
    x[0, 0, :128] = 0.0
    x[0, 0, 128:256] = -0.0
    x[0, 1, 256:] = 2.0**-81 if dtype != torch.float16 else 0.0
    quantised, scale = run(GROUP_QUANT, [x.to(dtype)])
    assert scale[0, 0, :2].tolist() == [1, 1]
    assert scale[0, 1, 2] == 1
    assert not quantised[0, 0, :256].any()
    assert not quantised[0, 1, 256:].any()
    assert quantised[0, 0, 128:256].signbit().all()
    zeros = [torch.zeros(1, 3, 256, dtype=dtype)]
    for spec, inputs in (
        (SWIGLU_QUANT, zeros),
        (RMS_NORM_QUANT, [*zeros, torch.ones(256, dtype=dtype), torch.tensor([1e-5])]),
    ):
        quantised, scale = run(spec, inputs)
        assert (scale == 1).all()
        assert not quantised.any()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_value_reaches_its_row_and_no_other(run: Run, broken: float) -> None:
    """From the quantiser through the linear: NaN, never a number.

    onnxruntime's maximum passes over a NaN, so that the scale stays finite and the byte is NaN.
    """
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(2, 3, 384, generator=generator)
    weights = linear_inputs((1, 1), 200, 3, 1)[2:]
    like = torch.zeros(1)

    def product(values: Tensor) -> Tensor:
        quantised, scale = run(GROUP_QUANT, [values])
        (out,) = run(GROUP_LINEAR, [quantised.to(E4M3), scale, *weights, like])
        return out

    good = product(x)
    x[1, 2, 300] = broken
    bad = product(x)
    assert bad[1, 2].isnan().all()
    others = torch.ones(2, 3, dtype=torch.bool)
    others[1, 2] = False
    assert torch.equal(bad[others], good[others])
    gate_up = torch.cat([torch.ones_like(x), x], -1)
    quantised, scale = run(SWIGLU_QUANT, [gate_up])
    restored = (quantised.unflatten(-1, (3, 128)) * scale[..., None]).flatten(-2)
    assert restored[1, 2, 300].isnan()
    assert restored[1, 2, 256:].isnan().all() or run is run_function
    assert restored[1, 2, :256].isfinite().all()
    assert restored[others].isfinite().all()


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape).to(dtype)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("spec", "inputs", "got"),
    [
        (GROUP_QUANT, [empty(1, 2, 130)], "130"),
        (SWIGLU_QUANT, [empty(1, 2, 384)], "192"),
        (RMS_NORM_QUANT, [empty(1, 2, 64), empty(64), empty(1)], "64"),
    ],
)
def test_widths_that_groups_do_not_fit_are_refused(
    spec: OpSpec, inputs: list[Tensor], got: str, device: str
) -> None:
    with pytest.raises(QuantisationError, match=rf"groups of 128(.|\n)*{got}"):
        spec.call(*(value.to(device) for value in inputs))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "shapes",
    [
        ((1, 2, 256), (1, 2, 3), (200, 256), (2, 2)),
        ((1, 2, 384), (1, 2, 3), (200, 256), (2, 2)),
        ((1, 2, 256), (1, 2, 2), (200, 256), (1, 2)),
        ((1, 2, 256), (1, 2, 2), (200, 256), (2, 1)),
        ((1, 2, 192), (1, 2, 2), (200, 192), (2, 2)),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    shapes: tuple[tuple[int, ...], ...], device: str
) -> None:
    kinds = (E4M3, torch.float32, E4M3, torch.float32)
    inputs = [empty(*shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
    with pytest.raises(QuantisationError, match="fit"):
        GROUP_LINEAR.call(*(value.to(device) for value in (*inputs, empty(1))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fake_shapes_are_the_real_ones(dtype: torch.dtype) -> None:
    x = grouped_input((2, 5), 4, 3, dtype)
    cases = [
        (GROUP_QUANT, [x]),
        (SWIGLU_QUANT, [x]),
        (RMS_NORM_QUANT, [x, torch.ones(512, dtype=dtype), torch.tensor([1e-5])]),
        (GROUP_LINEAR, [*linear_inputs((2, 5), 130, 2, 0), torch.zeros(1, dtype=dtype)]),
    ]
    for spec, inputs in cases:
        real = [(value.dtype, value.shape) for value in spec.call(*inputs)]
        fake = [(v.dtype, v.shape) for v in spec.call(*(value.to("meta") for value in inputs))]
        assert real == fake
        assert real == [(kind, torch.Size(size)) for kind, size in spec.output_specs(*inputs)]
