"""The CUDA engine with FP8 linears on a GPU: against the module with plain torch operators.

Both round to the model's dtype between the same quantisers, in a different order, so their values
fall to different sides of E4M3's steps here and there. Bound: against the module in float64 over
the same FP8 weights, the engine's logits have at most 1.5 times the RMS error, and twice the
largest error, of the torch module in the engine's dtype. Steps are repeatable bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from canvases import block_tokens, greedy
from torch import Tensor

from lacache_trt.model.config import ModelConfig
from lacache_trt.model.fp8 import Fp8Recipe, select_linears
from lacache_trt.model.ops import TorchOps
from lacache_trt.model.transformer import Transformer
from lacache_trt.plugins.fp8 import quantise_blocks

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
gpu_models = pytest.importorskip("gpu_models")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RECIPES = {"ffn": Fp8Recipe(), "all": Fp8Recipe(scope="all", layers="0-2")}


def fp8_weights(config: ModelConfig, recipe: Fp8Recipe, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random weights, the recipe's linears quantised."""
    weights: dict[str, Tensor] = gpu_models.random_weights(config, dtype)
    for linear in select_linears(config, recipe).linears:
        values, scale = quantise_blocks(weights[linear + ".weight"].t().contiguous())
        weights |= {linear + ".weight": values, linear + ".scale": scale}
    return weights


def module_session(config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """The module over the same FP8 weights, the others in `dtype`."""
    linears = [name.removesuffix(".scale") for name in weights if name.endswith(".scale")]
    with torch.device("meta"):
        model = Transformer(config, TorchOps(), dtype, linears)
    for name, value in weights.items():
        kept = name.rpartition(".")[0] in linears and not name.endswith(".bias")
        parameter = torch.nn.Parameter(value if kept else value.to(dtype), requires_grad=False)
        model.weights[name.replace(".", "/")] = parameter
    session = gpu_models.DeviceSession.__new__(gpu_models.DeviceSession)
    session._model, session.caches, session._geometry = model, (), ()
    return session


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", ["grouped", "dream"])
def test_steps_are_those_of_the_module(name: str, recipe: Fp8Recipe, dtype: torch.dtype) -> None:
    config = gpu_models.CONFIGS[name]
    weights = fp8_weights(config, recipe, dtype)
    truth, rounded = (module_session(config, weights, each) for each in (torch.float64, dtype))
    squares = np.zeros(2)
    largest = np.zeros(2)
    with gpu_models.engine_of(config, weights) as engine:
        session = engine.session()
        for shape in gpu_models.SHAPES.values():
            canvas, block = shape.canvas(config), shape.block_columns
            sampling, tokens = greedy(shape.rows, config), block_tokens(canvas, block)
            outputs = []
            for each in (truth, rounded, session):
                each.fill(canvas, block)
                outputs.append(each.reuse(tokens, sampling, block))
            again = session.reuse(tokens, sampling, block)
            np.testing.assert_array_equal(outputs[2].logits, again.logits)
            assert np.isfinite(again.logits).all()
            expected = outputs[0].logits.astype(np.float64)
            errors = [np.abs(each.logits - expected) for each in outputs[1:]]
            squares += [np.square(error).sum() for error in errors]
            largest = np.maximum(largest, [error.max() for error in errors])
            plain = session.plain(canvas, block, sampling, block)
            squares_of_plain = np.square(plain.logits - expected).mean() ** 0.5
            assert squares_of_plain <= 3 * np.square(errors[0]).mean() ** 0.5 + 1e-3
    ratio, peak = (squares[1] / squares[0]) ** 0.5, largest[1] / largest[0]
    print(f"{name}: RMS {ratio:.2f}, largest {peak:.2f} of the torch module's")
    assert ratio <= 1.5
    assert peak <= 2


def test_a_bundle_becomes_an_fp8_engine_without_graphs(tmp_path: Any) -> None:
    """`build --fp8` on this machine: quantised, measured, loaded; the tables name real kernels."""
    from test_fp8_quantise import CONFIG, write_source

    from lacache_trt.artifacts import load_manifest, publish_directory, write_manifest
    from lacache_trt.engines.builder import build_engine, load_engine
    from lacache_trt.engines.cuda.fp8 import Fp8Table
    from lacache_trt.engines.options import BuildOptions

    with publish_directory(tmp_path / "bundle") as directory:
        write_source(directory / "weights.safetensors", CONFIG, "bfloat16")
        body = {"model": CONFIG.to_json(), "dtype": "bfloat16", "opset": 23}
        write_manifest(directory, "bundle", body)
    options = BuildOptions(engine="cuda", fp8=Fp8Recipe(scope="all"))
    build_engine(tmp_path / "bundle", tmp_path / "engine", options)
    manifest = load_manifest(tmp_path / "engine", "engine")
    table = Fp8Table.from_json(manifest.body["fp8_gemms"])
    assert {(128, 768), (384, 128), (128, 201)} <= set(table.entries)
    with load_engine(manifest) as engine:
        shape = gpu_models.SHAPES["odd_block"]
        canvas, block = shape.canvas(CONFIG), shape.block_columns
        session = engine.session()
        session.fill(canvas, block)
        found = session.reuse(block_tokens(canvas, block), greedy(shape.rows, CONFIG), block)
        assert np.isfinite(found.logits).all()
