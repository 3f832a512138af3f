"""A strict reader of safetensors headers, and of rows of a tensor without mapping the file.

Format: 8 bytes little-endian header length, a JSON header, the data. The reader refuses what the
format forbids: headers over 100 MB, offsets outside of the file, holes, overlaps, sizes that
disagree with shape and dtype. Rows are read with `pread`, so that the resident memory of a process
does not grow with the file as it would with a mapping.
Source: the format description of the safetensors project.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lacache_trt.errors import CheckpointError
from lacache_trt.model.config import Dtype
from lacache_trt.model.json_file import parse_json_object

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1_000_000
MAX_RANK = 64
LENGTH_BYTES = 8
FLOAT_DTYPES: dict[str, Dtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SAFETENSORS_NAMES: dict[Dtype, str] = {dtype: name for name, dtype in FLOAT_DTYPES.items()}
E4M3 = "F8_E4M3"
STORED_BYTES = {"F32": 4, "F16": 2, "BF16": 2, E4M3: 1}
_DTYPE_NAME = re.compile(r"(?:BOOL|[FIU](?:8|16|32|64)|BF16|C64|F8_E\w{1,8}|F[46]_E\w{1,8})")
_DTYPE_BITS = re.compile(r"\d+")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        path: the file.
        dtype: name in the safetensors format, for example `BF16`.
        shape: row-major.
        offset: first byte, counted from the start of the file.
        nbytes: length in bytes.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a file in the order of its data; `CheckpointError` if anything is off."""
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        prefix = read_exactly(descriptor, min(LENGTH_BYTES, size), 0, path)
        length = int.from_bytes(prefix, "little")
        available = max(0, size - LENGTH_BYTES)
        if size < LENGTH_BYTES or not 2 <= length <= min(available, MAX_HEADER_BYTES):
            raise corrupt(
                path,
                f"header of {length} bytes in a file of {size} bytes",
                f"a header that fits into the file and into {MAX_HEADER_BYTES} bytes",
            )
        header = read_exactly(descriptor, length, LENGTH_BYTES, path)
    if not header.startswith(b"{"):
        raise corrupt(path, f"header starts with {header[:8]!r}", "a JSON object")
    entries = parse_json_object(header, f"header of {path.name}")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise corrupt(path, f"__metadata__ {str(metadata)[:60]}", "an object of strings")
    if len(entries) > MAX_TENSORS:
        raise corrupt(path, f"{len(entries)} tensors", f"at most {MAX_TENSORS}")
    start = LENGTH_BYTES + length
    tensors = {name: _entry(path, name, value, start) for name, value in entries.items()}
    return _check_coverage(path, tensors, start, size)


def _entry(path: Path, name: str, value: Any, start: int) -> StoredTensor:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise corrupt(path, f"entry of {name!r}: {str(value)[:80]}", "dtype, shape, data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or not _DTYPE_NAME.fullmatch(dtype):
        raise corrupt(path, f"{name!r} has dtype {str(dtype)[:20]!r}", "a dtype of the format")
    if not _is_sizes(shape) or len(shape) > MAX_RANK or not _is_sizes(offsets):
        raise corrupt(
            path,
            f"{name!r} has shape {str(shape)[:60]}, data_offsets {str(offsets)[:60]}",
            "lists of integers from 0 to 2**63 - 1",
        )
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise corrupt(path, f"{name!r} has data_offsets {offsets[:4]}", "[begin, end]")
    nbytes = offsets[1] - offsets[0]
    bits = math.prod(shape) * _element_bits(dtype)
    if bits != nbytes * 8:
        raise corrupt(
            path, f"{name!r} holds {nbytes} bytes", f"{bits / 8:g} for {dtype} {list(shape)}"
        )
    return StoredTensor(path, dtype, tuple(shape), start + offsets[0], nbytes)


def _check_coverage(
    path: Path, tensors: dict[str, StoredTensor], start: int, size: int
) -> dict[str, StoredTensor]:
    ordered = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes))
    position = start
    for name, tensor in ordered:
        if tensor.offset != position:
            kind = "a hole before" if tensor.offset > position else "an overlap at"
            raise corrupt(path, f"{kind} {name!r}", "tensors that follow each other")
        position += tensor.nbytes
    if position != size:
        raise corrupt(
            path, f"a file of {size} bytes", f"{position} bytes as the header says (truncated?)"
        )
    return dict(ordered)


def _element_bits(dtype: str) -> int:
    if dtype == "BOOL":
        return 8
    match = _DTYPE_BITS.search(dtype)
    return int(match.group()) if match else 0


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Descriptor of a regular file, never through a final symlink; callers resolve links."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(
            f"cannot open {path.name}",
            got=f"{type(error).__name__}: {error.strerror or error}",
            expected=f"a readable file at {path}",
            fix="check the path and its permissions, or download the checkpoint again",
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(
                f"{path.name} is not a regular file",
                got=str(path),
                expected="a safetensors file",
                fix="download the checkpoint again",
            )
        yield descriptor
    finally:
        os.close(descriptor)


def read_exactly(descriptor: int, count: int, offset: int, path: Path) -> bytes:
    """`count` bytes at `offset`; `CheckpointError` if the file ends before."""
    parts: list[bytes] = []
    missing = count
    while missing:
        try:
            part = os.pread(descriptor, missing, offset + count - missing)
        except OSError as error:
            raise corrupt(path, f"{type(error).__name__}: {error}", "readable data") from error
        if not part:
            raise corrupt(path, f"the end of the file {missing} bytes early", "the whole tensor")
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def corrupt(path: Path, got: str, expected: str) -> CheckpointError:
    """The error for a file that is not what the format says."""
    return CheckpointError(
        f"{path.name} is not a valid safetensors file",
        got=got,
        expected=expected,
        fix="download the file again and compare its checksum",
    )
