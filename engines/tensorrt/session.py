"""A session of the TensorRT engine: a lane while it is needed, and the pads to its bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lacache_trt.engines.base import Canvas, Int, Sampling, StepOutputs
from lacache_trt.engines.padding import (
    Arrays,
    Size,
    moved_right,
    require_rows,
    step_inputs,
    with_rows,
)
from lacache_trt.engines.tensorrt.call import Step
from lacache_trt.engines.tensorrt.kept import Runs, runs_of
from lacache_trt.engines.tensorrt.lane import (
    BLOCK_TOKENS,
    WINDOW_COLUMNS,
    WINDOW_TOKENS,
    Lane,
    window_step,
)
from lacache_trt.engines.windows import (
    WINDOW_FIX_OF_BUILD,
    WindowMemory,
    check_window,
    no_graphs,
    not_filled,
    padded_window,
    require_kept,
)
from lacache_trt.errors import InvalidRequestError

if TYPE_CHECKING:
    from lacache_trt.engines.tensorrt.engine import TensorRTEngine


class TensorRTSession:
    """Caches of one batch, in a lane of the engine."""

    def __init__(self, engine: TensorRTEngine) -> None:
        self._engine = engine
        self._lane: Lane | None = None
        self._pads = self._rows = 0
        self._windows = WindowMemory(self._window_width)
        self._filled = self._keeps = False

    def fill(self, canvas: Canvas, block_columns: Int) -> None:
        """Compute the caches for these blocks."""
        self._filled = self._keeps = False
        self._rows, columns = canvas.tokens.shape
        shape = self._engine.shape_for(self._rows, columns, block_columns.shape[1])
        if self._lane is None or self._lane.shape != shape:
            self.close()
            self._lane = self._engine.acquire(shape, (self._rows, columns))
        self._pads = shape.columns - columns
        geometry = moved_right(canvas, block_columns, self._pads)
        self._engine.run(self._lane, "fill", with_rows(geometry, shape.rows))
        self._filled = True

    def reuse(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """One step over the caches of the last `fill`."""
        lane = self._filled_lane("reuse")
        return self._step(lane, "reuse", {BLOCK_TOKENS: block_tokens}, sampling, logit_columns)

    def reuse_kv(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """`reuse` that also keeps K and V of all layers and columns."""
        self._require_plans()
        lane = self._filled_lane("reuse_kv")
        self._engine.reserve(lane, self._asked(lane))
        self._keeps = False
        inputs = {BLOCK_TOKENS: block_tokens}
        outputs = self._step(lane, "reuse_kv", inputs, sampling, logit_columns)
        self._keeps = True
        return outputs

    def window(
        self,
        window_tokens: Int,
        window_columns: Int,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """One step of the window's rows over the kept K and V."""
        self._require_plans()
        lane = self._filled_lane("window")
        require_kept(self._keeps)
        length = lane.shape.columns - self._pads
        if logit_columns is not None or window_tokens.shape != window_columns.shape:
            check_window(window_tokens, window_columns, block_columns, logit_columns, length)
        placed = self._windows.place(window_columns, block_columns, length, self._pads)
        width = placed[WINDOW_COLUMNS].shape[1]
        self._engine.reserve(lane, self._asked(lane), width)
        tokens, _ = padded_window(window_tokens, window_columns, width)
        inputs = {WINDOW_TOKENS: tokens, **placed}
        runs = runs_of(placed[WINDOW_COLUMNS])
        return self._step(lane, "window", inputs, sampling, logit_columns, runs)

    def plain(
        self,
        canvas: Canvas,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """Not there: a plan of the plain graph would hold the weights once more."""
        raise InvalidRequestError(
            f"the {self._engine.name} engine has no plain graph, so no cache='none'",
            expected="cache='exact'",
            fix="compare with an onnxruntime engine: lacache-trt verify ENGINES --bundle BUNDLE",
        )

    def cache_bytes(self) -> int:
        """Bytes that the caches hold now."""
        return self._lane.cache_bytes() if self._lane is not None else 0

    def cache_arrays(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the caches by name, pads and repeated rows included, for checks."""
        if self._lane is None:
            return {}
        return self._engine.read_caches(self._lane, self._keeps)

    def close(self) -> None:
        """Give the lane back."""
        if self._lane is not None:
            self._engine.release(self._lane)
        self._lane, self._filled, self._keeps = None, False, False

    def _filled_lane(self, call: str) -> Lane:
        if self._lane is None or not self._filled:
            raise not_filled(call)
        return self._lane

    def _asked(self, lane: Lane) -> Size:
        """Rows and columns of the fill, without repeated rows and pads."""
        return self._rows, lane.shape.columns - self._pads

    def _require_plans(self) -> None:
        """Raise `InvalidRequestError` if the engine was built without those of windows."""
        if "dual" not in self._engine.capabilities.caches:
            raise no_graphs(self._engine.name, fix=WINDOW_FIX_OF_BUILD)

    def _window_width(self, width: int, block: int) -> int:
        """What `WindowMemory` asks."""
        return self._engine.window_width(self._filled_lane("window").shape, width, block)

    def _step(
        self,
        lane: Lane,
        graph: str,
        inputs: Arrays,
        sampling: Sampling,
        logit_columns: Int | None,
        *runs: Runs,
    ) -> StepOutputs:
        rows = len(sampling.seed)
        require_rows(rows, self._rows)
        everything = step_inputs(inputs, sampling, logit_columns, self._pads)
        read = everything["logit_columns"].shape[1]
        step = window_step(everything) if graph == "window" else Step(read)
        self._engine.require_covered(lane.shape, step)
        self._engine.run(lane, graph, with_rows(everything, lane.shape.rows), *runs)
        return self._engine.collect(lane, step, rows)
