"""A session of the CUDA engine: a lane while it is needed, and the pads that reach its bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from lacache_trt.engines.base import Canvas, Int, Sampling, StepOutputs
from lacache_trt.engines.cuda.lane import Arrays, Lane, LaneShape, window_name
from lacache_trt.engines.padding import BUCKET as BUCKET
from lacache_trt.engines.padding import (
    moved_right,
    require_rows,
    row_bucket,
    step_inputs,
    with_rows,
)
from lacache_trt.engines.windows import (
    WindowMemory,
    check_window,
    not_filled,
    padded_window,
    require_kept,
)
from lacache_trt.errors import EngineError

if TYPE_CHECKING:
    from lacache_trt.engines.cuda.engine import CudaEngine


class CudaSession:
    """Caches of one batch, in a lane of the engine."""

    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        self._lane: Lane | None = None
        self._pads = {"reuse": 0, "plain": 0}
        self._rows = 0
        self._windows = WindowMemory()
        self._filled = self._keeps = False

    def fill(self, canvas: Canvas, block_columns: Int) -> None:
        """Compute the caches for these blocks."""
        lane = self._lane_for(canvas, block_columns)
        self._rows, columns = canvas.tokens.shape
        self._pads["reuse"] = pads = lane.shape.columns - columns
        self._filled = self._keeps = False
        inputs = moved_right(canvas, block_columns, pads)
        self._engine.run(lane, "fill", with_rows(inputs, lane.shape.rows))
        self._filled = True

    def reuse(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """One step over the caches of the last `fill`."""
        lane = self._filled_lane("reuse")
        return self._step(lane, "reuse", {"block_tokens": block_tokens}, sampling, logit_columns)

    def reuse_kv(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """`reuse` that also keeps K and V of all layers and columns."""
        lane = self._filled_lane("reuse_kv")
        self._engine.keep(lane, (self._rows, lane.shape.columns - self._pads["reuse"]))
        self._keeps = False
        inputs = {"block_tokens": block_tokens}
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
        lane, pads = self._filled_lane("window"), self._pads["reuse"]
        require_kept(self._keeps)
        length = lane.shape.columns - pads
        if logit_columns is not None or window_tokens.shape != window_columns.shape:
            check_window(window_tokens, window_columns, block_columns, logit_columns, length)
        placed = self._windows.place(window_columns, block_columns, length, pads)
        tokens, _ = padded_window(window_tokens, window_columns, placed["window_columns"].shape[1])
        inputs = {"window_tokens": tokens, **placed}
        return self._step(lane, "window", inputs, sampling, logit_columns)

    def plain(
        self,
        canvas: Canvas,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """One step without caches."""
        lane = self._lane_for(canvas, block_columns)
        self._pads["plain"] = pads = lane.shape.columns - canvas.tokens.shape[1]
        geometry = moved_right(canvas, block_columns, pads)
        return self._step(lane, "plain", geometry, sampling, logit_columns)

    def cache_bytes(self) -> int:
        """Bytes that the caches hold now."""
        return self._lane.cache_bytes() if self._lane is not None else 0

    def cache_arrays(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the caches by name, pads and repeated rows included, for checks."""
        caches = dict(self._lane.caches) if self._lane is not None else {}
        if self._keeps and self._lane is not None and self._lane.kept is not None:
            caches |= {"keys": self._lane.kept.keys, "values": self._lane.kept.values}
        torch.cuda.synchronize()
        return {name: cache.float().cpu().numpy().copy() for name, cache in caches.items()}

    def milliseconds(self, graph: str, replays: int) -> list[float]:
        """Device time of `replays` replays of a graph that this session has run.

        For benchmarks: nothing else may use the engine meanwhile.
        """
        if self._lane is None:
            raise EngineError("nothing has run in this session", fix="run the graph once before")
        return self._lane.milliseconds(graph, replays)

    def close(self) -> None:
        """Give the lane back."""
        if self._lane is not None:
            self._engine.release(self._lane)
        self._lane, self._filled, self._keeps = None, False, False

    def _filled_lane(self, call: str) -> Lane:
        if self._lane is None or not self._filled:
            raise not_filled(call)
        return self._lane

    def _lane_for(self, canvas: Canvas, block_columns: Int) -> Lane:
        rows, columns = canvas.tokens.shape
        bucket = -(-columns // BUCKET) * BUCKET
        shape = LaneShape(row_bucket(rows), bucket, block_columns.shape[1])
        if self._lane is None or self._lane.shape != shape:
            self.close()
            self._lane = self._engine.acquire(shape, (rows, columns))
        return self._lane

    def _step(
        self,
        lane: Lane,
        graph: str,
        inputs: Arrays,
        sampling: Sampling,
        logit_columns: Int | None,
    ) -> StepOutputs:
        rows = len(sampling.seed)
        require_rows(rows, len(inputs["tokens"]) if graph == "plain" else self._rows)
        pads = self._pads["plain" if graph == "plain" else "reuse"]
        everything = step_inputs(inputs, sampling, logit_columns, pads)
        self._engine.run(lane, graph, with_rows(everything, lane.shape.rows))
        if graph == "window":
            widths = (inputs[name].shape[1] for name in ("window_columns", "block_columns"))
            graph = window_name(*widths)
        return lane.collect(graph, everything["logit_columns"].shape[1], rows)
