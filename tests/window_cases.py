"""Random windows over the canvases of `canvases`, for every test of the approximate caches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from canvases import Shape
from hypothesis import strategies as st

from lacache_trt.engines.base import Canvas, Int


@dataclass(frozen=True)
class WindowShape:
    """A canvas and a window of it.

    Attributes:
        shape: the canvas and its blocks.
        before: columns of the window before each row's block.
        behind: columns behind it.
    """

    shape: Shape
    before: tuple[int, ...]
    behind: tuple[int, ...]

    @property
    def columns(self) -> Int:
        """int32 [B, W]: a run in each row, shorter runs with pads of -1 behind."""
        widths = [a + self.shape.width + b for a, b in zip(self.before, self.behind, strict=True)]
        columns = np.full((self.shape.rows, max(widths)), -1, np.int32)
        for row, (start, width) in enumerate(zip(self.starts, widths, strict=True)):
            columns[row, :width] = np.arange(start, start + width)
        return columns

    @property
    def starts(self) -> list[int]:
        """First column of each row's window."""
        return [start - b for start, b in zip(self.shape.starts, self.before, strict=True)]

    def tokens(self, canvas: Canvas) -> Int:
        """int32 [B, W]: what stands in the window, junk at its pads."""
        columns = self.columns
        picked = np.take_along_axis(canvas.tokens, np.maximum(columns, 0), axis=1)
        return np.where(columns < 0, 1, picked).astype(np.int32)


@st.composite
def windows(draw: st.DrawFn, max_rows: int = 3, max_side: int = 40) -> WindowShape:
    """The block alone, block and suffix, or any run around it; up to both ends of the canvas."""
    width = draw(st.integers(1, 32))
    length = width + draw(st.integers(0, 2 * max_side))
    starts, valid_from, valid_to, before, behind = [], [], [], [], []
    for _ in range(draw(st.integers(1, max_rows))):
        start = draw(st.integers(0, length - width))
        rest = length - width - start
        starts.append(start)
        valid_from.append(draw(st.integers(0, start)))
        valid_to.append(draw(st.integers(start + width, length)))
        before.append(draw(st.sampled_from([0, 0, start, start // 2])))
        behind.append(draw(st.sampled_from([0, rest, rest // 2])))
    seed = draw(st.integers(0, 2**31 - 1))
    shape = Shape(length, width, tuple(starts), tuple(valid_from), tuple(valid_to), seed)
    return WindowShape(shape, tuple(before), tuple(behind))
