"""A weights file in another dtype, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from pathlib import Path

from lacache_trt.export.bands import STORAGE, check_converted, convert, read_rows
from lacache_trt.export.weights import (
    BAND_BYTES,
    new_weights_file,
    plan_layout,
    read_header,
    write_at,
)
from lacache_trt.model.config import DTYPE_BYTES, INPUT_SCALE, Dtype
from lacache_trt.model.safetensors_file import (
    E4M3,
    StoredTensor,
    open_regular,
    read_exactly,
)
from lacache_trt.progress import Progress


def convert_weights(
    source: Path,
    target: Path,
    dtype: Dtype,
    progress: Progress,
    only: Container[str] | None = None,
) -> None:
    """Write `source`'s tensors, or only those named, in `dtype` to the new file `target`.

    Raises:
        CheckpointError: `source` is not valid, or a weight does not fit into `dtype`.
        OutputError: `target` exists or cannot be written.
    """
    tensors = {
        name: tensor for name, tensor in read_header(source).items() if only is None or name in only
    }
    kept = kept_dtypes(tensors)
    layout = plan_layout({name: tensor.shape for name, tensor in tensors.items()}, dtype, kept)
    progress.start(f"convert weights to {dtype}", layout.size - layout.data_start)
    with new_weights_file(target, layout.size) as out, open_regular(source) as descriptor:
        write_at(out, layout.header, 0)
        for name, tensor in tensors.items():
            position = layout.offsets[name]
            if name in kept:
                copy_tensor(out, position, descriptor, tensor, progress)
            else:
                _convert_tensor(out, position, descriptor, (name, tensor), dtype, progress)
        os.fsync(out)


def kept_dtypes(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """The tensors of FP8 linears, which no conversion changes, and their dtypes."""
    linears = [name.removesuffix(".weight") for name in tensors if tensors[name].dtype == E4M3]
    names = [linear + part for linear in linears for part in (".weight", ".scale", INPUT_SCALE)]
    return {name: tensors[name].dtype for name in names if name in tensors}


def copy_tensor(
    out: int, position: int, descriptor: int, tensor: StoredTensor, progress: Progress
) -> None:
    """Copy a tensor's bytes to `position`."""
    for first in range(0, tensor.nbytes, BAND_BYTES):
        count = min(BAND_BYTES, tensor.nbytes - first)
        data = read_exactly(descriptor, count, tensor.offset + first, tensor.path)
        write_at(out, data, position + first)
        progress.advance(count)


def _convert_tensor(
    out: int,
    position: int,
    descriptor: int,
    named: tuple[str, StoredTensor],
    dtype: Dtype,
    progress: Progress,
) -> None:
    name, tensor = named
    rows, *columns = tensor.shape
    row_bytes = DTYPE_BYTES[dtype] * (columns[0] if columns else 1)
    step = max(1, BAND_BYTES // row_bytes)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        band, stored = read_rows(descriptor, tensor, first, count, tensor.path)
        converted = convert(band, stored, dtype)
        check_converted(converted, band, stored, dtype, name)
        write_at(out, converted.astype(STORAGE[dtype], copy=False), position + first * row_bytes)
        progress.advance(count * row_bytes)
