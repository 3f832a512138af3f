"""The CUDA engine's host side with its kernels interpreted; run by `test_kernels_interpreter.py`.

Sessions, lanes, buckets and staging are the real ones; streams and graphs are simulated. The truth
is the eager module in float64 on the unpadded canvas.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import simulated_cuda  # noqa: F401
import torch
from canvases import Shape, block_tokens, greedy, relative_error
from eager import EagerSession
from torch import Tensor

from lacache_trt.engines.base import StepOutputs
from lacache_trt.engines.cuda.engine import CudaEngine
from lacache_trt.engines.cuda.gemm import GemmTable
from lacache_trt.errors import CapacityError, EngineError
from lacache_trt.model.config import ModelConfig, parameter_shapes
from lacache_trt.model.ops import TorchOps
from lacache_trt.model.transformer import Transformer

LLADA = ModelConfig(
    family="llada",
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    intermediate_size=48,
    vocab_size=97,
    rope_theta=1e4,
    norm_eps=1e-5,
    max_length=128,
    qkv_bias=False,
    tied_head=False,
    logit_shift=False,
    mask_id=96,
    eos_ids=(95,),
    dtype="float32",
)
DREAM = replace(LLADA, family="dream", qkv_bias=True, logit_shift=True)
ONE_LAYER = replace(LLADA, num_layers=1)
TOLERANCE = 1e-5
FIRST = Shape(29, 5, (20, 16), (0, 3), (29, 29), 1)
SECOND = Shape(31, 5, (26, 11), (2, 0), (31, 30), 2)
FIVE = Shape(29, 5, (20, 16, 3, 24, 11), (0, 3, 0, 9, 2), (29, 29, 28, 29, 20), 3)


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    """Random float32 weights."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) * (shape[0] ** -0.5 if len(shape) > 1 else 1)
        for name, shape in parameter_shapes(config).items()
    }


def truth(config: ModelConfig, weights: dict[str, Tensor]) -> EagerSession:
    """The module in float64."""
    with torch.device("meta"):
        model = Transformer(config, TorchOps(), torch.float64)
    for name, value in weights.items():
        parameter = torch.nn.Parameter(value.double(), requires_grad=False)
        model.weights[name.replace(".", "/")] = parameter
    return EagerSession(model)


def check(found: StepOutputs, expected: StepOutputs) -> None:
    """Same tokens, scores within the tolerance."""
    np.testing.assert_array_equal(found.token, expected.token)
    for name in ("confidence", "margin", "neg_entropy"):
        assert relative_error(getattr(found, name), getattr(expected, name)) < 10 * TOLERANCE, name
    if expected.logits.size:
        assert relative_error(found.logits, expected.logits) < TOLERANCE


@pytest.mark.parametrize("config", [LLADA, DREAM, ONE_LAYER], ids=["llada", "dream", "one"])
def test_steps_equal_the_module(config: ModelConfig) -> None:
    """Two canvases of different lengths share a bucket; the logits of the block come with them."""
    weights = weights_of(config)
    sampling = greedy(2, config)
    with CudaEngine(config, weights, GemmTable({})) as engine:
        session, reference = engine.session(), truth(config, weights)
        for shape in (FIRST, SECOND):
            canvas, columns = shape.canvas(config), shape.block_columns
            tokens = block_tokens(canvas, columns)
            session.fill(canvas, columns)
            reference.fill(canvas, columns)
            expected = reference.reuse(tokens, sampling, columns)
            found = session.reuse(tokens, sampling, columns)
            check(found, expected)
            check(session.plain(canvas, columns, sampling, columns), expected)
        session.close()


def test_rows_of_a_bucket() -> None:
    """Five rows run in a lane of six and nothing of the sixth is seen; six share that lane."""
    weights = weights_of(ONE_LAYER)
    six = replace(FIVE, starts=(*FIVE.starts, 7), valid_from=(*FIVE.valid_from, 1))
    six = replace(six, valid_to=(*FIVE.valid_to, 29))
    with CudaEngine(ONE_LAYER, weights, GemmTable({})) as engine:
        session, reference = engine.session(), truth(ONE_LAYER, weights)
        for shape in (FIVE, six):
            canvas, columns = shape.canvas(ONE_LAYER), shape.block_columns
            sampling, tokens = greedy(shape.rows, ONE_LAYER), block_tokens(canvas, columns)
            for each in (session, reference):
                each.fill(canvas, columns)
            expected = reference.reuse(tokens, sampling, columns)
            found = session.reuse(tokens, sampling, columns)
            assert found.token.shape == (shape.rows, 5)
            assert found.logits.shape == (shape.rows, 5, ONE_LAYER.vocab_size)
            check(found, expected)
            check(session.plain(canvas, columns, sampling), reference.reuse(tokens, sampling))
            assert session.cache_arrays()["embed"].shape[0] == 6
        few = greedy(5, ONE_LAYER)
        with pytest.raises(EngineError, match="number of rows"):
            session.reuse(tokens[:5], few)
        # A step without caches in the same lane does not change what was filled.
        session.plain(FIVE.canvas(ONE_LAYER), FIVE.block_columns, few)
        check(session.reuse(tokens, sampling, columns), expected)
        session.close()


def test_sessions_do_not_disturb_each_other() -> None:
    """Interleaved sessions, a plain step between fill and reuse, a lane that is used again."""
    weights = weights_of(ONE_LAYER)
    sampling = greedy(2, ONE_LAYER)
    with CudaEngine(ONE_LAYER, weights, GemmTable({})) as engine:
        expected = []
        for shape in (FIRST, SECOND):
            reference = truth(ONE_LAYER, weights)
            reference.fill(shape.canvas(ONE_LAYER), shape.block_columns)
            tokens = block_tokens(shape.canvas(ONE_LAYER), shape.block_columns)
            expected.append(reference.reuse(tokens, sampling))
        first, second = engine.session(), engine.session()
        for _ in range(2):
            for session, shape in ((first, FIRST), (second, SECOND)):
                session.fill(shape.canvas(ONE_LAYER), shape.block_columns)
            first.plain(SECOND.canvas(ONE_LAYER), SECOND.block_columns, sampling)
            for session, shape, want in zip(
                (first, second), (FIRST, SECOND), expected, strict=True
            ):
                tokens = block_tokens(shape.canvas(ONE_LAYER), shape.block_columns)
                check(session.reuse(tokens, sampling), want)
            first.close()


def test_errors_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reuse before fill, a closed engine, a canvas that does not fit."""
    engine = CudaEngine(ONE_LAYER, weights_of(ONE_LAYER), GemmTable({}))
    session, sampling = engine.session(), greedy(2, ONE_LAYER)
    with pytest.raises(EngineError, match="before fill"):
        session.reuse(np.zeros((2, 5), np.int32), sampling)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**34))
    for shape, size in ((FIRST, "2 rows and"), (FIVE, r"5 rows \(run as 6\) and")):
        words = rf"a batch of {size} 29 columns \(run as 64\) does not fit"
        with pytest.raises(CapacityError, match=words) as caught:
            session.fill(shape.canvas(ONE_LAYER), shape.block_columns)
        assert "1,048,576 bytes free" in str(caught.value)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.session()
