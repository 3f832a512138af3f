"""`reuse_kv` and `window` on ONNX Runtime against transformers' layers run by hand in float64.

Bounds: logits and kept K, V within `BOUND` of the largest value; a token may differ only where the
float64 reference's two best logits are closer than `TIE`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from canvases import Shape, block_tokens, bounded, greedy, relative_error
from hypothesis import given
from numpy.typing import NDArray
from synthetic import make_llada
from test_exact import assert_bitwise
from window_cases import WindowShape, windows
from window_reference import KeyValueReference

from lacache_trt.artifacts import load_manifest
from lacache_trt.contract import BASE_GRAPHS, KEY_VALUE_GRAPHS
from lacache_trt.engines.base import Canvas, Int, StepOutputs
from lacache_trt.engines.builder import build_engine, load_engine
from lacache_trt.engines.onnxruntime.engine import OnnxRuntimeEngine, OnnxRuntimeSession
from lacache_trt.engines.options import BuildOptions
from lacache_trt.errors import EngineError, InvalidRequestError
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions
from lacache_trt.generation import GenerationConfig
from lacache_trt.runtime import Runtime

BOUND = 2e-5
TIE = 1e-4
CASE = WindowShape(Shape(40, 6, (12, 20), (0, 5), (40, 38), 7), (2, 0), (5, 12))
MODELS = ("llada", "llada-one", "dream")


def kept_of(session: OnnxRuntimeSession) -> dict[str, NDArray[np.float32]]:
    """The kept K and V."""
    return {name: session.cache_arrays()[name] for name in ("keys", "values")}


def check_row(
    outputs: StepOutputs,
    kept: dict[str, NDArray[np.float32]],
    truth: KeyValueReference,
    expected: NDArray[np.float64],
    row: int,
    first: int,
    mask_id: int,
) -> None:
    """One row's logits, tokens and K, V against the reference's."""
    assert relative_error(outputs.logits[row], expected) <= BOUND
    allowed = expected.copy()
    allowed[:, mask_id] = -np.inf
    best = np.sort(allowed, axis=-1)[:, -2:]
    differs = outputs.token[row] != allowed.argmax(-1)
    assert (best[:, 1] - best[:, 0])[differs].max(initial=0.0) < TIE
    length = truth.keys.shape[2]
    for name, values in (("keys", truth.keys), ("values", truth.values)):
        found = kept[name][:, row, :, first : first + length]
        assert relative_error(found, values.numpy()) <= BOUND, name


@pytest.mark.parametrize("name", MODELS)
@bounded(12)
@given(case=windows(max_rows=2, max_side=24))
def test_steps_against_layers_run_by_hand(
    engines: Any, references: Any, name: str, case: WindowShape
) -> None:
    """A full step, then two window steps with tokens committed in between, on one session."""
    engine: OnnxRuntimeEngine = engines(name)
    # Only columns of the valid range belong to the reference's row.
    case = clipped(case)
    shape, sampling = case.shape, greedy(case.shape.rows, engine.config)
    canvas, block = shape.canvas(engine.config), shape.block_columns
    session = engine.session()
    session.fill(canvas, block)
    outputs = session.reuse_kv(block_tokens(canvas, block), sampling, block)
    truths = []
    for row in range(shape.rows):
        first, end = shape.valid_from[row], shape.valid_to[row]
        truth = KeyValueReference(references(name), end - first)
        rows = truth.run(canvas.tokens[row, first:end], np.arange(end - first))
        expected = truth.predictions(rows, block[row] - first)
        check_row(outputs, kept_of(session), truth, expected, row, first, engine.config.mask_id)
        truths.append(truth)
    rng = np.random.default_rng(shape.seed)
    for _ in range(2):
        commit(canvas, block, rng, engine.config.mask_id)
        outputs = session.window(case.tokens(canvas), case.columns, block, sampling, block)
        for row, truth in enumerate(truths):
            first = shape.valid_from[row]
            columns = case.columns[row][case.columns[row] >= 0]
            rows = truth.run(canvas.tokens[row, columns], columns - first)
            expected = truth.predictions(rows, block[row] - first)
            kept = kept_of(session)
            check_row(outputs, kept, truth, expected, row, first, engine.config.mask_id)


def clipped(case: WindowShape) -> WindowShape:
    """The window cut to the valid range of each row."""
    shape = case.shape
    before = [
        min(count, start - first)
        for count, start, first in zip(case.before, shape.starts, shape.valid_from, strict=True)
    ]
    behind = [
        min(count, end - start - shape.width)
        for count, start, end in zip(case.behind, shape.starts, shape.valid_to, strict=True)
    ]
    return WindowShape(shape, tuple(before), tuple(behind))


def commit(canvas: Canvas, block: Int, rng: np.random.Generator, mask_id: int) -> None:
    """Another token at one place of each row's block."""
    for row, columns in enumerate(block):
        canvas.tokens[row, rng.choice(columns)] = rng.integers(0, mask_id)


@bounded(15)
@given(case=windows())
def test_reuse_kv_is_reuse_and_an_unchanged_window_predicts_the_same(
    model_name: str, engines: Any, case: WindowShape
) -> None:
    engine: OnnxRuntimeEngine = engines(model_name)
    shape, sampling = case.shape, greedy(case.shape.rows, engine.config)
    canvas, block = shape.canvas(engine.config), shape.block_columns
    tokens, session = block_tokens(canvas, block), engine.session()
    session.fill(canvas, block)
    step = session.reuse(tokens, sampling, block)
    assert_bitwise(step, session.reuse_kv(tokens, sampling, block))
    before = kept_of(session)
    found = session.window(case.tokens(canvas), case.columns, block, sampling, block)
    if not engine.config.logit_shift:
        assert relative_error(found.logits, step.logits) <= BOUND
    for name, values in kept_of(session).items():
        for row, columns in enumerate(case.columns):
            outside = np.setdiff1d(np.arange(shape.length), columns)
            np.testing.assert_array_equal(
                values[:, row, :, outside], before[name][:, row, :, outside]
            )
        valid = np.arange(shape.length)
        for row in range(shape.rows):
            real = valid[shape.valid_from[row] : shape.valid_to[row]]
            error = relative_error(values[:, row][:, :, real], before[name][:, row][:, :, real])
            assert error <= BOUND
    assert_bitwise(found, session.window(case.tokens(canvas), case.columns, block, sampling, block))


def test_rows_do_not_see_each_other_nor_pads(engines: Any) -> None:
    """A row alone, and with other junk at its pads, predicts the same."""
    engine: OnnxRuntimeEngine = engines("llada")
    canvas, block = CASE.shape.canvas(engine.config), CASE.shape.block_columns
    together = stepped(engine, canvas, block, CASE.tokens(canvas), CASE.columns)
    tokens = np.where(CASE.columns < 0, 55, CASE.tokens(canvas)).astype(np.int32)
    assert (CASE.columns < 0).any()
    assert_bitwise(together, stepped(engine, canvas, block, tokens, CASE.columns))
    for row in range(2):
        one = slice(row, row + 1)
        alone = Canvas(*(array[one] for array in vars(canvas).values()))
        columns = CASE.columns[one][:, CASE.columns[row] >= 0]
        single = stepped(
            engine, alone, block[one], np.take_along_axis(alone.tokens, columns, 1), columns
        )
        np.testing.assert_array_equal(single.token[0], together.token[row])
        assert relative_error(single.logits[0], together.logits[row]) <= BOUND


def stepped(
    engine: OnnxRuntimeEngine, canvas: Canvas, block: Int, tokens: Int, columns: Int
) -> StepOutputs:
    """fill, reuse_kv, window."""
    session, sampling = engine.session(), greedy(len(block), engine.config)
    session.fill(canvas, block)
    session.reuse_kv(block_tokens(canvas, block), sampling)
    outputs = session.window(tokens, columns, block, sampling, block)
    session.close()
    return outputs


def test_misuse_is_refused(engines: Any) -> None:
    engine: OnnxRuntimeEngine = engines("llada")
    canvas, block = CASE.shape.canvas(engine.config), CASE.shape.block_columns
    sampling, session = greedy(2, engine.config), engine.session()
    columns, tokens = CASE.columns, CASE.tokens(canvas)
    with pytest.raises(EngineError, match="reuse_kv was called before fill"):
        session.reuse_kv(block_tokens(canvas, block), sampling)
    session.fill(canvas, block)
    with pytest.raises(EngineError, match="before reuse_kv"):
        session.window(tokens, columns, block, sampling)
    session.reuse_kv(block_tokens(canvas, block), sampling)
    session.window(tokens, columns, block, sampling)
    holed = columns.copy()
    holed[0, 1] += 1
    with pytest.raises(InvalidRequestError, match="row 0 are not a run"):
        session.window(tokens, holed, block, sampling)
    with pytest.raises(InvalidRequestError, match="row 1 are not a run"):
        session.window(tokens, np.where(columns < 0, columns, columns + 12), block, sampling)
    with pytest.raises(InvalidRequestError, match="block_columns of row 1"):
        session.window(tokens, columns, block + np.array([[0], [20]], np.int32), sampling)
    with pytest.raises(InvalidRequestError, match="logit_columns of row 0"):
        session.window(tokens, columns, block, sampling, block - 3)
    with pytest.raises(InvalidRequestError, match="differ"):
        session.window(tokens[:, :-1], columns, block, sampling)
    assert session.cache_bytes() > 0
    session.fill(canvas, block)
    with pytest.raises(EngineError, match="before reuse_kv"):
        session.window(tokens, columns, block, sampling)
    session.close()
    assert session.cache_bytes() == 0


def test_an_engine_without_the_graphs(tmp_path: Path) -> None:
    """`--cache exact`: neither graphs nor capability, and the error says how to get them."""
    checkpoint = make_llada(tmp_path / "checkpoint", layers=1)
    export_bundle(
        str(checkpoint), tmp_path / "bundle", ExportOptions(cache="exact", validate="off")
    )
    build_engine(tmp_path / "bundle", tmp_path / "engine", BuildOptions(engine="onnxruntime"))
    manifest = load_manifest(tmp_path / "engine", "engine")
    assert set(manifest.contract) == set(BASE_GRAPHS)
    assert not {f"{name}.onnx" for name in KEY_VALUE_GRAPHS} & set(manifest.files)
    with load_engine(manifest) as engine:
        assert engine.capabilities.caches == {"none", "exact"}
        canvas, block = CASE.shape.canvas(engine.config), CASE.shape.block_columns
        session = engine.session()
        session.fill(canvas, block)
        with pytest.raises(InvalidRequestError, match="--cache exact,kv"):
            session.reuse_kv(block_tokens(canvas, block), greedy(2, engine.config))
        session.close()
        with pytest.raises(InvalidRequestError, match="built without the graphs") as caught:
            Runtime(engine).generate([1], GenerationConfig(cache="dual"))
        assert "lacache-trt export ... --cache exact,kv" in str(caught.value.fix)
        assert "lacache-trt build" not in str(caught.value.fix)
    with pytest.raises(InvalidRequestError, match="unknown kinds of caches"):
        ExportOptions(cache="kv")  # type: ignore[arg-type]
