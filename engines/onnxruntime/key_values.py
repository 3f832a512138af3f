"""K and V of all layers between steps: NumPy memory that onnxruntime reads and writes in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from lacache_trt.contract import TensorSpec

Array = NDArray[Any]


class KeyValues:
    """`keys` and `values` [L, B, Hkv, N, d] of one shape, bound without a copy."""

    def __init__(self, specs: Sequence[TensorSpec], rows: int, columns: int) -> None:
        sizes = {"B": rows, "N": columns}
        self.shape = (rows, columns)
        self.arrays: dict[str, Array] = {
            spec.name: np.empty(
                [dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape], spec.dtype
            )
            for spec in specs
        }
        self.values = {
            name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in self.arrays.items()
        }

    def write(self, fresh: Sequence[Array], start: NDArray[np.int64], counts: Array) -> None:
        """Put a window's K and V [L, B, Hkv, W, d] at its columns; pads are left out."""
        for kept, window in zip(self.arrays.values(), fresh, strict=True):
            for row, (first, count) in enumerate(zip(start, counts, strict=True)):
                kept[:, row, :, first : first + count] = window[:, row, :, :count]

    def nbytes(self) -> int:
        """Bytes of both."""
        return sum(array.nbytes for array in self.arrays.values())
