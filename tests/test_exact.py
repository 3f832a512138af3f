"""`exact` against the plain uncached graph, and the caches against a float64 layer 0.

Stated bounds, in float32 ulps of max|b| over the tensor (b: the other side): `ULPS` and
`CACHE_ULPS`, about twice the worst of 1,500 random canvases of five models, whose logits reach 25
in magnitude: confidence 168, margin 322, neg_entropy 94, logits 25. Tokens are equal; a difference
is excused if the float64 reference itself is closer to a tie than `TIE` (in logits), and at most
one token in 1,000 may be excused.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from canvases import Shape, block_tokens, bounded, greedy, random_shape, shapes, ulps
from hypothesis import given
from layer_zero import LayerZero
from numpy.typing import NDArray
from reference_model import ReferenceModel

from lacache_trt.engines.base import Canvas, Int, Sampling, StepOutputs
from lacache_trt.engines.onnxruntime.engine import OnnxRuntimeEngine, OnnxRuntimeSession
from lacache_trt.errors import EngineError

ULPS = {"confidence": 384, "margin": 640, "neg_entropy": 192, "logits": 64}
CACHE_ULPS = {"embed": 0, "q": 16, "k": 16, "v": 16, "fa_max": 24, "fa_sum": 72, "fa_acc": 72}
TIE = 1e-4
CASES = 60


def step_pair(
    session: OnnxRuntimeSession, canvas: Canvas, block: Int, sampling: Sampling
) -> tuple[StepOutputs, StepOutputs]:
    """The plain step, and fill then reuse, with the block's own logits."""
    plain = session.plain(canvas, block, sampling, block)
    session.fill(canvas, block)
    return plain, session.reuse(block_tokens(canvas, block), sampling, block)


def check_scores(found: StepOutputs, expected: StepOutputs) -> dict[str, float]:
    """Every output but the token within its bound; returns the distances in ulps."""
    same = found.token == expected.token
    distances = {"logits": ulps(found.logits, expected.logits)}
    for name in ("confidence", "margin", "neg_entropy"):
        a, b = getattr(found, name), getattr(expected, name)
        distances[name] = ulps(np.where(same, a, b), b)
    for name, distance in distances.items():
        assert distance <= ULPS[name], (name, distance)
    return distances


def tie_gap(reference: ReferenceModel, canvas: Canvas, row: int, column: int) -> float:
    """Distance of the best two float64 logits of a column, the mask id left out."""
    first, end = int(canvas.valid_from[row]), int(canvas.valid_to[row])
    logits = reference.row_logits(canvas.tokens[row, first:end].tolist())[column - first]
    logits[reference.mask_id] = -np.inf
    second, best = np.sort(logits)[-2:]
    return float(best - second)


@bounded(40)
@given(shape=shapes())
def test_exact_equals_plain(model_name: str, engines: Any, references: Any, shape: Shape) -> None:
    engine: OnnxRuntimeEngine = engines(model_name)
    canvas, block = shape.canvas(engine.config), shape.block_columns
    plain, reuse = step_pair(engine.session(), canvas, block, greedy(shape.rows, engine.config))
    check_scores(reuse, plain)
    for row, place in np.argwhere(reuse.token != plain.token):
        gap = tie_gap(references(model_name), canvas, row, int(block[row, place]))
        assert gap < TIE, (shape, row, place)


def test_tokens_agree_and_heads_are_sharp(model_name: str, engines: Any, references: Any) -> None:
    """Over thousands of tokens against float64: at most 0.1% excused; median top-1 above 0.5."""
    engine: OnnxRuntimeEngine = engines(model_name)
    outcomes: Counter[str] = Counter()
    confidences: list[NDArray[np.float32]] = []
    for seed in range(CASES):
        shape = random_shape(seed)
        canvas, block = shape.canvas(engine.config), shape.block_columns
        plain, reuse = step_pair(engine.session(), canvas, block, greedy(shape.rows, engine.config))
        confidences.append(reuse.confidence.ravel())
        for row in range(shape.rows):
            expected = expected_tokens(references(model_name), canvas, row, block[row])
            for outputs in (plain, reuse):
                for place in np.flatnonzero(outputs.token[row] != expected):
                    gap = tie_gap(references(model_name), canvas, row, int(block[row, place]))
                    assert gap < TIE
                    outcomes["excused"] += 1
                outcomes["tokens"] += len(expected)
    assert np.median(np.concatenate(confidences)) > 0.5
    assert outcomes["excused"] * 1000 <= outcomes["tokens"], outcomes


def expected_tokens(
    reference: ReferenceModel, canvas: Canvas, row: int, columns: Int
) -> NDArray[np.int64]:
    """The float64 reference's greedy tokens."""
    first, end = int(canvas.valid_from[row]), int(canvas.valid_to[row])
    logits = reference.row_logits(canvas.tokens[row, first:end].tolist())[columns - first]
    logits[:, reference.mask_id] = -np.inf
    return logits.argmax(-1)


@bounded(25)
@given(shape=shapes(max_rows=2))
def test_caches_are_layer_zero_in_float64(
    model_name: str, models: Any, engines: Any, shape: Shape
) -> None:
    engine: OnnxRuntimeEngine = engines(model_name)
    truth = LayerZero.load(models(model_name).checkpoint)
    canvas, block = shape.canvas(engine.config), shape.block_columns
    session = engine.session()
    session.fill(canvas, block)
    found = session.cache_arrays()
    for row in range(shape.rows):
        first, end = shape.valid_from[row], shape.valid_to[row]
        expected = truth.caches(canvas.tokens[row], canvas.positions[row], (first, end), block[row])
        valid = np.arange(first, end)
        for name, distance in cache_distances(found, expected, row, valid, block[row]).items():
            assert distance <= CACHE_ULPS[name], (name, distance)


def cache_distances(
    found: dict[str, NDArray[Any]],
    expected: dict[str, NDArray[np.float64]],
    row: int,
    valid: NDArray[np.int64],
    block: Int,
) -> dict[str, float]:
    """Ulps of every cache of a row: valid columns; the attention state for rows outside C."""
    outside = np.setdiff1d(valid, block)
    distances = {}
    for name, values in expected.items():
        columns = outside if name.startswith("fa_") else valid
        axis = 0 if name == "embed" else 1
        a, b = (part.take(columns, axis=axis) for part in (found[name][row], values))
        if not b.size:
            continue
        if not np.isfinite(b).all() or not b.any():  # the state of an empty U
            np.testing.assert_array_equal(a, b)
            continue
        distances[name] = ulps(a, b.astype(np.float32))
    return distances


@bounded(25)
@given(shape=shapes())
def test_reuse_is_bitwise_repeatable(model_name: str, engines: Any, shape: Shape) -> None:
    engine: OnnxRuntimeEngine = engines(model_name)
    canvas, block = shape.canvas(engine.config), shape.block_columns
    sampling = greedy(shape.rows, engine.config)
    tokens = block_tokens(canvas, block)
    first, second = engine.session(), engine.session()
    first.fill(canvas, block)
    one = first.reuse(tokens, sampling, block)
    other_tokens = np.full_like(tokens, 1)
    first.reuse(other_tokens, sampling, block)
    again = first.reuse(tokens, sampling, block)
    second.fill(canvas, block)
    apart = second.reuse(tokens, sampling, block)
    assert_bitwise(one, again)
    assert_bitwise(one, apart)


def assert_bitwise(one: StepOutputs, other: StepOutputs) -> None:
    """Every output equal bit for bit."""
    for name, value in vars(one).items():
        np.testing.assert_array_equal(value, getattr(other, name), err_msg=name, strict=True)


@bounded(15)
@given(shape=shapes())
def test_what_stood_in_the_block_at_fill_does_not_matter(
    model_name: str, engines: Any, shape: Shape
) -> None:
    """Filled from another content of the block, a step is the same bit for bit."""
    engine: OnnxRuntimeEngine = engines(model_name)
    canvas, block = shape.canvas(engine.config), shape.block_columns
    other = Canvas(canvas.tokens.copy(), canvas.positions, canvas.valid_from, canvas.valid_to)
    np.put_along_axis(other.tokens, block, 3, axis=1)
    sampling, tokens = greedy(shape.rows, engine.config), block_tokens(canvas, block)
    session = engine.session()
    session.fill(canvas, block)
    one = session.reuse(tokens, sampling, block)
    session.fill(other, block)
    assert_bitwise(one, session.reuse(tokens, sampling, block))


@bounded(15)
@given(shape=shapes())
def test_poisoned_block_columns_do_not_matter(model_name: str, engines: Any, shape: Shape) -> None:
    """The graph itself, with junk where the caches hold the block's columns and rows."""
    engine: OnnxRuntimeEngine = engines(model_name)
    canvas, block = shape.canvas(engine.config), shape.block_columns
    session = engine.session()
    session.fill(canvas, block)
    caches = session.cache_arrays()
    poisoned = {name: poison(name, values, block) for name, values in caches.items()}
    assert any(not np.array_equal(poisoned[name], caches[name]) for name in caches)
    inputs = {
        "block_tokens": block_tokens(canvas, block),
        "block_columns": block,
        "positions": canvas.positions,
        "valid_from": canvas.valid_from,
        "valid_to": canvas.valid_to,
        **vars(greedy(shape.rows, engine.config)),
        "logit_columns": block,
    }
    graph = engine.graph("reuse")
    clean = graph.run(None, {**inputs, **caches})
    for one, other in zip(clean, graph.run(None, {**inputs, **poisoned}), strict=True):
        np.testing.assert_array_equal(one, other)


def poison(name: str, values: NDArray[Any], block: Int) -> NDArray[Any]:
    """NaN at the block's columns; v gets a huge number, which a weight of zero removes."""
    axis = 1 if name == "embed" else 2
    shape = [len(block)] + [1] * (values.ndim - 1)
    shape[axis] = block.shape[1]
    poisoned = values.copy()
    np.put_along_axis(poisoned, block.reshape(shape), 1e30 if name == "v" else np.nan, axis)
    return poisoned


@bounded(20)
@given(shape=shapes())
def test_padding_content_does_not_matter(model_name: str, engines: Any, shape: Shape) -> None:
    """Tokens outside the valid range reach no output, in either graph."""
    engine: OnnxRuntimeEngine = engines(model_name)
    canvas, block = shape.canvas(engine.config), shape.block_columns
    columns = np.arange(shape.length)
    padding = (columns < canvas.valid_from[:, None]) | (columns >= canvas.valid_to[:, None])
    tokens = np.where(padding, 7, canvas.tokens).astype(np.int32)
    other = Canvas(tokens, canvas.positions, canvas.valid_from, canvas.valid_to)
    sampling = greedy(shape.rows, engine.config)
    for one, two in zip(
        step_pair(engine.session(), canvas, block, sampling),
        step_pair(engine.session(), other, block, sampling),
        strict=True,
    ):
        assert_bitwise(one, two)


@bounded(15)
@given(shape=shapes(max_rows=3))
def test_a_row_alone_agrees_with_its_batch(model_name: str, engines: Any, shape: Shape) -> None:
    """Rows at different blocks do not see each other; cut to its valid range a row is the same."""
    engine: OnnxRuntimeEngine = engines(model_name)
    canvas, block = shape.canvas(engine.config), shape.block_columns
    _, together = step_pair(engine.session(), canvas, block, greedy(shape.rows, engine.config))
    for row in range(shape.rows):
        first, end = shape.valid_from[row], shape.valid_to[row]
        width = np.array([end - first], np.int32)
        alone = Canvas(
            canvas.tokens[row : row + 1, first:end].copy(),
            np.arange(end - first, dtype=np.int32)[None],
            np.zeros(1, np.int32),
            width,
        )
        _, single = step_pair(
            engine.session(), alone, block[row : row + 1] - first, greedy(1, engine.config)
        )
        picked = StepOutputs(*(value[row : row + 1] for value in vars(together).values()))
        check_scores(picked, single)


def test_reuse_before_fill_is_refused(engines: Any) -> None:
    engine: OnnxRuntimeEngine = engines("llada")
    shape = Shape(8, 4, (2,), (0,), (8,), seed=0)
    tokens = block_tokens(shape.canvas(engine.config), shape.block_columns)
    session = engine.session()
    with pytest.raises(EngineError, match="before fill"):
        session.reuse(tokens, greedy(1, engine.config))
    session.fill(shape.canvas(engine.config), shape.block_columns)
    assert session.cache_bytes() == 8 * engine.config.cache_bytes_per_token(4)
    session.reuse(tokens, greedy(1, engine.config))
    session.close()
    session.close()
    assert session.cache_bytes() == 0
    with pytest.raises(EngineError, match="before fill"):
        session.reuse(tokens, greedy(1, engine.config))
