"""Calls the plugin library's test entry point through ctypes: an op's launch code, no TensorRT."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DESCRIBE, PREPARE, ENQUEUE = 0, 1, 2
_TEXT_BYTES = 1 << 16


class NativeFailure(Exception):
    """What the library refused, in its own words."""


@dataclass(frozen=True)
class DescribedLaunch:
    """One launch that the library would make."""

    index: int
    kernel: str
    grid: tuple[int, ...]
    threads: int
    shared: int
    scalars: tuple[int, ...]


@dataclass(frozen=True)
class Description:
    """What a program does for given input shapes."""

    op: str
    sm: int
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    workspace: int
    launches: tuple[DescribedLaunch, ...]


class NativeEntry:
    """`lacacheTestRun` of a compiled library."""

    def __init__(self, library: Path) -> None:
        self._function = ctypes.CDLL(str(library)).lacacheTestRun
        self._function.restype = ctypes.c_int32
        self._function.argtypes = [
            ctypes.c_int32,
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_int64),
            ctypes.c_int32,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_size_t,
        ]

    def describe(self, blob: bytes, shapes: Sequence[Sequence[int]]) -> Description:
        """Evaluate the program for input shapes; needs no GPU."""
        return _parse(self._call(DESCRIBE, blob, shapes, (), (), 0, 0))

    def prepare(self, blob: bytes) -> None:
        """Load the kernels in the current CUDA context."""
        self._call(PREPARE, blob, (), (), (), 0, 0)

    def enqueue(
        self,
        blob: bytes,
        shapes: Sequence[Sequence[int]],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Launch on device pointers."""
        self._call(ENQUEUE, blob, shapes, inputs, outputs, workspace, stream)

    def _call(
        self,
        mode: int,
        blob: bytes,
        shapes: Sequence[Sequence[int]],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> str:
        words = [word for shape in shapes for word in (len(shape), *shape)]
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        status = self._function(
            mode,
            blob,
            len(blob),
            (ctypes.c_int64 * len(words))(*words),
            len(shapes),
            (ctypes.c_void_p * len(inputs))(*inputs),
            (ctypes.c_void_p * len(outputs))(*outputs),
            workspace or None,
            stream or None,
            text,
            _TEXT_BYTES,
        )
        message = text.value.decode(errors="replace")
        if status:
            raise NativeFailure(message)
        return message


def _parse(text: str) -> Description:
    rows = [line.split() for line in text.splitlines()]
    facts = {row[0]: row[1] for row in rows if row[0] in ("op", "sm", "workspace")}
    outputs = tuple((int(row[1]), tuple(map(int, row[2:]))) for row in rows if row[0] == "output")
    launches = tuple(_parse_launch(row[1:]) for row in rows if row[0] == "launch")
    return Description(facts["op"], int(facts["sm"]), outputs, int(facts["workspace"]), launches)


def _parse_launch(row: list[str]) -> DescribedLaunch:
    numbers = [int(word) for word in row[2:]]
    return DescribedLaunch(
        int(row[0]), row[1], tuple(numbers[:3]), numbers[3], numbers[4], tuple(numbers[5:])
    )
