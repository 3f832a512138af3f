"""Which columns of the canvas an engine sees: all, or fewer behind the rows' blocks.

A row keeps everything up to the end of its block, and behind it the columns that suffix dropout
keeps, as far as the row's answer still reaches. Rows that keep fewer columns than others are
padded with columns that nothing attends to: in front, or behind where `prefix` and `dual` need
every row's block at the same place.

    canvas      p p p | M M M M | M M M M | M M M M        block 0 is denoised, block 3 was cut
    laid out    p p p | M M M M | M     M |                true positions, fewer columns
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding.suffix import kept_distances
from lacache_trt.engines.base import Canvas, Int
from lacache_trt.generation import GenerationConfig


@dataclass(frozen=True)
class Layout:
    """The columns of a batch.

    Attributes:
        index: int32 [B, W]; canvas column of each column that the engine sees.
        offset: int32 [B]; what to add to a canvas column up to the block's end to find it there.
        length: int32 [B]; columns of each row, padding behind them not counted.
    """

    index: Int
    offset: Int
    length: Int

    def pick(self, canvas: Canvas) -> Canvas:
        """The canvas as the engine sees it."""
        width, full = self.index.shape[1], canvas.tokens.shape[1]
        if width == full and (self.length == full).all() and (self.offset == 0).all():
            return canvas
        return Canvas(
            np.take_along_axis(canvas.tokens, self.index, axis=1),
            np.take_along_axis(canvas.positions, self.index, axis=1),
            canvas.valid_from + self.offset,
            self.offset + self.length,
        )


def lay_out(
    blocks: Int, ends: Int, columns: int, config: GenerationConfig, *, block_aligned: bool
) -> Layout:
    """The layout of rows at these blocks, whose answers end after `ends` blocks: int32 [B] each.

    `columns` is the canvas's N; `block_aligned` pads rows behind instead of in front.
    """
    kept = [
        _kept(int(block), int(end), columns, config)
        for block, end in zip(blocks, ends, strict=True)
    ]
    return _aligned(kept, block_aligned)


def _kept(block: int, end: int, columns: int, config: GenerationConfig) -> NDArray[np.int64]:
    start = columns - config.gen_length
    block_end = start + (block + 1) * config.block_length
    behind = block_end + kept_distances(config, block)
    behind = behind[behind < start + end * config.block_length]
    return np.concatenate([np.arange(block_end), behind])


def _aligned(kept: Sequence[NDArray[np.int64]], block_aligned: bool) -> Layout:
    length = np.array([len(columns) for columns in kept], np.int32)
    width = int(length.max())
    offset = np.zeros_like(length) if block_aligned else (width - length).astype(np.int32)
    index = np.zeros((len(kept), width), np.int32)
    for row, columns in enumerate(kept):
        index[row, offset[row] : offset[row] + length[row]] = columns
    return Layout(index, offset, length)
