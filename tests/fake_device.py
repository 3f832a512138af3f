"""A GPU that is not there: addresses are addresses of host memory.

The stream executes at once, except while it is captured: then it remembers, as CUDA does, and a
replay repeats it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lacache_trt.engines.tensorrt.device import Corner
from lacache_trt.errors import CapacityError

SM = 90
STREAM = 77
ALIGNMENT = 256


class FakeDevice:
    """Host memory, a stream and graphs, with bookkeeping."""

    def __init__(self, memory: int = 1 << 30) -> None:
        self.name, self.sm, self.stream = "Fake H100", SM, STREAM
        self.memory = memory
        self.live: dict[int, tuple[NDArray[np.uint8], int]] = {}
        self.pins = 0
        self.captures = self.replays = self.boxes = 0
        self.closed = False
        self._recording: list[Callable[[], None]] | None = None
        self._depth = threading.local()

    @contextmanager
    def activated(self) -> Iterator[None]:
        self._depth.value = self._level() + 1
        try:
            yield
        finally:
            self._depth.value -= 1

    def _level(self) -> int:
        return int(getattr(self._depth, "value", 0))

    def _require_active(self) -> None:
        assert self._level() > 0, "the context is not current in this thread"
        assert not self.closed, "the device is closed"

    def submit(self, work: Callable[[], None]) -> None:
        """Execute now, or remember while capturing."""
        self._require_active()
        if self._recording is not None:
            self._recording.append(work)
        else:
            work()

    def free_bytes(self) -> int:
        return self.memory - sum(size for _, size in self.live.values())

    def allocate(self, nbytes: int) -> int:
        self._require_active()
        assert self._recording is None, "allocation while capturing"
        if nbytes > self.free_bytes():
            raise CapacityError("out of memory", got=nbytes)
        backing = np.full(nbytes + ALIGNMENT, 0xCD, np.uint8)
        address = -(-backing.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.live[address] = backing, nbytes
        return address

    def release(self, address: int) -> None:
        self._require_active()
        del self.live[address]

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        self._require_active()
        self.pins += 1
        return np.zeros(nbytes, np.uint8)

    def unpin(self, array: NDArray[np.uint8]) -> None:
        self.pins -= 1

    def upload(self, address: int, source: NDArray[np.uint8]) -> None:
        self.submit(lambda: ctypes.memmove(address, source.ctypes.data, source.nbytes) and None)

    def download(self, target: NDArray[np.uint8], address: int) -> None:
        self.submit(lambda: ctypes.memmove(target.ctypes.data, address, target.nbytes) and None)

    def require_inside(self, address: int, nbytes: int) -> None:
        """These bytes lie in one allocation that has not been given back."""
        assert any(
            start <= address and address + nbytes <= start + size
            for start, (_, size) in self.live.items()
        ), "beyond the memory that was allocated"

    def copy_box(self, target: Corner, source: Corner, size: tuple[int, int, int]) -> None:
        assert self._recording is None, "a graph would keep the columns that it was captured with"
        self.boxes += 1
        width, height, depth = size
        views = []
        for corner in (target, source):
            assert corner.byte + width <= corner.pitch
            assert corner.row + height <= corner.height
            shape = (depth, corner.height, corner.pitch)
            self.require_inside(corner.address, int(np.prod(shape)))
            box = view(corner.address, shape, "uint8")
            rows = slice(corner.row, corner.row + height)
            views.append(box[:, rows, corner.byte : corner.byte + width])

        def copy() -> None:
            views[0][...] = views[1]

        self.submit(copy)

    def load(self, address: int, source: NDArray[np.uint8]) -> None:
        self._require_active()
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def record(self, event: Any = None) -> Any:
        self._require_active()
        return event or object()

    def wait(self, event: Any) -> None:
        self._require_active()

    def synchronize(self) -> None:
        assert self._recording is None, "synchronisation while capturing"
        self._require_active()

    def capture(self, body: Callable[[], None]) -> list[Callable[[], None]]:
        self._recording = []
        self.captures += 1
        try:
            body()
            return self._recording
        finally:
            self._recording = None

    def replay(self, graph: list[Callable[[], None]]) -> None:
        self.replays += 1
        for work in graph:
            self.submit(work)

    def destroy(self, graph: list[Callable[[], None]]) -> None:
        graph.clear()

    def close(self) -> None:
        self.closed = True


def view(address: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """The array at an address."""
    count = int(np.prod(shape, dtype=np.int64))
    buffer = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(buffer, dtype).reshape(shape)
