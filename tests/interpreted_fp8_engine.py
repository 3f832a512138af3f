"""The CUDA engine with FP8 linears, its kernels interpreted; run by `test_fp8_cuda.py`.

The truth is the eager module in float32 on the unpadded canvas. A value in the middle between two
E4M3 values may round to the other side, so logits are compared within a bound of FP8's size.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import simulated_cuda  # noqa: F401
import torch
from canvases import Shape, block_tokens, greedy, relative_error
from eager import EagerSession
from interpreted_engine import LLADA
from torch import Tensor

from lacache_trt.engines.cuda.engine import CudaEngine
from lacache_trt.engines.cuda.gemm import GemmTable
from lacache_trt.model.config import ModelConfig, parameter_shapes
from lacache_trt.model.fp8 import Fp8Recipe, select_linears
from lacache_trt.model.ops import TorchOps
from lacache_trt.model.transformer import Transformer
from lacache_trt.plugins.fp8 import quantise_blocks

CONFIG = replace(LLADA, hidden_size=128, intermediate_size=128, num_layers=2)
DREAM = replace(CONFIG, family="dream", qkv_bias=True, logit_shift=True)
RECIPES = {
    "ffn": (CONFIG, Fp8Recipe()),
    "all": (DREAM, Fp8Recipe(scope="all", layers="0-1")),
}
SHAPE = Shape(29, 5, (20,), (3,), (29,), 1)


def fp8_weights(config: ModelConfig, recipe: Fp8Recipe) -> dict[str, Tensor]:
    """Random float32 weights, the recipe's linears quantised."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * (shape[0] ** -0.5 if len(shape) > 1 else 1)
        for name, shape in parameter_shapes(config).items()
    }
    for linear in select_linears(config, recipe).linears:
        values, scale = quantise_blocks(weights[linear + ".weight"].t().contiguous())
        weights |= {linear + ".weight": values, linear + ".scale": scale}
    return weights


def eager(config: ModelConfig, weights: dict[str, Tensor]) -> EagerSession:
    """The module over the same weights."""
    linears = [name.removesuffix(".scale") for name in weights if name.endswith(".scale")]
    with torch.device("meta"):
        model = Transformer(config, TorchOps(), torch.float32, linears)
    for name, value in weights.items():
        model.weights[name.replace(".", "/")] = torch.nn.Parameter(value, requires_grad=False)
    return EagerSession(model)


@pytest.mark.parametrize("name", list(RECIPES))
def test_steps_equal_the_module(name: str) -> None:
    config, recipe = RECIPES[name]
    weights = fp8_weights(config, recipe)
    sampling = greedy(1, config)
    with CudaEngine(config, weights, GemmTable({})) as engine:
        session, reference = engine.session(), eager(config, weights)
        canvas, columns = SHAPE.canvas(config), SHAPE.block_columns
        tokens = block_tokens(canvas, columns)
        session.fill(canvas, columns)
        reference.fill(canvas, columns)
        expected = reference.reuse(tokens, sampling, columns)
        found = session.reuse(tokens, sampling, columns)
        error = relative_error(found.logits, expected.logits)
        print(f"{name}: {error:.1e}")
        assert error < 5e-2
        np.testing.assert_array_equal(found.token, expected.token)
