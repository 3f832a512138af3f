"""Logits against transformers' Llama and Qwen2 in float64 with a full, non-causal mask.

The bound is max|a - b| / max|b| <= 1e-5 in float32, for every requested row of the plain graph, of
the reuse graph after fill, and of the eager module; see `BF16_BOUND` for bfloat16 arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from canvases import Shape, block_tokens, bounded, greedy, random_shape, relative_error, shapes
from eager import EagerSession, load_eager
from hypothesis import given
from numpy.typing import NDArray
from reference_model import ReferenceModel, load_reference
from synthetic import make_dream, make_llada

from lacache_trt.engines.base import Canvas, Int, Session
from lacache_trt.export.weights import write_weights
from lacache_trt.model.checkpoint import Checkpoint
from lacache_trt.model.config import ModelConfig

BOUND = 1e-5
# bfloat16 keeps 8 bits: each rounding is up to 2^-9 = 0.2%, and two layers have about thirty.
BF16_BOUND = 4e-2
BF16_TO_TRANSFORMERS = 1.5

SIZES: dict[str, Callable[[Path], Path]] = {
    "llada-wide": lambda path: make_llada(path, hidden=192, heads=6, kv_heads=6, ffn=320, layers=2),
    "llada-grouped": lambda path: make_llada(path, hidden=128, heads=8, kv_heads=2, layers=4),
    "llada-odd-vocabulary": lambda path: make_llada(path, vocab=1013, kv_heads=1, ffn=100),
    "llada-tied-bias": lambda path: make_llada(path, tied=True, qkv_bias=True, layers=2),
    "llada-one-layer": lambda path: make_llada(path, layers=1, rope_theta=1e4),
    "dream-wide": lambda path: make_dream(path, hidden=224, heads=7, kv_heads=1, layers=2),
    "dream-deep": lambda path: make_dream(path, layers=6, shards=3),
    "dream-one-layer": lambda path: make_dream(path, layers=1, tied=True),
}


def requested(shape: Shape) -> Int:
    """Columns of each row whose logits are asked for: random ones of its valid range."""
    rng = np.random.default_rng(shape.seed + 1)
    count = int(rng.integers(1, 24))
    bounds = zip(shape.valid_from, shape.valid_to, strict=True)
    return np.array([rng.integers(first, end, count) for first, end in bounds], np.int32)


def expected_logits(reference: ReferenceModel, canvas: Canvas, columns: Int) -> NDArray[np.float64]:
    """The truth for each requested column, each row computed alone and without padding."""
    ranges = zip(canvas.tokens, canvas.valid_from, canvas.valid_to, columns, strict=True)
    return np.stack(
        [
            reference.row_logits(tokens[first:end].tolist())[wanted - first]
            for tokens, first, end, wanted in ranges
        ]
    )


def check_session(
    session: Session | EagerSession,
    shape: Shape,
    config: ModelConfig,
    reference: ReferenceModel,
    bound: float,
) -> float:
    """Compare both ways through the model with the truth; returns the worse error."""
    canvas, block, columns = shape.canvas(config), shape.block_columns, requested(shape)
    sampling = greedy(shape.rows, config)
    expected = expected_logits(reference, canvas, columns)
    plain = session.plain(canvas, block, sampling, columns)
    session.fill(canvas, block)
    reuse = session.reuse(block_tokens(canvas, block), sampling, columns)
    errors = [relative_error(outputs.logits, expected) for outputs in (plain, reuse)]
    assert max(errors) <= bound, errors
    return max(errors)


@bounded(25)
@given(shape=shapes())
def test_graphs(model_name: str, engines: Any, references: Any, shape: Shape) -> None:
    engine, reference = engines(model_name), references(model_name)
    check_session(engine.session(), shape, engine.config, reference, BOUND)


@pytest.mark.parametrize("layout", SIZES)
def test_eager_module_of_several_sizes(layout: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(SIZES[layout](tmp_path / "checkpoint"))
    write_weights(checkpoint, tmp_path / "weights.safetensors", "float32")
    config = checkpoint.config
    session = EagerSession(load_eager(tmp_path / "weights.safetensors", config, torch.float32))
    reference = load_reference(tmp_path / "checkpoint")
    for seed in range(6):
        check_session(session, random_shape(seed), config, reference, BOUND)


@pytest.mark.parametrize("make", [make_llada, make_dream])
def test_bfloat16_arithmetic(make: Callable[..., Path], tmp_path: Path) -> None:
    """The eager module in bfloat16 is as close to float64 as transformers' own bfloat16 model."""
    path = make(tmp_path / "checkpoint", layers=2, dtype="bfloat16", hidden=128)
    checkpoint = Checkpoint.open(path)
    write_weights(checkpoint, tmp_path / "weights.safetensors")
    config = checkpoint.config
    assert config.dtype == "bfloat16"
    session = EagerSession(load_eager(tmp_path / "weights.safetensors", config, torch.bfloat16))
    reference, theirs = load_reference(path), load_reference(path, torch.bfloat16)
    ours, others = [], []
    for seed in range(8):
        shape = random_shape(seed)
        ours.append(check_session(session, shape, config, reference, BF16_BOUND))
        canvas, columns = shape.canvas(config), requested(shape)
        expected = expected_logits(reference, canvas, columns)
        others.append(relative_error(expected_logits(theirs, canvas, columns), expected))
    assert np.mean(ours) <= BF16_TO_TRANSFORMERS * np.mean(others), (ours, others)


def test_a_causal_model_would_be_noticed(engines: Any, references: Any) -> None:
    """The comparison can fail: tokens after the requested column matter."""
    engine, reference = engines("llada"), references("llada")
    shape = Shape(12, 4, (4,), (0,), (12,), seed=0)
    canvas, columns = shape.canvas(engine.config), np.array([[2]], np.int32)
    session = engine.session()
    sampling = greedy(1, engine.config)
    logits = session.plain(canvas, shape.block_columns, sampling, columns).logits
    causal = reference.row_logits(canvas.tokens[0, :3].tolist())[2]
    assert relative_error(logits[0, 0], causal) > 100 * BOUND
