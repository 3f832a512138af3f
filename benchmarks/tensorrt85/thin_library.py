"""Leaves one GPU's machine code in a CUDA library, so that it compresses to a fraction.

A CUDA library holds each kernel once per GPU generation, in *fat binaries*: a header (magic number
0xBA55ED50, version 1, header size 16, bytes that follow), then entries, each with its own header
(kind: 1 PTX, 2 machine code; header size; bytes of content; at byte 28 the compute capability) and
content. The driver reads the headers and opens the content of the entry that fits its GPU alone.
The others' contents are overwritten with zeros; sizes and places stay, so the library loads as it
was. A library that checks its kernels against a digest, as TensorRT's does, cannot be treated so.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
_HEADER, _ENTRY, _SM_AT = struct.Struct("<IHHQ"), struct.Struct("<HHIQ"), 28
_PTX, _MACHINE = 1, 2


@dataclass(frozen=True)
class Entry:
    """One version of a fat binary's kernels: kind, compute capability, where its content lies."""

    kind: int
    sm: int
    start: int
    end: int


def fat_binaries(data: mmap.mmap) -> Iterator[list[Entry]]:
    """The entries of every fat binary of a file."""
    at = data.find(_MAGIC)
    while at >= 0:
        _, _, header, size = _HEADER.unpack_from(data, at)
        end = at + header + size
        entries = list(_entries(data, at + header, end)) if end <= len(data) else []
        if entries:
            yield entries
        at = data.find(_MAGIC, entries[-1].end if entries else at + len(_MAGIC))


def _entries(data: mmap.mmap, at: int, end: int) -> Iterator[Entry]:
    while at < end:
        kind, _, header, size = _ENTRY.unpack_from(data, at)
        if kind not in (_PTX, _MACHINE) or header < _ENTRY.size or at + header + size > end:
            return
        (sm,) = struct.unpack_from("<I", data, at + _SM_AT)
        yield Entry(kind, sm, at + header, at + header + size)
        at += header + size


def unneeded(entries: list[Entry], sm: int) -> list[Entry]:
    """What a GPU of that compute capability never opens.

    Machine code of its own generation is kept; where there is none, PTX is, since the driver would
    compile it.
    """
    fitting = [e for e in entries if e.kind == _MACHINE and e.sm // 10 == sm // 10 and e.sm <= sm]
    kept = fitting or [e for e in entries if e.kind == _PTX and e.sm <= sm]
    return [entry for entry in entries if entry not in kept]


def thin(path: Path, sm: int) -> int:
    """Overwrite in place what the GPU does not need; returns the bytes that became zeros."""
    cleared = 0
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for entry in [each for found in fat_binaries(data) for each in unneeded(found, sm)]:
            data[entry.start : entry.end] = bytes(entry.end - entry.start)
            cleared += entry.end - entry.start
    return cleared
