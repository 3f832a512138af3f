"""AttentionWindow's kernels and the CUDA engine's window steps under Triton's interpreter.

Run by `test_window_kernels.py` in a process of its own. The truth of the kernels is a literal
float64 attention over a cache whose window columns were replaced by the fresh ones; that of the
engine is a session that is filled anew.
"""

from __future__ import annotations

from dataclasses import replace

import kernel_references as reference
import numpy as np
import pytest
import simulated_cuda  # noqa: F401
import torch
from canvases import Shape, block_tokens, greedy, relative_error
from hypothesis import given, settings
from interpreted_engine import DREAM, LLADA, ONE_LAYER, truth, weights_of
from torch import Tensor
from window_cases import WindowShape, windows

from lacache_trt.engines.base import StepOutputs
from lacache_trt.engines.cuda.engine import CudaEngine
from lacache_trt.engines.cuda.gemm import GemmTable
from lacache_trt.engines.windows import window_bucket
from lacache_trt.errors import CapacityError, EngineError, InvalidRequestError
from lacache_trt.model.config import ModelConfig
from lacache_trt.plugins.attention_window import kernel
from lacache_trt.plugins.triton_support import Tiles
from lacache_trt.plugins.window_write import kernel as write

SMALL = Tiles(16, 16, 1, 1)
TOLERANCE = 1e-5
FIXED = {
    "block_only": WindowShape(Shape(40, 8, (16,), (0,), (40,), 1), (0,), (0,)),
    "block_and_suffix": WindowShape(Shape(61, 5, (20, 33), (0, 9), (61, 60), 2), (0, 0), (36, 23)),
    "first_columns": WindowShape(Shape(33, 6, (0, 0), (0, 0), (33, 20), 3), (0, 0), (3, 0)),
    "last_columns": WindowShape(Shape(35, 4, (31, 31), (0, 30), (35, 35), 4), (1, 0), (0, 0)),
    "everything": WindowShape(Shape(29, 5, (12,), (3,), (28,), 5), (12,), (12,)),
    "block_of_one": WindowShape(Shape(21, 1, (20, 4), (0, 4), (21, 5), 6), (0, 0), (0, 0)),
}


def operands(case: WindowShape, heads: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Random inputs of the op, with junk in the cache at the window's columns."""
    generator = torch.Generator().manual_seed(case.shape.seed % 2**31)
    columns = torch.from_numpy(case.columns)
    rows, width = columns.shape

    def normal(count: int, length: int, scale: float = 1.0) -> Tensor:
        values = torch.randn((rows, count, length, 64), generator=generator)
        return (values * scale).to(dtype)

    queries, keys = heads
    k, v = normal(keys, case.shape.length), normal(keys, case.shape.length)
    for row in range(rows):
        stale = columns[row][columns[row] >= 0].long()
        k[row, :, stale] = torch.nan
        v[row, :, stale] = torch.nan
    return {
        "q_w": normal(queries, width, 2.0),
        "k_w": normal(keys, width),
        "v_w": normal(keys, width),
        "k": k,
        "v": v,
        "window_columns": columns,
        "valid_from": torch.tensor(case.shape.valid_from, dtype=torch.int32),
        "valid_to": torch.tensor(case.shape.valid_to, dtype=torch.int32),
    }


def fresh_cache(inputs: dict[str, Tensor], name: str) -> Tensor:
    """The cache with the window's own rows at their columns."""
    whole = inputs[name].clone()
    for row, columns in enumerate(inputs["window_columns"]):
        real = columns >= 0
        whole[row, :, columns[real].long()] = inputs[f"{name}_w"][row][:, real]
    return whole


def run_kernel(inputs: dict[str, Tensor], *, split: bool, queries: slice) -> tuple[Tensor, Tensor]:
    """The kernel's output, and that of the float64 reference."""
    q = inputs["q_w"][:, :, queries].contiguous()
    batch, heads, count, head_dim = q.shape
    kv_heads, length = inputs["k"].shape[1:3]
    chunks = kernel.chunks_for(count, length, heads, kv_heads, SMALL.rows)
    size = batch * heads * count * max(chunks, 64) * (head_dim + 2)
    out = torch.full((batch, count, heads * head_dim), torch.nan, dtype=q.dtype)
    workspace = torch.full((size,), torch.nan) if split else None
    kernel.launch(q, *list(inputs.values())[1:], workspace, out, tiles=SMALL)
    ranges = inputs["valid_from"], inputs["valid_to"]
    want = reference.attention(q, fresh_cache(inputs, "k"), fresh_cache(inputs, "v"), *ranges)
    return out, want


def check(out: Tensor, want: Tensor, inputs: dict[str, Tensor]) -> None:
    largest = float(inputs["v_w"].double().abs().max().clamp(min=4.5))
    bound = (1.5 * torch.finfo(out.dtype).eps + 2e-5) * largest
    error = (out.double() - want).abs().max()
    assert error <= bound, (error, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("split", [False, True], ids=["tiled", "split"])
@pytest.mark.parametrize("name", FIXED)
def test_kernels(name: str, split: bool, dtype: torch.dtype) -> None:
    """NaN in the cache at the window's columns: they are never read."""
    inputs = operands(FIXED[name], (4, 2), dtype)
    check(*run_kernel(inputs, split=split, queries=slice(None)), inputs)


@settings(max_examples=14, deadline=None, derandomize=True)
@given(case=windows(max_rows=2, max_side=20))
def test_random_windows(case: WindowShape) -> None:
    inputs = operands(case, (2, 1) if case.shape.seed % 2 else (3, 3), torch.float32)
    for split in (False, True):
        check(*run_kernel(inputs, split=split, queries=slice(0, 3)), inputs)


def test_the_keys_are_split() -> None:
    """Several chunks, windows inside one, across two and over all; the last layer's few rows."""
    shape = Shape(700, 4, (100, 254, 300), (0, 70, 0), (700, 699, 641), 7)
    case = WindowShape(shape, (0, 0, 300), (0, 0, 300))
    inputs = operands(case, (1, 1), torch.float32)
    assert kernel.chunks_for(4, 700, 1, 1, SMALL.rows) == 6
    check(*run_kernel(inputs, split=True, queries=slice(0, 4)), inputs)


def test_pads_do_not_matter() -> None:
    """What stands in the pads' rows changes no other row, bit for bit."""
    case = FIXED["block_and_suffix"]
    inputs = operands(case, (4, 2), torch.float32)
    pads = case.columns < 0
    assert pads.any()
    before, _ = run_kernel(inputs, split=False, queries=slice(None))
    for row in range(case.shape.rows):
        for name in ("k_w", "v_w", "q_w"):
            inputs[name][row][:, pads[row]] = 77.0
    after, _ = run_kernel(inputs, split=False, queries=slice(None))
    real = torch.from_numpy(~pads)
    assert torch.equal(before[real], after[real])


@settings(max_examples=8, deadline=None, derandomize=True)
@given(case=windows(max_rows=3, max_side=12))
def test_window_write(case: WindowShape) -> None:
    columns = torch.from_numpy(case.columns)
    rows, width = columns.shape
    fresh = [torch.randn(2, rows, 3, width, 64) for _ in range(2)]
    kept = [torch.randn(2, rows, 3, case.shape.length, 64) for _ in range(2)]
    want = [values.clone() for values in kept]
    for values, new in zip(want, fresh, strict=True):
        for row in range(rows):
            for slot, column in enumerate(columns[row].tolist()):
                if column >= 0:
                    values[:, row, :, column] = new[:, row, :, slot]
    write.launch(*fresh, columns, *kept)
    assert all(torch.equal(a, b) for a, b in zip(kept, want, strict=True))


def check_step(found: StepOutputs, expected: StepOutputs) -> None:
    np.testing.assert_array_equal(found.token, expected.token)
    for name in ("confidence", "margin", "neg_entropy"):
        assert relative_error(getattr(found, name), getattr(expected, name)) < 20 * TOLERANCE, name
    assert relative_error(found.logits, expected.logits) < TOLERANCE


STEPS = WindowShape(Shape(23, 4, (14, 12), (0, 3), (23, 22), 1), (2, 1), (4, 3))
ONE_ROW = WindowShape(Shape(23, 4, (14,), (3,), (23,), 1), (2,), (5,))
ONLY_BLOCK = WindowShape(STEPS.shape, (0, 0), (0, 0))


@pytest.mark.parametrize("config", [LLADA, DREAM, ONE_LAYER], ids=["llada", "dream", "one"])
def test_engine_steps(config: ModelConfig) -> None:
    """`reuse_kv` is `reuse`; a window of unchanged tokens predicts the same; its K, V are kept."""
    weights, sampling = weights_of(config), greedy(1, config)
    canvas, block = ONE_ROW.shape.canvas(config), ONE_ROW.shape.block_columns
    tokens = block_tokens(canvas, block)
    with CudaEngine(config, weights, GemmTable({})) as engine:
        session, exact = engine.session(), truth(config, weights)
        session.fill(canvas, block)
        exact.fill(canvas, block)
        plain = session.reuse(tokens, sampling, block)
        keeping = session.reuse_kv(tokens, sampling, block)
        for name, value in vars(plain).items():
            np.testing.assert_array_equal(value, getattr(keeping, name), err_msg=name)
        check_step(keeping, exact.reuse(tokens, sampling, block))
        before = session.cache_arrays()
        # The window starts two columns before the block, so a shift stays inside.
        window = (ONE_ROW.tokens(canvas), ONE_ROW.columns, block, sampling, block)
        found = session.window(*window)
        check_step(found, plain)
        again = session.window(*window)  # a replay of the captured graph gives the same bits
        for name, value in vars(found).items():
            np.testing.assert_array_equal(value, getattr(again, name), err_msg=name)
        check_kept(before, session.cache_arrays(), ONE_ROW, config)
        session.close()


def check_kept(
    before: dict[str, np.ndarray],
    after: dict[str, np.ndarray],
    case: WindowShape,
    config: ModelConfig,
) -> None:
    """Columns outside the window are untouched; those inside differ by rounding alone."""
    pads = before["keys"].shape[3] - case.shape.length
    for name in ("keys", "values"):
        assert before[name].shape[0] == config.num_layers
        for row, columns in enumerate(case.columns):
            inside = columns[columns >= 0] + pads
            outside = np.setdiff1d(np.arange(before[name].shape[3]), inside)
            old, new = before[name][:, row], after[name][:, row]
            np.testing.assert_array_equal(old[:, :, outside], new[:, :, outside])
            assert relative_error(new[:, :, inside], old[:, :, inside]) < TOLERANCE


def test_a_changed_token_reaches_only_the_window() -> None:
    """After another token in the block, the next step sees its K and V."""
    config, sampling = LLADA, greedy(2, LLADA)
    canvas, block = STEPS.shape.canvas(config), STEPS.shape.block_columns
    with CudaEngine(config, weights_of(config), GemmTable({})) as engine:
        session = engine.session()
        session.fill(canvas, block)
        session.reuse_kv(block_tokens(canvas, block), sampling)
        first = session.cache_arrays()
        changed = ONLY_BLOCK.tokens(canvas)
        changed[:, 2] = 7
        session.window(changed, ONLY_BLOCK.columns, block, sampling)
        second = session.cache_arrays()
        pads = first["keys"].shape[3] - STEPS.shape.length
        for row in range(2):
            differ = (first["keys"][:, row] != second["keys"][:, row]).any(axis=(1, 3))
            in_first_layer = np.flatnonzero(differ[0]) - pads
            assert in_first_layer.tolist() == [block[row, 2]]
            assert set(np.flatnonzero(differ[1]) - pads) <= set(block[row].tolist())
        session.close()


def test_one_graph_per_bucket() -> None:
    """Windows that shrink with each block share buckets; the block alone has its own."""
    widths = [window_bucket(width, 32) for width in (256, 224, 192, 160, 64, 33, 32)]
    assert widths == [256, 256, 192, 192, 64, 64, 32]
    config, sampling = replace(LLADA, num_layers=1), greedy(1, LLADA)
    with CudaEngine(config, weights_of(config), GemmTable({})) as engine:
        session = engine.session()
        captured = []
        for start in (4, 9, 14):
            case = WindowShape(Shape(29, 5, (start,), (0,), (29,), start), (0,), (24 - start,))
            canvas, block = case.shape.canvas(config), case.shape.block_columns
            session.fill(canvas, block)
            session.reuse_kv(block_tokens(canvas, block), sampling)
            session.window(case.tokens(canvas), case.columns, block, sampling)
            lane = session._lane
            assert lane is not None
            captured.append(set(lane._graphs))
        assert captured[0] == captured[1] == captured[2]
        session.close()


def test_errors() -> None:
    """Each misuse says what was expected; a new fill drops what was kept."""
    config, sampling = ONE_LAYER, greedy(2, ONE_LAYER)
    canvas, block = STEPS.shape.canvas(config), STEPS.shape.block_columns
    window = (ONLY_BLOCK.tokens(canvas), ONLY_BLOCK.columns, block, sampling)
    with CudaEngine(config, weights_of(config), GemmTable({})) as engine:
        session = engine.session()
        with pytest.raises(EngineError, match="before fill"):
            session.reuse_kv(block_tokens(canvas, block), sampling)
        session.fill(canvas, block)
        with pytest.raises(EngineError, match="before reuse_kv"):
            session.window(*window)
        session.reuse_kv(block_tokens(canvas, block), sampling)
        session.window(*window)
        with pytest.raises(InvalidRequestError, match="outside the window"):
            session.window(*window, logit_columns=block + 1)
        session.fill(canvas, block)
        with pytest.raises(EngineError, match="before reuse_kv"):
            session.window(*window)
        session.close()


def test_kept_memory_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ONE_LAYER
    canvas, block = STEPS.shape.canvas(config), STEPS.shape.block_columns
    with CudaEngine(config, weights_of(config), GemmTable({})) as engine:
        session = engine.session()
        session.fill(canvas, block)
        before = session.cache_bytes()
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**28 + 1000, 2**34))
        with pytest.raises(CapacityError, match=r"2 rows and 23 columns \(run as 64\) does not"):
            session.reuse_kv(block_tokens(canvas, block), greedy(2, config))
        monkeypatch.undo()
        session.reuse_kv(block_tokens(canvas, block), greedy(2, config))
        assert session.cache_bytes() - before == 2 * 64 * 2 * config.num_kv_heads * 64 * 4
        session.close()


def test_a_step_that_fails_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V are written in place, so those of the step before it are gone as well."""
    canvas, block = STEPS.shape.canvas(ONE_LAYER), STEPS.shape.block_columns
    sampling, tokens = greedy(2, ONE_LAYER), block_tokens(canvas, block)
    with CudaEngine(ONE_LAYER, weights_of(ONE_LAYER), GemmTable({})) as engine:
        session = engine.session()
        session.fill(canvas, block)
        session.reuse_kv(tokens, sampling)

        def failing(*_: object) -> None:
            raise EngineError("the device failed")

        monkeypatch.setattr(engine, "run", failing)
        with pytest.raises(EngineError, match="device failed"):
            session.reuse_kv(tokens, sampling)
        monkeypatch.undo()
        with pytest.raises(EngineError, match="before reuse_kv"):
            session.window(ONLY_BLOCK.tokens(canvas), ONLY_BLOCK.columns, block, sampling)
        session.close()


@pytest.mark.parametrize("suffix", [0, 5], ids=["block", "block_and_suffix"])
def test_a_window_of_a_part_of_what_was_filled(suffix: int) -> None:
    """The step that begins a block may predict a whole answer (`eos_truncation`)."""
    config, sampling = replace(LLADA, num_layers=1), greedy(1, LLADA)
    case = WindowShape(Shape(29, 5, (14,), (0,), (29,), 3), (0,), (suffix,))
    canvas, block = case.shape.canvas(config), case.shape.block_columns
    answer = np.arange(14, 24, dtype=np.int32)[None]
    with CudaEngine(config, weights_of(config), GemmTable({})) as engine:
        session, found = engine.session(), []
        for columns in (block, answer):
            session.fill(canvas, columns)
            session.reuse_kv(block_tokens(canvas, columns), sampling)
            found.append(session.window(case.tokens(canvas), case.columns, block, sampling))
        session.close()
    assert found[1].token.shape == (1, 5)
    np.testing.assert_array_equal(found[0].token, found[1].token)
    assert relative_error(found[1].confidence, found[0].confidence) < TOLERANCE
