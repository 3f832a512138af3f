"""A session of the TensorRT engine: a lane while it is needed, and the pads to its bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lacache_trt.engines.base import Canvas, Int, Sampling, StepOutputs
from lacache_trt.engines.padding import moved_right, with_rows
from lacache_trt.engines.tensorrt.lane import BLOCK_TOKENS, Lane
from lacache_trt.errors import EngineError, InvalidRequestError

if TYPE_CHECKING:
    from lacache_trt.engines.tensorrt.engine import TensorRTEngine


class TensorRTSession:
    """Caches of one batch, in a lane of the engine."""

    def __init__(self, engine: TensorRTEngine) -> None:
        self._engine = engine
        self._lane: Lane | None = None
        self._pads = 0
        self._filled = False

    def fill(self, canvas: Canvas, block_columns: Int) -> None:
        """Compute the caches for these blocks."""
        self._filled = False
        rows, columns = canvas.tokens.shape
        shape = self._engine.shape_for(rows, columns, block_columns.shape[1])
        if self._lane is None or self._lane.shape != shape:
            self.close()
            self._lane = self._engine.acquire(shape)
        self._pads = shape.columns - columns
        geometry = moved_right(canvas, block_columns, self._pads)
        self._engine.run(self._lane, "fill", with_rows(geometry, shape.rows))
        self._filled = True

    def reuse(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """One step over the caches of the last `fill`."""
        if self._lane is None or not self._filled:
            raise EngineError("reuse was called before fill", fix="call fill at each block's start")
        rows = len(sampling.seed)
        columns = np.zeros((rows, 0), np.int32) if logit_columns is None else logit_columns
        self._engine.require_logit_columns(self._lane.shape, columns.shape[1])
        inputs = {
            BLOCK_TOKENS: block_tokens,
            **vars(sampling),
            "logit_columns": columns + np.int32(self._pads),
        }
        self._engine.run(self._lane, "reuse", with_rows(inputs, self._lane.shape.rows))
        return self._engine.collect(self._lane, columns.shape[1], rows)

    def reuse_kv(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """Not there yet: the plans are built, but no session runs them."""
        raise self._no_windows()

    def window(
        self,
        window_tokens: Int,
        window_columns: Int,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """Not there yet: the plans are built, but no session runs them."""
        raise self._no_windows()

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

    def _no_windows(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"the {self._engine.name} engine does not run approximate caches",
            got="cache='prefix' or 'dual'",
            expected="cache='exact'",
            fix="use the cuda or the onnxruntime engine for them",
        )

    def cache_bytes(self) -> int:
        """Bytes that the caches hold now."""
        return self._lane.cache_bytes() if self._lane is not None else 0

    def cache_arrays(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the caches by name, pads and repeated rows included, for checks."""
        return self._engine.read_caches(self._lane) if self._lane is not None else {}

    def close(self) -> None:
        """Give the lane back."""
        if self._lane is not None:
            self._engine.release(self._lane)
        self._lane, self._filled = None, False
