"""FP8 schemes against their formulas in float64, and what a case changes in a model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lacache_trt.accuracy.decode import on_device, predict
from lacache_trt.accuracy.models import (
    Case,
    build_model,
    load_weights,
    only_layer,
    quantised_linears,
    standard_cases,
)
from lacache_trt.accuracy.outliers import MODEL, planted_weights, row_ulps
from lacache_trt.accuracy.schemes import SCHEMES, smoothing
from lacache_trt.decoding.rows import pad_left
from lacache_trt.demo.shipped import CHECKPOINT
from lacache_trt.errors import InvalidRequestError
from lacache_trt.model.checkpoint import Checkpoint

Array = NDArray[np.float64]
CPU = torch.device("cpu")


def e4m3(values: Array) -> Array:
    """Nearest E4M3 value, ties to even: 3 fraction bits, exponents from -6, largest 448."""
    size = np.abs(values)
    exponent = np.floor(np.log2(np.where(size > 0, size, 1)))
    step = 2.0 ** (np.maximum(exponent, -6) - 3)
    return np.sign(values) * np.minimum(np.round(size / step) * step, 448)


def scale_of(amax: Array) -> Array:
    """amax / 448 in float32, 1 for zeros."""
    found = amax.astype(np.float32) / np.float32(448)
    return np.where(amax == 0, 1, found).astype(np.float64)


def rounded(values: Array, scale: Array) -> Array:
    quotient = (values.astype(np.float32) / scale.astype(np.float32)).astype(np.float64)
    return e4m3(quotient) * scale


def expected_activations(name: str, x: Array, amax: Array) -> Array:
    """x [B, N, K]."""
    if name in ("tensor", "smooth"):
        return rounded(x, np.broadcast_to(scale_of(amax.max()), x.shape))
    if name == "token":
        return rounded(x, np.broadcast_to(scale_of(np.abs(x).max(-1, keepdims=True)), x.shape))
    result = np.empty_like(x)
    size = 128 if name == "group" else 32
    for row in range(x.shape[0]):
        whole = scale_of(np.abs(x[row]).max())
        for column in range(x.shape[1]):
            for first in range(0, x.shape[2], size):
                part = x[row, column, first : first + size]
                scale = scale_of(np.abs(part).max())
                if name == "moss":
                    power = 0.0 if not part.any() else np.ceil(np.log2(scale / whole))
                    scale = whole * 2.0 ** min(power, 0.0)
                result[row, column, first : first + size] = rounded(part, scale)
    return result


def expected_weights(name: str, weight: Array) -> Array:
    """weight [out, in]."""
    if name == "token":
        scale = scale_of(np.abs(weight).max(1, keepdims=True))
        return rounded(weight, np.broadcast_to(scale, weight.shape))
    if name != "group":
        return rounded(weight, np.broadcast_to(scale_of(np.abs(weight).max()), weight.shape))
    result = np.empty_like(weight)
    for top in range(0, weight.shape[0], 128):
        for left in range(0, weight.shape[1], 128):
            part = weight[top : top + 128, left : left + 128]
            result[top : top + 128, left : left + 128] = rounded(part, scale_of(np.abs(part).max()))
    return result


def drawn(shape: tuple[int, ...], seed: int) -> Array:
    """Values over many magnitudes, some groups zero; exact in float32."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 4, shape)
    values[..., :128] *= rng.random((*shape[:-1], 1)) > 0.3
    return values.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("name", SCHEMES)
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 3), columns=st.integers(1, 5), groups=st.integers(1, 3), seed=st.integers(0)
)
def test_activations(name: str, rows: int, columns: int, groups: int, seed: int) -> None:
    x = drawn((rows, columns, 128 * groups), seed % 2**32)
    amax = np.abs(drawn((rows, columns, 128 * groups), seed % 2**32 + 1)).max((0, 1))
    tensors = torch.from_numpy(x).float(), torch.from_numpy(amax).float()
    found = SCHEMES[name].activations(*tensors).double().numpy()
    expected = expected_activations(name, x, amax)
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", SCHEMES)
@settings(max_examples=10, deadline=None)
@given(out=st.integers(1, 300), groups=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_weights(name: str, out: int, groups: int, seed: int) -> None:
    weight = drawn((out, 128 * groups), seed)
    found = SCHEMES[name].weights(torch.from_numpy(weight).float()).double().numpy()
    np.testing.assert_allclose(found, expected_weights(name, weight), rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", SCHEMES)
def test_zeros_stay_and_what_is_not_finite_shows(name: str) -> None:
    rule, amax = SCHEMES[name].activations, torch.full((256,), 3.0)
    assert torch.equal(rule(torch.zeros(2, 3, 256), amax), torch.zeros(2, 3, 256))
    for broken in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(2, 3, 256)
        x[1, 2, 200] = broken
        found = rule(x, amax)
        assert torch.isnan(found[1, 2, 200])
        assert torch.isfinite(found[0]).all()
    if name == "group":
        assert torch.isfinite(found[1, 2, :128]).all()
    zero = SCHEMES[name].weights(torch.zeros(130, 256))
    assert torch.equal(zero, torch.zeros(130, 256))


def test_finer_scales_lose_less_beside_an_outlier() -> None:
    """One huge value: the whole tensor suffers, or its row, or its group."""
    x = torch.randn(1, 8, 256, generator=torch.Generator().manual_seed(0)) * 1e-3
    x[0, 0, 0] = 448.0
    amax = x.abs().amax(dim=(0, 1))
    errors = {
        name: float((scheme.activations(x, amax) - x)[..., 128:].square().sum())
        for name, scheme in SCHEMES.items()
    }
    assert errors["group"] < errors["token"] < errors["tensor"]
    assert errors["moss"] < errors["token"]


def test_smoothing_formula() -> None:
    amax = np.array([4.0, 0.0, 100.0])
    weights = [np.array([[1.0, 2.0, -3.0], [0.5, 1.0, 1.0]]), np.array([[-9.0, 0.0, 0.0]])]
    expected = [4.0**0.5 / 9.0**0.5, 1e-5, 100.0**0.5 / 3.0**0.5]
    found = smoothing(torch.from_numpy(amax), [torch.from_numpy(weight) for weight in weights])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_smoothing_changes_no_function() -> None:
    """Without the rounding to FP8 the migrated model is the model."""
    weights = {name: value.float() for name, value in planted_weights(3, 64.0).items()}
    amax = {
        name: torch.rand(weights[name + ".weight"].shape[0]) * 9 + 0.1
        for name in quantised_linears(MODEL, _case("smooth", "all"))
    }
    outputs = []
    for case in (Case("fp32", torch.float32), _case("smooth", "all", torch.float32)):
        model, ops = build_model(MODEL, weights, case, amax)
        ops.rules.clear()
        canvas = pad_left([(1, 2, 3), (4, 5)], 16, MODEL)
        columns = torch.arange(3, 19, dtype=torch.int32).expand(2, -1).contiguous()
        outputs.append(predict(model, on_device(canvas, CPU), columns, logits=True)[2])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
    changed, _ = build_model(MODEL, weights, _case("smooth", "all"), amax)
    assert not torch.equal(
        changed.weight("layers.1.ffn_norm.weight").float(),
        weights["layers.1.ffn_norm.weight"].bfloat16().float(),
    )


def _case(name: str, scope: str, dtype: torch.dtype = torch.bfloat16) -> Case:
    layers = tuple(range(MODEL.num_layers))
    return Case(name, dtype, SCHEMES[name], scope, layers)


def test_only_the_linears_of_a_case_are_quantised() -> None:
    last = MODEL.num_layers - 1
    ffn = quantised_linears(MODEL, Case("x", scheme=SCHEMES["group"], layers=(1, last)))
    assert ffn == (
        "layers.1.gate_up",
        "layers.1.down",
        f"layers.{last}.gate_up",
        f"layers.{last}.down",
    )
    everything = quantised_linears(MODEL, _case("group", "all"))
    assert {"layers.0.qkv", f"layers.{last}.q", f"layers.{last}.kv", "head"} <= set(everything)
    assert "head" not in quantised_linears(MODEL, _case("group", "linears"))
    assert quantised_linears(MODEL, Case("bf16")) == ()


def test_a_quantised_linear_is_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """One linear of a case, in float64: rounded operands, exact product, one rounding."""
    weights = planted_weights(1, 64.0)
    model, ops = build_model(
        MODEL,
        weights,
        _case("group", "ffn"),
        {
            f"layers.{layer}.{kind}": torch.ones(1)
            for layer in range(6)
            for kind in ("gate_up", "down")
        },
    )
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    found = ops.linear(x, model.weight("layers.2.gate_up.weight"))
    left = expected_activations("group", x.double().numpy(), np.ones(256))
    weight = weights["layers.2.gate_up.weight"].double().numpy()
    exact = left @ expected_weights("group", weight.T).T
    assert found.dtype == torch.bfloat16
    assert np.abs(found.double().numpy() - exact).max() <= np.abs(exact).max() * 2.0**-8
    plain = ops.linear(x, model.weight("layers.2.qkv.weight"))
    assert torch.equal(plain, x @ weights["layers.2.qkv.weight"])


def test_standard_cases() -> None:
    names = [case.name for case in standard_cases(MODEL, tuple(SCHEMES), ("ffn", "all"))]
    assert names[:2] == ["bf16", "fp32"]
    assert {"group.ffn", "group+layer0.ffn", "moss.ffn", "smooth.ffn", "group.all"} <= set(names)
    assert "moss.all" not in names
    assert [name for name in names if "only" in name] == [only_layer(layer) for layer in range(6)]
    assert len(set(names)) == len(names)
    with pytest.raises(InvalidRequestError, match="unknown scheme"):
        standard_cases(MODEL, ("int4",), ("ffn",))


def test_planted_outliers_change_no_function() -> None:
    """Powers of two move from the readers to the channels: 16 bits do not notice."""
    plain, planted = planted_weights(2, 1.0), planted_weights(2, 64.0)
    assert not torch.equal(plain["layers.1.ffn_norm.weight"], planted["layers.1.ffn_norm.weight"])
    canvas = pad_left([(1, 2, 3)], 16, MODEL)
    columns = torch.arange(3, 19, dtype=torch.int32)[None]
    first, second = (
        predict(
            build_model(MODEL, weights, Case("bf16"), {})[0],
            on_device(canvas, CPU),
            columns,
            logits=True,
        )[2]
        for weights in (plain, planted)
    )
    assert row_ulps(second, first) < 4


def test_ulps() -> None:
    truth = torch.tensor([[1.0, 0.0], [300.0, 2.0]])
    assert row_ulps(truth + torch.tensor([[0.0, 2.0**-7], [0.0, 0.0]]), truth) == 1.0
    assert row_ulps(truth + torch.tensor([[0.0, 0.0], [0.0, 4.0]]), truth) == 2.0


def test_weights_of_a_checkpoint() -> None:
    """Fused and transposed as the weights file has them."""
    from safetensors.torch import load_file

    source = Checkpoint.open(CHECKPOINT)
    loaded = load_weights(source, CPU)
    stored: Callable[[str], torch.Tensor] = load_file(CHECKPOINT / "model.safetensors").__getitem__
    prefix = "model.transformer.blocks.2."
    gate_up = torch.cat([stored(prefix + "ff_proj.weight"), stored(prefix + "up_proj.weight")]).T
    assert torch.equal(loaded["layers.2.gate_up.weight"], gate_up)
    assert torch.equal(loaded["head.weight"], stored("model.transformer.ff_out.weight").T)
    assert torch.equal(loaded["embed.weight"], stored("model.transformer.wte.weight"))
