"""Leaves one GPU's machine code in a CUDA library, so that it compresses to a fraction.

A CUDA library holds each kernel once per GPU generation, in *fat binaries*: a header (magic number
0xBA55ED50, version 1, header size 16, bytes that follow), then entries, each with its own header
(kind: 1 PTX, 2 machine code; header size; bytes of content; at byte 28 the compute capability) and
content. The driver reads the headers and opens the content of the entry that fits its GPU alone.
The others' contents are overwritten with zeros; sizes and places stay, so the library loads as it
was. Of cuBLASLt's remaining kernels, half are for types and routines that no network here can ask
for (FP8, bf16, integers, double, complex, triangular products, gradients); they go by name.
"""

from __future__ import annotations

import mmap
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
_HEADER, _ENTRY, _SM_AT = struct.Struct("<IHHQ"), struct.Struct("<HHIQ"), 28
_PTX, _MACHINE = 1, 2
_NEEDLESS = re.compile(
    "e4m3|e5m2|bf16|bfloat16|tf32|c1688|i8i|i8_|s8_|int8|int32|ci8|Kernel_triangular"
    "|cf16|cf32|cf64|cp32|cp64|f64|z884|d884|double|float2|_d(relu|gelu)_"
)


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


def thin(path: Path, sm: int, cuobjdump: Path | None = None) -> int:
    """Overwrite in place what the GPU does not need; returns the bytes that became zeros.

    With `cuobjdump`, kernels of types and routines that are not needed go too.
    """
    cleared = 0
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        binaries = list(fat_binaries(data))
        doomed = [entry for entries in binaries for entry in unneeded(entries, sm)]
        if cuobjdump is not None:
            fitting = [e for each in binaries for e in each if (e.kind, e.sm) == (_MACHINE, sm)]
            names = kernel_names(path, sm, cuobjdump)
            doomed += [e for e, found in zip(fitting, names, strict=True) if is_needless(found)]
        for entry in doomed:
            data[entry.start : entry.end] = bytes(entry.end - entry.start)
            cleared += entry.end - entry.start
    return cleared


def kernel_names(path: Path, sm: int, cuobjdump: Path) -> list[list[str]]:
    """Names of the kernels of every piece of machine code for `sm`, in the file's order."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(cuobjdump.resolve()), "-xelf", f"sm_{sm}", str(path.resolve())]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        # LIBRARY.NUMBER.sm_90.cubin, numbered over all architectures.
        files = sorted(Path(folder).iterdir(), key=lambda each: int(each.name.split(".")[-3]))
        return [_kernels(each.read_bytes()) for each in files]


def _kernels(cubin: bytes) -> list[str]:
    return [name.decode() for name in set(re.findall(rb"\.text\.([A-Za-z0-9_$]+)", cubin))]


def is_needless(names: list[str]) -> bool:
    """Whether all of these kernels are for something that is never asked for."""
    return bool(names) and all(_NEEDLESS.search(name) for name in names)
