"""How sessions with static buffers fit a batch into them: left pads, more rows, padded id lists.

Buffers and captured graphs belong to one shape, so canvases are moved right until their length is a
bucket; the valid range keeps the pads out of every result. The last row of a batch is repeated
until the number of rows is one of a few, since a batch shrinks as its rows finish.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lacache_trt.engines.base import Canvas, Int, Sampling
from lacache_trt.errors import CapacityError, EngineError

BUCKET = 64
LISTED_IDS = 8
Arrays = Mapping[str, NDArray[np.generic]]
Size = tuple[int, int]
"""Rows and columns of a batch."""


def moved_right(canvas: Canvas, block_columns: Int, pads: int) -> dict[str, NDArray[np.generic]]:
    """The geometry inputs of a graph, with `pads` columns in front."""
    left, moved = ((0, 0), (pads, 0)), np.int32(pads)
    return {
        "tokens": np.pad(canvas.tokens, left),
        "positions": np.pad(canvas.positions, left),
        "valid_from": canvas.valid_from + moved,
        "valid_to": canvas.valid_to + moved,
        "block_columns": block_columns + moved,
    }


def step_inputs(
    inputs: Arrays, sampling: Sampling, logit_columns: Int | None, pads: int = 0
) -> dict[str, NDArray[np.generic]]:
    """All inputs of a step, its logit columns moved right by `pads`; None stands for no column."""
    none = np.zeros((len(sampling.seed), 0), np.int32)
    columns = none if logit_columns is None else logit_columns
    return {**inputs, **vars(sampling), "logit_columns": columns + np.int32(pads)}


def row_bucket(rows: int) -> int:
    """The rows that a captured graph has for a batch: up to 4 its own, then 2^n or 3 * 2^n."""
    if rows <= 4:
        return rows
    power = 1 << (rows - 1).bit_length()
    return power * 3 // 4 if rows <= power * 3 // 4 else power


def with_rows(inputs: Arrays, rows: int) -> Arrays:
    """The inputs of a step with their last row repeated until there are `rows`."""
    if len(next(iter(inputs.values()))) == rows:
        return inputs
    return {name: _repeated(value, rows) for name, value in inputs.items()}


def _repeated(value: NDArray[np.generic], rows: int) -> NDArray[np.generic]:
    padded = np.empty((rows, *value.shape[1:]), value.dtype)
    padded[: len(value)] = value
    padded[len(value) :] = value[-1]
    return padded


def require_rows(found: int, filled: int) -> None:
    """Raise `EngineError` unless a step has the rows that were filled."""
    if found != filled:
        raise EngineError(
            "a step has another number of rows than the fill before it",
            got=found,
            expected=filled,
            fix="call fill for these rows first",
        )


def no_room(asked: Size, run_as: Size, needed: int, free: int) -> CapacityError:
    """The error of a batch that was asked for and would run with more rows and columns."""
    rows, columns = (
        f"{count} {name}" if count == run else f"{count} {name} (run as {run})"
        for name, count, run in zip(("rows", "columns"), asked, run_as, strict=True)
    )
    return CapacityError(
        f"a batch of {rows} and {columns} does not fit into the device's memory",
        got=f"{free:,} bytes free",
        expected=f"{needed:,} bytes",
        fix="use a smaller batch or a shorter canvas",
    )


def fitted(name: str, value: NDArray[np.generic], shape: tuple[int, ...]) -> NDArray[np.generic]:
    """The value as a buffer of that shape holds it: id lists are padded with -1.

    Raises:
        CapacityError: it does not fit.
    """
    if value.shape == shape:
        return value
    rows_differ = value.ndim != 2 or value.shape[0] != shape[0]
    if rows_differ or value.shape[1] > shape[1] or not name.endswith("_ids"):
        raise CapacityError(
            f"{name} does not fit into the buffers of this engine",
            got=value.shape,
            expected=shape,
            fix="list fewer ids",
        )
    padded = np.full(shape, -1, np.int32)
    padded[:, : value.shape[1]] = value
    return padded
