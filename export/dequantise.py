"""Rows of an FP8 weight of a checkpoint as float32: E4M3 values times the scales of their blocks.

E4M3: sign, 4 bits of exponent e with bias 7, 3 of mantissa m; value (1 + m / 8) 2^(e - 7), or
m / 8 2^-6 for e = 0; all ones is NaN, there is no infinity. The product is rounded once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lacache_trt.errors import CheckpointError
from lacache_trt.model.quantised_layout import BLOCK
from lacache_trt.model.safetensors_file import StoredTensor, open_regular, read_exactly


def _e4m3_values() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    magnitude[codes & 127 == 127] = np.nan
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


E4M3_VALUES = _e4m3_values()


def read_scales(tensor: StoredTensor, weight: str) -> NDArray[np.float32]:
    """float32 [out / 128, in / 128]; `CheckpointError` if one is NaN, infinite or negative."""
    with open_regular(tensor.path) as descriptor:
        data = read_exactly(descriptor, tensor.nbytes, tensor.offset, tensor.path)
    shape = tensor.shape if len(tensor.shape) == 2 else tensor.shape[::2]
    scales = np.frombuffer(data, "<f4").reshape(shape)
    good = np.isfinite(scales) & (scales >= 0)
    if not good.all():
        raise _wrong_scale(weight, float(scales.ravel()[np.argmin(good)]))
    return scales


def dequantise_rows(
    descriptor: int,
    tensor: StoredTensor,
    scales: NDArray[np.float32],
    rows: tuple[int, int],
    weight: str,
) -> NDArray[np.float32]:
    """float32 [count, in] of `rows` = (first, count) of an FP8 weight [out, in]."""
    first, count = rows
    columns = tensor.shape[1]
    place = tensor.offset + first * columns
    data = read_exactly(descriptor, count * columns, place, tensor.path)
    values = E4M3_VALUES[np.frombuffer(data, np.uint8).reshape(count, columns)]
    blocks = scales[np.arange(first, first + count) // BLOCK]
    wide = np.repeat(blocks, BLOCK, axis=1)[:, :columns]
    if bool(((wide == 0) & (values != 0)).any()):
        raise _wrong_scale(weight, 0.0)
    with np.errstate(over="ignore"):  # what overflows is refused where the band is checked
        product: NDArray[np.float32] = values * wide
    return product


def _wrong_scale(weight: str, scale: float) -> CheckpointError:
    return CheckpointError(
        f"a scale of {weight} cannot be one",
        got=scale,
        expected="positive, finite scales; 0 only for a block of zeros",
        fix="download the checkpoint again, or export it from its 16-bit original",
    )
