"""A weights file in another dtype, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

from lacache_trt.export.bands import STORAGE, check_converted, convert, read_rows
from lacache_trt.export.weights import (
    BAND_BYTES,
    new_weights_file,
    plan_layout,
    read_header,
    write_at,
)
from lacache_trt.model.config import DTYPE_BYTES, Dtype
from lacache_trt.model.safetensors_file import open_regular
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
    layout = plan_layout({name: tensor.shape for name, tensor in tensors.items()}, dtype)
    progress.start(f"convert weights to {dtype}", layout.size - layout.data_start)
    with new_weights_file(target, layout.size) as out, open_regular(source) as descriptor:
        write_at(out, layout.header, 0)
        for name, tensor in tensors.items():
            rows, *columns = tensor.shape
            row_bytes = DTYPE_BYTES[dtype] * (columns[0] if columns else 1)
            step = max(1, BAND_BYTES // row_bytes)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                band, stored = read_rows(descriptor, tensor, first, count, source)
                converted = convert(band, stored, dtype)
                check_converted(converted, band, stored, dtype, name)
                position = layout.offsets[name] + first * row_bytes
                write_at(out, converted.astype(STORAGE[dtype], copy=False), position)
                progress.advance(count * row_bytes)
        os.fsync(out)
