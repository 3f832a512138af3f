"""One weights file out of a checkpoint, in bounded memory.

The file is safetensors: the header first, padded with spaces so that the data starts at a multiple
of 64 bytes, then the tensors of `parameter_shapes` without gaps (the format allows none; with the
sizes of real models each tensor starts at a multiple of 64 too). Linear weights [out, in] are
transposed to [in, out] by bands: a band of source rows is read with `pread`, transposed, and
written with `pwrite` as one strip into each row of the target. Memory is a few bands, whatever the
model's size; nothing is mapped.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lacache_trt.errors import ArtifactError, OutputError
from lacache_trt.export.bands import (
    STORAGE,
    Band,
    check_converted,
    check_finite,
    convert,
    read_rows,
    widen,
)
from lacache_trt.export.dequantise import dequantise_rows, read_scales
from lacache_trt.model.checkpoint import Checkpoint
from lacache_trt.model.config import DTYPE_BYTES, DTYPES, Dtype
from lacache_trt.model.safetensors_file import (
    FLOAT_DTYPES,
    LENGTH_BYTES,
    SAFETENSORS_NAMES,
    STORED_BYTES,
    StoredTensor,
    open_regular,
    read_safetensors_header,
)
from lacache_trt.model.tensor_map import TensorRecipe
from lacache_trt.progress import Progress, SilentProgress

ALIGNMENT = 64
BAND_BYTES = 32 * 2**20
_PAGE_BYTES = 4096


def write_weights(
    checkpoint: Checkpoint,
    path: Path,
    dtype: Dtype | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the weights file of a checkpoint; `path` is complete and synced, or absent.

    Args:
        checkpoint: where the weights come from.
        path: a file that does not exist yet.
        dtype: of all tensors; the checkpoint's own if None.
        progress: counts bytes written.

    Errors: `OutputError` (exists, no permission, disk full), `CheckpointError` (NaN, infinite or
    too large weights, a file that changed meanwhile).
    """
    target = checkpoint.config.dtype if dtype is None else dtype
    if target not in DTYPES:
        raise OutputError("unknown dtype", got=repr(target), expected=", ".join(DTYPES))
    progress = progress or SilentProgress()
    layout = plan_layout(
        {name: recipe.shape for name, recipe in checkpoint.recipes.items()}, target
    )
    progress.start("weights", layout.size - layout.data_start)
    with new_weights_file(path, layout.size) as descriptor, _Sources(checkpoint) as sources:
        write_at(descriptor, layout.header, 0)
        for name, recipe in checkpoint.recipes.items():
            start = layout.offsets[name]
            _write_tensor(descriptor, start, recipe, sources, target, progress)
        os.fsync(descriptor)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Name → dtype, shape, absolute offset and length of every tensor of a weights file.

    Errors: `CheckpointError` if the file is not valid safetensors.
    """
    return read_safetensors_header(Path(path).resolve())


def read_tensor(path: Path, name: str) -> NDArray[np.float32] | NDArray[np.float16]:
    """One tensor in memory: float32 and float16 as stored, bfloat16 widened to float32 (exact).

    Errors: `ArtifactError` for an unknown name, `CheckpointError` for an invalid file.
    """
    header = read_header(path)
    if name not in header or header[name].dtype not in FLOAT_DTYPES:
        raise ArtifactError(
            f"the weights file has no tensor {name}",
            got=", ".join(list(header)[:8]),
            expected="one of its tensors, in F32, F16 or BF16",
        )
    tensor = header[name]
    rows = tensor.shape[0] if tensor.shape else 1
    with open_regular(tensor.path) as descriptor:
        band, dtype = read_rows(descriptor, tensor, 0, rows, tensor.path)
    values = widen(band, dtype) if dtype == "bfloat16" else band
    return values.reshape(tensor.shape)


@dataclass(frozen=True)
class Layout:
    """Where everything of a weights file goes.

    Attributes:
        header: length prefix, JSON and padding.
        offsets: first byte of each tensor, from the start of the file.
        size: of the whole file.
    """

    header: bytes
    offsets: dict[str, int]
    size: int

    @property
    def data_start(self) -> int:
        """First byte of the data."""
        return len(self.header)


def plan_layout(
    shapes: Mapping[str, tuple[int, ...]], dtype: Dtype, special: Mapping[str, str] | None = None
) -> Layout:
    """The layout of a weights file that holds these tensors in this order.

    Args:
        shapes: of all tensors.
        dtype: of the tensors.
        special: names in the format, as F8_E4M3, of the tensors that have another dtype.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "lacache-trt"}}
    begins: dict[str, int] = {}
    position = 0
    for name, shape in shapes.items():
        begins[name] = position
        kind = (special or {}).get(name, SAFETENSORS_NAMES[dtype])
        position += int(np.prod(shape, dtype=np.int64)) * STORED_BYTES[kind]
        entries[name] = {
            "dtype": kind,
            "shape": list(shape),
            "data_offsets": [begins[name], position],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    offsets = {name: len(header) + begin for name, begin in begins.items()}
    return Layout(header, offsets, len(header) + position)


@dataclass
class _Sources:
    """The checkpoint's files, each opened once, when first needed."""

    checkpoint: Checkpoint
    _stack: ExitStack = field(default_factory=ExitStack)
    _descriptors: dict[Path, int] = field(default_factory=dict)
    _scales: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def rows(self, name: str, first: int, count: int) -> tuple[Band, Dtype]:
        """Rows of a tensor of the checkpoint, finite, in its own dtype; FP8 as float32."""
        tensor = self.checkpoint.tensors[name]
        dtype: Dtype = "float32"
        if tensor.path not in self._descriptors:
            self._descriptors[tensor.path] = self._stack.enter_context(open_regular(tensor.path))
        descriptor = self._descriptors[tensor.path]
        if name in self.checkpoint.scales:
            if name not in self._scales:
                self._scales[name] = read_scales(self.checkpoint.scales[name], name)
            scales = self._scales[name]
            band: Band = dequantise_rows(descriptor, tensor, scales, (first, count), name)
        else:
            band, dtype = read_rows(descriptor, tensor, first, count, tensor.path)
        check_finite(band, dtype, name, first)
        return band, dtype


def _write_tensor(
    descriptor: int,
    start: int,
    recipe: TensorRecipe,
    sources: _Sources,
    target: Dtype,
    progress: Progress,
) -> None:
    """Stack the sources' rows; each band becomes whole rows, or a strip of every row."""
    element = DTYPE_BYTES[target]
    stacked = 0
    for source in recipe.sources:
        columns = source.shape[1] if len(source.shape) == 2 else 1
        kind = sources.checkpoint.tensors[source.name].dtype
        stored = FLOAT_DTYPES.get(kind, "float32")
        step = _band_rows(columns, recipe.transpose, stored, target)
        for first in range(0, source.shape[0], step):
            count = min(step, source.shape[0] - first)
            band, dtype = sources.rows(source.name, first, count)
            converted = convert(band, dtype, target)
            check_converted(converted, band, dtype, target, source.name)
            if recipe.transpose:
                row_bytes = recipe.shape[1] * element
                position = start + (stacked + first) * element
                _write_strip(descriptor, converted, position, row_bytes, target)
            else:
                position = start + (stacked + first) * columns * element
                write_at(descriptor, converted.astype(STORAGE[target], copy=False), position)
            progress.advance(count * columns * element)
        stacked += source.shape[0]


def _band_rows(columns: int, transpose: bool, stored: Dtype, target: Dtype) -> int:
    """Source rows per band. Strips are made whole pages wide where the band allows it."""
    widest = DTYPE_BYTES[target] if stored == target else DTYPE_BYTES["float32"]
    rows = max(1, BAND_BYTES // (columns * widest))
    page_rows = _PAGE_BYTES // DTYPE_BYTES[target]
    if transpose and rows > page_rows:
        rows -= rows % page_rows
    return rows


def _write_strip(descriptor: int, band: Band, position: int, row_bytes: int, target: Dtype) -> None:
    """Write band [rows, columns] as columns strips of `rows` elements, `row_bytes` apart."""
    strips = np.ascontiguousarray(band.T, STORAGE[target])
    for index, strip in enumerate(strips):
        write_at(descriptor, strip, position + index * row_bytes)


def write_at(descriptor: int, data: bytes | Band, position: int) -> None:
    """Write all of `data` at `position`."""
    view = memoryview(data if isinstance(data, bytes) else data.data).cast("B")
    while view:
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written


@contextmanager
def new_weights_file(path: Path, size: int) -> Iterator[int]:
    """A new file of `size` bytes with its disk space reserved; removed if the body fails."""
    try:
        with _created(path) as descriptor:
            _reserve(descriptor, size)
            yield descriptor
    except OSError as error:
        raise _output_error(path, error, size) from error


@contextmanager
def _created(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    complete = False
    try:
        yield descriptor
        complete = True
    finally:
        os.close(descriptor)
        if not complete:
            path.unlink(missing_ok=True)


def _reserve(descriptor: int, size: int) -> None:
    """Fail now rather than after minutes of writing if the disk is too small."""
    if hasattr(os, "posix_fallocate") and size:
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def _output_error(path: Path, error: OSError, size: int) -> OutputError:
    found, fix = "", f"choose a folder that can be written to and holds no {path.name}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        found = f"; {shutil.disk_usage(path.parent).free} bytes free in {path.parent}"
        fix = "free some space, or choose an output on another disk"
    return OutputError(
        f"cannot write {path.name}",
        got=f"{type(error).__name__}: {error.strerror or error}{found}",
        expected=f"a new file of {size} bytes: {path}",
        fix=fix,
    )
