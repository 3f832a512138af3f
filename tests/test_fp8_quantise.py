"""The FP8 weights file: against NumPy and ml_dtypes, against ModelOpt, and what is refused."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from canvases import bounded
from fp8_reference import E4M3, dequantised_blocks, quantised_blocks
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sample_bundle import MODEL

from lacache_trt.errors import MissingDependencyError, OutputError, QuantisationError
from lacache_trt.export import quantise
from lacache_trt.export.convert import convert_weights
from lacache_trt.export.quantise import LinearFacts, best_scales, block_sums, quantise_weights
from lacache_trt.model.config import ModelConfig, parameter_shapes
from lacache_trt.model.fp8 import Fp8Recipe, select_linears
from lacache_trt.plugins.fp8 import block_scales, dequantise_blocks, quantise_blocks
from lacache_trt.progress import SilentProgress

CONFIG = replace(
    MODEL,
    hidden_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    num_layers=3,
    intermediate_size=384,
    vocab_size=201,
    mask_id=200,
    qkv_bias=True,
)


def write_source(path: Path, config: ModelConfig, dtype: str, seed: int = 0) -> dict[str, Any]:
    """A weights file of random values with some outliers, and its tensors."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in parameter_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        values[torch.rand(shape, generator=generator) < 0.001] *= 50
        tensors[name] = values.to(getattr(torch, dtype))
    save_file(tensors, path)
    return tensors


def run(source: Path, target: Path, config: ModelConfig, dtype: Any, recipe: Fp8Recipe) -> Any:
    linears = frozenset(select_linears(config, recipe).linears)
    facts = quantise_weights(source, target, config, dtype, linears, recipe, SilentProgress())
    return linears, facts


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scope", ["ffn", "linears", "all"])
@pytest.mark.parametrize("band", [2**22, 128 * 128])
def test_the_file_holds_what_numpy_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, scope: Any, band: int
) -> None:
    """Bit for bit, in one band or many; every other tensor is unchanged; the order is right."""
    monkeypatch.setattr(quantise, "BAND_ELEMENTS", band)
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    tensors = write_source(source, CONFIG, dtype)
    linears, facts = run(source, target, CONFIG, dtype, Fp8Recipe(scope=scope))
    found = load_file(target)
    assert list(read_names(target)) == list(parameter_shapes(CONFIG, linears))
    for name, tensor in tensors.items():
        linear = name.removesuffix(".weight")
        if linear not in linears:
            assert torch.equal(found[name], tensor)
            continue
        weight = tensor.float().numpy().T
        values, scales = quantised_blocks(weight)
        got = found[name].view(torch.uint8).numpy()
        np.testing.assert_array_equal(got, values.view(np.uint8))
        np.testing.assert_array_equal(found[linear + ".scale"].numpy(), scales)
        noise = np.square(dequantised_blocks(values, scales) - weight).sum()
        expected = 10 * np.log10(np.square(weight.astype(np.float64)).sum() / noise)
        assert facts[linear].sqnr_db == pytest.approx(expected, abs=1e-3)
    assert ("head" in linears) == (scope == "all")


def read_names(path: Path) -> dict[str, Any]:
    """Names in the header, in the order of the data."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    return dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))


@bounded(60)
@given(
    rows=st.integers(1, 300),
    columns=st.sampled_from([128, 256]),
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
    zeros=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_the_error_search_never_makes_a_block_worse(
    rows: int, columns: int, scale: float, zeros: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_t(3, (rows, columns)) * scale).astype(np.float32)
    if zeros:
        values[:128, :128] = 0
    weight = torch.from_numpy(values)
    largest = block_scales(weight)
    best = best_scales(weight, largest)
    assert torch.isfinite(best).all()
    assert (best > 0).all()

    def errors(scales: torch.Tensor) -> torch.Tensor:
        return block_sums((dequantise_blocks(*quantise_blocks(weight, scales)) - weight) ** 2)

    assert (errors(best) <= errors(largest)).all()
    if zeros:
        assert best[0, 0] == 1.0


def test_the_error_search_finds_the_brute_force_minimum() -> None:
    """Against a loop over blocks and multiples in NumPy."""
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((200, 256)).astype(np.float32)
    _, largest = quantised_blocks(weight)
    best = best_scales(torch.from_numpy(weight), torch.from_numpy(largest)).numpy()
    better = 0
    for i, j in np.ndindex(*largest.shape):
        block = weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]

        def error(scale: NDArray[np.float32], block: NDArray[np.float32] = block) -> float:
            scaled = np.clip(block / scale, -448, 448).astype(E4M3).astype(np.float32)
            return float(np.square((scaled * scale - block).astype(np.float64)).sum())

        least = min(error(largest[i, j] * np.float32(m)) for m in quantise.MULTIPLES)
        assert error(best[i, j]) <= least * (1 + 1e-5)
        better += error(best[i, j]) < error(largest[i, j])
    assert better


def test_zero_blocks_become_zeros_with_scale_one(tmp_path: Path) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    tensors = write_source(source, CONFIG, "bfloat16")
    tensors["layers.1.down.weight"][:128, :] = 0
    tensors["layers.2.gate_up.weight"].zero_()
    save_file(tensors, source)
    _, facts = run(source, target, CONFIG, "bfloat16", Fp8Recipe(scales="mse"))
    found = load_file(target)
    assert (found["layers.1.down.scale"][:, 0] == 1).all()
    assert (found["layers.1.down.weight"].view(torch.uint8)[:, :128] & 127 == 0).all()
    assert (found["layers.2.gate_up.scale"] == 1).all()
    assert facts["layers.2.gate_up"] == LinearFacts(None)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float, dtype: str) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    tensors = write_source(source, CONFIG, dtype)
    tensors["layers.1.gate_up.weight"][7, 650] = value
    save_file(tensors, source)
    with pytest.raises(QuantisationError, match=r"layers\.1\.gate_up\.weight is not finite") as got:
        run(source, target, CONFIG, dtype, Fp8Recipe())
    assert "[7, 650]" in str(got.value)
    assert not target.exists()


def test_an_existing_file_is_not_replaced(tmp_path: Path) -> None:
    source = tmp_path / "in.safetensors"
    write_source(source, CONFIG, "float32")
    before = source.read_bytes()
    with pytest.raises(OutputError, match="cannot write"):
        run(source, source, CONFIG, "float32", Fp8Recipe())
    assert source.read_bytes() == before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conversion_to_float32_keeps_fp8_as_it_is(tmp_path: Path, dtype: Any) -> None:
    names = [tmp_path / f"{name}.safetensors" for name in ("in", "fp8", "wide")]
    write_source(names[0], CONFIG, dtype)
    linears, _ = run(names[0], names[1], CONFIG, dtype, Fp8Recipe())
    convert_weights(names[1], names[2], "float32", SilentProgress())
    before, after = load_file(names[1]), load_file(names[2])
    assert set(before) == set(after)
    for name, tensor in before.items():
        kept = name.rpartition(".")[0] in linears
        assert after[name].dtype == (tensor.dtype if kept else torch.float32)
        assert torch.equal(after[name].float(), tensor.float())


def modelopt() -> Any:
    """ModelOpt's quantisation module, or skip."""
    pytest.importorskip("modelopt", reason="NVIDIA ModelOpt: pip install -r requirements-fp8.txt")
    import modelopt.torch.quantization as mtq

    return mtq


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rows", [128, 384, 201])
def test_max_scales_are_modelopts_bit_for_bit(rows: int) -> None:
    modelopt()
    from lacache_trt.export.modelopt import modelopt_scales

    rng = np.random.default_rng(rows)
    weight = rng.standard_t(3, (rows, 512)).astype(np.float32)
    weight[:128, 128:256] = 0
    weight = weight.astype(ml_dtypes.bfloat16).astype(np.float32)
    _, expected = quantised_blocks(weight)
    found = modelopt_scales(torch.from_numpy(weight))
    np.testing.assert_array_equal(found.numpy(), expected)
    np.testing.assert_array_equal(block_scales(torch.from_numpy(weight)).numpy(), expected)


@pytest.mark.filterwarnings("ignore")
def test_the_file_quantised_through_modelopt_is_the_same(tmp_path: Path) -> None:
    modelopt()
    source = tmp_path / "in.safetensors"
    write_source(source, CONFIG, "bfloat16")
    for name in ("builtin", "modelopt"):
        target = tmp_path / f"{name}.safetensors"
        run(source, target, CONFIG, "bfloat16", Fp8Recipe(scope="all", quantiser=name))
    one, other = ((tmp_path / f"{n}.safetensors").read_bytes() for n in ("builtin", "modelopt"))
    assert one == other


@pytest.mark.filterwarnings("ignore")
def test_modelopts_own_quantised_model_is_ours() -> None:
    """Its state, applied in memory to a fresh model, gives our dequantised weights.

    ModelOpt multiplies by the reciprocal of the scale where we divide, so a weight within an ulp
    of the middle between two E4M3 values may go to the other side: none or nearly none do.
    """
    mtq = modelopt()
    import modelopt.torch.opt as mto

    from lacache_trt.export.modelopt import weight_config

    def fresh() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(256, 384, bias=False), torch.nn.Linear(384, 256, bias=False)
        )

    torch.manual_seed(0)
    model = fresh()
    weights = [layer.weight.detach().clone() for layer in model]
    example = torch.zeros(1, 256)
    mtq.quantize(model, weight_config(), lambda module: module(example))
    restored = mto.restore_from_modelopt_state(fresh(), mto.modelopt_state(model))
    restored.load_state_dict(model.state_dict())
    for layer, weight in zip(restored, weights, strict=True):
        theirs = layer.weight_quantizer(weight).detach().numpy()
        ours = dequantised_blocks(*quantised_blocks(weight.numpy()))
        step = np.abs(theirs - ours) / np.abs(weight.numpy()).max()
        assert np.median(step) == 0 or np.median(step) < 1e-7
        assert (step > 1e-6).mean() <= 1e-5
        np.testing.assert_array_equal(
            layer.weight_quantizer.amax.reshape(len(weight) // 128, -1).numpy() / np.float32(448),
            quantised_blocks(weight.numpy())[1],
        )


def test_without_modelopt_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "modelopt", None)
    from lacache_trt.export.modelopt import modelopt_scales

    with pytest.raises(MissingDependencyError, match="ModelOpt") as caught:
        modelopt_scales(torch.ones(128, 128))
    assert "lacache-trt[fp8]" in str(caught.value)
