"""FP8 per channel, its parts: the arithmetic, the weights file, the manifest, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from canvases import bounded
from channel_reference import dequantised_rows, fake_quantised, quantised_rows
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_fp8_quantise import CONFIG, modelopt, read_names, write_source
from test_fp8_recipe import WIDE

from lacache_trt.errors import (
    ArtifactError,
)
from lacache_trt.export import quantise
from lacache_trt.export.quantise import RULES, best_scales, quantise_weights
from lacache_trt.model.channel_linear import channel_linear, record_channel_linear
from lacache_trt.model.config import fp8_dtypes, parameter_shapes
from lacache_trt.model.fp8 import (
    Fp8Recipe,
    fp8_granularity,
    fp8_linears,
    fp8_section,
    select_linears,
)
from lacache_trt.progress import SilentProgress

WEIGHTS = "weights.safetensors"
CHANNEL = Fp8Recipe(recipe="per-channel")
FACTS: dict[str, object] = {
    "prompts": 2,
    "tokens": 9,
    "sha256": "0" * 64,
    "gen_length": 64,
    "block_length": 32,
    "steps": 64,
}
FILE = Path("prompts.jsonl")


# The arithmetic


@bounded(60)
@given(
    rows=st.integers(1, 9),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 40),
    dtype=st.sampled_from(["float32", "float64"]),
    scale=st.sampled_from([1e-4, 0.05, 3.0]),
    seed=st.integers(0, 2**31 - 1),
)
def test_the_linear_is_what_numpy_computes(
    rows: int, inputs: int, outputs: int, dtype: str, scale: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, (2, rows, inputs)).astype(dtype)
    weight = rng.standard_normal((outputs, inputs)).astype(np.float32)
    values, scales = quantised_rows(weight)
    expected = fake_quantised(x.astype(np.float64), scale) @ dequantised_rows(weight).T
    stored = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)
    factor = torch.tensor(scale, dtype=torch.float32)
    found = channel_linear(torch.from_numpy(x), factor, stored, torch.from_numpy(scales)).numpy()
    assert found.dtype == x.dtype
    bound = 1e-12 if dtype == "float64" else 2.0**-23 * inputs
    magnitude = np.abs(fake_quantised(x.astype(np.float64), scale)) @ np.abs(
        dequantised_rows(weight).T
    )
    assert (np.abs(found - expected) <= bound * magnitude + 1e-30).all()


class _Recorded(torch.nn.Module):
    """One linear, recorded as ONNX operators."""

    def __init__(self, weight: torch.Tensor, weight_scale: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, False)
        self.weight_scale = torch.nn.Parameter(weight_scale, False)
        self.input_scale = torch.nn.Parameter(torch.tensor(0.0173), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return record_channel_linear(x, self.input_scale, self.weight, self.weight_scale)


def test_onnx_runtime_computes_the_same(tmp_path: Path) -> None:
    """What is larger than the calibration saturates, also infinities; NaN stays NaN."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((24, 96)).astype(np.float32)
    values, scales = quantised_rows(weight)
    stored = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)
    module = _Recorded(stored, torch.from_numpy(scales)).eval()
    x = torch.from_numpy(rng.standard_normal((2, 5, 96)).astype(np.float32) * 5)
    x[0, 0, 0], x[0, 1, 1], x[0, 2, 2], x[0, 3, 3] = torch.nan, torch.inf, -torch.inf, 1e30
    program = torch.onnx.export(module, (x,), dynamo=True, verbose=False, opset_version=23)
    assert program is not None
    program.save(tmp_path / "linear.onnx")
    session = ort.InferenceSession(tmp_path / "linear.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = channel_linear(x, module.input_scale, stored, module.weight_scale).numpy()
    assert np.isnan(found[0, 0]).all()
    assert np.isfinite(found[0, 1:]).all()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    saturated = x.nan_to_num(nan=0.0).clamp(-448 * 0.0173, 448 * 0.0173)
    again = channel_linear(saturated, module.input_scale, stored, module.weight_scale).numpy()
    np.testing.assert_array_equal(expected[0, 1:], again[0, 1:])


# The weights file and the manifest


def write(path: Path, dtype: Any = "bfloat16", recipe: Fp8Recipe = CHANNEL, seed: int = 0) -> Any:
    """A file at `path`; the tensors before, the linears, the scales of their inputs, the facts."""
    source = path.parent / f"{path.name}.in"
    tensors = write_source(source, CONFIG, dtype, seed)
    linears = frozenset(select_linears(CONFIG, recipe).linears)
    scales = {name: 0.5 + index for index, name in enumerate(sorted(linears))}
    facts = quantise_weights(source, path, CONFIG, dtype, linears, recipe, SilentProgress(), scales)
    return tensors, linears, scales, facts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("band", [2**22, 128 * 128])
def test_the_file_holds_what_numpy_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, band: int
) -> None:
    monkeypatch.setattr(quantise, "BAND_ELEMENTS", band)
    path = tmp_path / "out.safetensors"
    recipe = Fp8Recipe(recipe="per-channel", scope="all")
    tensors, linears, scales, facts = write(path, dtype, recipe)
    found = load_file(path)
    assert list(read_names(path)) == list(parameter_shapes(CONFIG, linears, "per-channel"))
    assert "head" in linears
    for name, tensor in tensors.items():
        linear = name.removesuffix(".weight")
        if linear not in linears:
            assert torch.equal(found[name], tensor)
            continue
        weight = tensor.float().numpy().T
        values, expected = quantised_rows(weight)
        np.testing.assert_array_equal(found[name].view(torch.uint8).numpy(), values.view(np.uint8))
        np.testing.assert_array_equal(found[linear + ".scale"].numpy(), expected)
        assert float(found[linear + ".input_scale"]) == scales[linear]
        noise = np.square(dequantised_rows(weight) - weight).sum()
        ratio = np.square(weight.astype(np.float64)).sum() / noise
        assert facts[linear].sqnr_db == pytest.approx(10 * np.log10(ratio), abs=1e-3)


def test_the_error_search_makes_no_row_worse_and_some_better() -> None:
    rng = np.random.default_rng(1)
    weight = torch.from_numpy(rng.standard_t(3, (90, 300)).astype(np.float32))
    weight[7] = 0
    rule = RULES["per-channel"]
    largest = rule.largest(weight)

    def errors(scales: torch.Tensor) -> torch.Tensor:
        return ((rule.dequantise(*rule.quantise(weight, scales)) - weight) ** 2).sum(dim=1)

    best = errors(best_scales(weight, largest, rule))
    assert (best <= errors(largest)).all()
    assert (best < errors(largest)).any()
    assert largest[7] == 1


@pytest.mark.filterwarnings("ignore")
def test_max_scales_are_modelopts_bit_for_bit() -> None:
    """Its FP8 configuration with axis 0, any number of rows and columns."""
    modelopt()
    from lacache_trt.export.modelopt import modelopt_scales

    rng = np.random.default_rng(2)
    weight = rng.standard_t(3, (201, 300)).astype(np.float32)
    weight[5] = 0
    found = modelopt_scales(torch.from_numpy(weight), "per-channel")
    np.testing.assert_array_equal(found.numpy(), quantised_rows(weight)[1])


def section(**changes: object) -> dict[str, Any]:
    """A section as it is written, or with changes."""
    written = fp8_section(CHANNEL, select_linears(WIDE, CHANNEL), {}, FACTS)
    return {**written, **changes}


def test_a_good_section_is_read_back() -> None:
    body = {"fp8": json.loads(json.dumps(section()))}
    assert fp8_linears(body, WIDE) == set(section()["linears"])
    assert fp8_granularity(body) == "per-channel"
    assert fp8_granularity({}) == "per-group"


@pytest.mark.parametrize(
    "change",
    [
        {"calibration": None},
        {"calibration": {}},
        {"calibration": {**FACTS, "prompts": 0}},
        {"calibration": {**FACTS, "tokens": True}},
        {"calibration": {**FACTS, "sha256": 7}},
        {"calibration": {**FACTS, "more": 1}},
        {"recipe": Fp8Recipe().to_json()},
    ],
)
def test_a_malformed_calibration_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="fp8 section"):
        fp8_linears({"fp8": section(**change)}, WIDE)


@pytest.mark.parametrize("width", [1, 96, 200, 256])
def test_inputs_may_have_any_width(width: int) -> None:
    from dataclasses import replace

    config = replace(WIDE, intermediate_size=width)
    selection = select_linears(config, CHANNEL)
    assert not selection.unfit
    shapes = parameter_shapes(config, selection.linears, "per-channel")
    kinds = fp8_dtypes(selection.linears, "per-channel")
    for name in selection.linears:
        outputs, _ = shapes[f"{name}.weight"]
        assert (shapes[f"{name}.scale"], shapes[f"{name}.input_scale"]) == ((outputs,), ())
        assert {kinds[f"{name}{part}"] for part in (".scale", ".input_scale")} == {"float32"}
