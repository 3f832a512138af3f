"""Bands of weights: reading rows, changing their dtype, checking that they are finite.

Conversion is round to nearest, ties to even, as in IEEE 754 and in torch. bfloat16 is the upper
half of a float32: with u the float32's bits, bf16 = (u + 0x7FFF + ((u >> 16) & 1)) >> 16 for finite
values, and widening is u = bf16 << 16, exact. NumPy has no bfloat16, so its bits travel as uint16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lacache_trt.errors import CheckpointError
from lacache_trt.model.config import Dtype
from lacache_trt.model.safetensors_file import FLOAT_DTYPES, StoredTensor, read_exactly

Band = NDArray[Any]
STORAGE: dict[Dtype, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
_EXPONENT = {"float16": 0x7C00, "bfloat16": 0x7F80}


def read_rows(
    descriptor: int, tensor: StoredTensor, first: int, count: int, path: Path
) -> tuple[Band, Dtype]:
    """Rows [first, first + count) of a tensor [rows, columns] or [rows], in its own dtype."""
    dtype = FLOAT_DTYPES[tensor.dtype]
    columns = tensor.shape[1:] or (1,)
    row_bytes = int(np.prod(columns)) * STORAGE[dtype].itemsize
    data = read_exactly(descriptor, count * row_bytes, tensor.offset + first * row_bytes, path)
    return np.frombuffer(data, STORAGE[dtype]).reshape(count, *columns), dtype


def finite(band: Band, dtype: Dtype) -> NDArray[np.bool_]:
    """Which elements are neither NaN nor infinite."""
    if dtype == "float32":
        return np.isfinite(band)
    exponent = np.uint16(_EXPONENT[dtype])
    good: NDArray[np.bool_] = (band.view(np.uint16) & exponent) != exponent
    return good


def widen(band: Band, dtype: Dtype) -> NDArray[np.float32]:
    """float32 of the same values; exact."""
    if dtype == "bfloat16":
        return (band.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return band.astype(np.float32, copy=False)


def convert(band: Band, source: Dtype, target: Dtype) -> Band:
    """The finite values of `band` in another dtype; too large ones become infinite."""
    if source == target:
        return band
    values = widen(band, source)
    if target == "float32":
        return values
    if target == "float16":
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def check_finite(band: Band, dtype: Dtype, name: str, first_row: int) -> None:
    """`CheckpointError` that names the first NaN or infinite weight of a tensor."""
    good = finite(band, dtype)
    if not good.all():
        row, *rest = (int(index) for index in np.argwhere(~good)[0])
        value = widen(band, dtype)[(row, *rest)]
        raise CheckpointError(
            f"a weight of {name} is not finite",
            got=f"{value} at {[first_row + row, *rest]}",
            expected="finite weights: one NaN makes every logit NaN",
            fix="download the checkpoint again; if it is the same, it was saved broken",
        )


def check_converted(converted: Band, band: Band, source: Dtype, target: Dtype, name: str) -> None:
    """`CheckpointError` if a finite weight became infinite in the target dtype."""
    if target == "float32" or source == target:
        return
    good = finite(converted, target)
    if not good.all():
        worst = float(np.abs(widen(band, source)).max())
        raise CheckpointError(
            f"a weight of {name} does not fit into {target}",
            got=f"magnitude {worst:g}",
            expected="at most 65504 for float16, 3.38953e38 for bfloat16",
            fix="export with --dtype bfloat16 or float32",
        )
