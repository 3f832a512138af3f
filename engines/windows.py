"""What a session checks before a step, of a window above all, and the pads to a window's bucket."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lacache_trt.engines.base import Int
from lacache_trt.engines.padding import BUCKET
from lacache_trt.errors import EngineError, InvalidRequestError

PAD = -1


def not_filled(call: str) -> EngineError:
    """The error of a step without the caches of a fill."""
    return EngineError(f"{call} was called before fill", fix="call fill at each block's start")


def require_kept(kept: bool) -> None:
    """Raise `EngineError` unless the session keeps K and V of its last fill."""
    if not kept:
        raise EngineError(
            "window was called before reuse_kv",
            fix="call fill and reuse_kv at each block's start",
        )


WINDOW_FIX = "run `lacache-trt export ... --cache exact,kv` and build again"
WINDOW_FIX_OF_BUILD = (
    "run `lacache-trt export ... --cache exact,kv` and `lacache-trt build ... --cache exact,kv`"
)


def no_graphs(engine: str, fix: str = WINDOW_FIX) -> InvalidRequestError:
    """The error of an engine that was built without the graphs of the approximate caches."""
    return InvalidRequestError(
        f"the {engine} engine has no graphs for approximate caches",
        got="cache='prefix' or 'dual'",
        expected="cache='exact'",
        fix=fix,
    )


def check_window(
    tokens: Int, columns: Int, block_columns: Int, logit_columns: Int | None, length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First column and number of columns of each row's window, [B] each, in a canvas of `length`.

    Raises:
        InvalidRequestError: the window is not a run of columns with its pads behind, reaches
            beyond the canvas, or does not hold the block or a logit column.
    """
    if columns.ndim != 2 or tokens.shape != columns.shape:
        raise InvalidRequestError(
            "window_tokens and window_columns differ", got=tokens.shape, expected=columns.shape
        )
    start, counts = columns[:, 0].astype(np.int64), (columns != PAD).sum(axis=1)
    slots = np.arange(columns.shape[1])
    run = np.where(slots < counts[:, None], start[:, None] + slots, PAD)
    stop = start + counts
    if (columns != run).any() or (start < 0).any() or (stop > length).any():
        row = int(np.argmax((columns != run).any(axis=1) | (start < 0) | (stop > length)))
        raise InvalidRequestError(
            f"window_columns of row {row} are not a run of columns of the canvas",
            got=columns[row].tolist(),
            expected=f"consecutive columns below {length}, then pads of {PAD}",
        )
    _check_inside("block_columns", block_columns, start, stop)
    if logit_columns is not None:
        _check_inside("logit_columns", logit_columns, start, stop)
    return start, counts


def _check_inside(
    name: str, columns: Int, start: NDArray[np.int64], stop: NDArray[np.int64]
) -> None:
    inside = (columns >= start[:, None]) & (columns < stop[:, None])
    if not inside.all():
        row = int(np.argmin(inside.all(axis=1)))
        raise InvalidRequestError(
            f"{name} of row {row} lie outside the window, whose rows alone are run",
            got=columns[row].tolist(),
            expected=f"columns from {start[row]} to {stop[row] - 1}",
        )


def window_bucket(width: int, block: int) -> int:
    """The width that a captured graph has for this window: the block's own, or a multiple of 64."""
    return width if width == block else -(-width // BUCKET) * BUCKET


def padded_window(tokens: Int, columns: Int, width: int) -> tuple[Int, Int]:
    """Tokens and columns with pads behind, `width` of them in each row."""
    if columns.shape[1] == width:
        return tokens, columns
    wide_tokens = np.zeros((len(tokens), width), np.int32)
    wide_columns = np.full((len(columns), width), PAD, np.int32)
    wide_tokens[:, : tokens.shape[1]] = tokens
    wide_columns[:, : columns.shape[1]] = columns
    return wide_tokens, wide_columns


class WindowMemory:
    """The geometry of the last window, moved right by a lane's pads.

    The steps of a block repeat their window, so it is checked and moved once; another one, told
    by its values, replaces it. `bucket` gives the width for a width and a block, `window_bucket`'s
    unless an engine has limits of its own.
    """

    def __init__(self, bucket: Callable[[int, int], int] | None = None) -> None:
        self._bucket = bucket or window_bucket
        self._given: tuple[Int, Int] | None = None
        self._length = self._pads = -1
        self._placed: dict[str, Int] = {}

    def place(self, columns: Int, block_columns: Int, length: int, pads: int) -> dict[str, Int]:
        """The inputs `window_columns` and `block_columns` of a graph with `pads` in front.

        Raises:
            InvalidRequestError: see `check_window`.
        """
        if not self._knows(columns, block_columns, length, pads):
            check_window(columns, columns, block_columns, None, length)
            width = self._bucket(columns.shape[1], block_columns.shape[1])
            _, wide = padded_window(columns, columns, width)
            moved = np.int32(pads)
            self._placed = {
                "window_columns": np.where(wide < 0, wide, wide + moved),
                "block_columns": block_columns + moved,
            }
            self._given, self._length, self._pads = (
                (columns.copy(), block_columns.copy()),
                length,
                pads,
            )
        return self._placed

    def _knows(self, columns: Int, block_columns: Int, length: int, pads: int) -> bool:
        if self._given is None or (self._length, self._pads) != (length, pads):
            return False
        pairs = zip(self._given, (columns, block_columns), strict=True)
        return all(a.shape == b.shape and (a == b).all() for a, b in pairs)
