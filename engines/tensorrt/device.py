"""The GPU as the engine uses it: memory, one stream, events and captured graphs.

PyCUDA holds the primary context, the one that torch and TensorRT use too, so that all of them see
each other's memory in one process. The context is pushed for the length of each call and popped
after it: a thread is left as it was found, and nothing is on PyCUDA's stack when the process ends,
where it would abort. It stays retained until then, as the CUDA runtime under TensorRT retains it
anyway; PyCUDA's own release would leave it pushed. PyCUDA knows no CUDA graphs; capture and replay
are calls of cuda-bindings to the same driver on the same stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lacache_trt.engines.registry import ENGINES
from lacache_trt.errors import CapacityError, EngineError, MissingDependencyError

Bytes = NDArray[np.uint8]
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING, which PyCUDA does not name


class Corner(NamedTuple):
    """A place in a box of device memory: slices of rows of bytes.

    Attributes:
        address: of the box.
        pitch: bytes from a row to the next.
        height: rows from a slice to the next.
        byte: in its row.
        row: in its slice.
    """

    address: int
    pitch: int
    height: int
    byte: int
    row: int


class Device(Protocol):
    """What the engine needs of a GPU. All but `activated` is called inside of `activated`."""

    name: str
    sm: int
    stream: int

    def activated(self) -> AbstractContextManager[None]:
        """Make the GPU current in this thread."""

    def free_bytes(self) -> int:
        """Memory that is not in use by anyone."""

    def allocate(self, nbytes: int) -> int:
        """Address of new memory, aligned to 256 bytes; `CapacityError` if there is none."""

    def release(self, address: int) -> None:
        """Give memory back."""

    def pinned(self, nbytes: int) -> Bytes:
        """Page-locked host memory."""

    def unpin(self, array: Bytes) -> None:
        """Give page-locked memory back."""

    def upload(self, address: int, source: Bytes) -> None:
        """Enqueue a copy from page-locked memory."""

    def download(self, target: Bytes, address: int) -> None:
        """Enqueue a copy to page-locked memory."""

    def copy_box(self, target: Corner, source: Corner, size: tuple[int, int, int]) -> None:
        """Enqueue a copy from one box to another; size: bytes of a row, rows, slices."""

    def load(self, address: int, source: Bytes) -> None:
        """Copy from any host memory and wait."""

    def record(self, event: Any = None) -> Any:
        """Mark this place of the stream, in `event` or in a new one."""

    def wait(self, event: Any) -> None:
        """Wait until the stream has passed the place."""

    def synchronize(self) -> None:
        """Wait for everything on the stream."""

    def capture(self, body: Callable[[], None]) -> Any:
        """A graph of what `body` enqueues, without running it."""

    def replay(self, graph: Any) -> None:
        """Enqueue a graph."""

    def destroy(self, graph: Any) -> None:
        """Release a graph."""

    def close(self) -> None:
        """Release everything; the device must not be used afterwards."""


class CudaDevice:
    """`Device` over PyCUDA and cuda-bindings."""

    def __init__(self, ordinal: int = 0) -> None:
        self._cuda, self._driver = _import_cuda()
        with self._translated("cannot use the GPU"):
            self._cuda.init()
            device = self._cuda.Device(ordinal)
            major, minor = device.compute_capability()
            self.name, self.sm = str(device.name()), 10 * major + minor
            self._context = _primary_context(self._cuda, ordinal)
        self._allocations: dict[int, Any] = {}
        self._graphs: set[Any] = set()
        with self.activated(), self._translated("cannot make a stream"):
            # A blocking stream cannot be captured while torch uses the legacy stream.
            self._stream = self._cuda.Stream(_NON_BLOCKING)
        self.stream = int(self._stream.handle)

    @contextmanager
    def activated(self) -> Iterator[None]:
        """Make the GPU current in this thread."""
        with self._translated("cannot make the GPU current"):
            self._context.push()
        try:
            yield
        finally:
            self._cuda.Context.pop()

    def free_bytes(self) -> int:
        """Memory that is not in use by anyone."""
        free, _ = self._cuda.mem_get_info()
        return int(free)

    def allocate(self, nbytes: int) -> int:
        """Address of new memory, aligned to 256 bytes."""
        with self._translated(f"cannot allocate {nbytes:,} bytes on the device"):
            allocation = self._cuda.mem_alloc(max(1, nbytes))
        address = int(allocation)
        self._allocations[address] = allocation
        return address

    def release(self, address: int) -> None:
        """Give memory back."""
        with self._translated("cannot free device memory"):
            self._allocations.pop(address).free()

    def pinned(self, nbytes: int) -> Bytes:
        """Page-locked host memory."""
        with self._translated(f"cannot page-lock {nbytes:,} bytes"):
            array: Bytes = self._cuda.pagelocked_zeros(max(1, nbytes), np.uint8)
        return array

    def unpin(self, array: Bytes) -> None:
        """Give page-locked memory back."""
        base: Any = array.base
        with self._translated("cannot free page-locked memory"):
            base.free()

    def upload(self, address: int, source: Bytes) -> None:
        """Enqueue a copy from page-locked memory."""
        with self._translated("a copy to the device failed"):
            self._cuda.memcpy_htod_async(address, source, self._stream)

    def download(self, target: Bytes, address: int) -> None:
        """Enqueue a copy to page-locked memory."""
        with self._translated("a copy from the device failed"):
            self._cuda.memcpy_dtoh_async(target, address, self._stream)

    def copy_box(self, target: Corner, source: Corner, size: tuple[int, int, int]) -> None:
        """Enqueue a copy from one box to another; size: bytes of a row, rows, slices."""
        with self._translated("a copy on the device failed"):
            copy = self._cuda.Memcpy3D()
            copy.set_src_device(source.address)
            copy.src_pitch, copy.src_height = source.pitch, source.height
            copy.src_x_in_bytes, copy.src_y = source.byte, source.row
            copy.set_dst_device(target.address)
            copy.dst_pitch, copy.dst_height = target.pitch, target.height
            copy.dst_x_in_bytes, copy.dst_y = target.byte, target.row
            copy.width_in_bytes, copy.height, copy.depth = size
            copy(self._stream)

    def load(self, address: int, source: Bytes) -> None:
        """Copy from any host memory and wait."""
        with self._translated("a copy to the device failed"):
            self._cuda.memcpy_htod_async(address, source, self._stream)
            self._stream.synchronize()

    def record(self, event: Any = None) -> Any:
        """Mark this place of the stream, in `event` or in a new one."""
        with self._translated("an event failed"):
            event = event if event is not None else self._cuda.Event()
            return event.record(self._stream)

    def wait(self, event: Any) -> None:
        """Wait until the stream has passed the place."""
        with self._translated("the device failed while it was waited for"):
            event.synchronize()

    def synchronize(self) -> None:
        """Wait for everything on the stream."""
        with self._translated("the device failed while it was waited for"):
            self._stream.synchronize()

    def capture(self, body: Callable[[], None]) -> Any:
        """A graph of what `body` enqueues, without running it."""
        driver, stream = self._driver, self._driver.CUstream(self.stream)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", stream, mode)
        try:
            body()
        except BaseException:
            # A failed capture must end too, or the stream stays unusable; its own result says less.
            driver.cuStreamEndCapture(stream)
            raise
        graph = self._call("cuStreamEndCapture", stream)
        try:
            executable = self._call("cuGraphInstantiate", graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)
        self._graphs.add(executable)
        return executable

    def replay(self, graph: Any) -> None:
        """Enqueue a graph."""
        self._call("cuGraphLaunch", graph, self._driver.CUstream(self.stream))

    def destroy(self, graph: Any) -> None:
        """Release a graph."""
        self._graphs.discard(graph)
        self._call("cuGraphExecDestroy", graph)

    def close(self) -> None:
        """Release what is left, and the stream."""
        with self.activated():
            self.synchronize()
            for graph in list(self._graphs):
                self.destroy(graph)
            for address in list(self._allocations):
                self.release(address)
            del self._stream

    def _call(self, name: str, *arguments: Any) -> Any:
        """A driver function of cuda-bindings, which return their status first."""
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            raise EngineError(f"the driver call {name} failed", got=status)
        return results[0] if results else None

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._cuda.MemoryError as error:
            raise CapacityError(
                what, got=error, fix="use a smaller batch or a shorter canvas, or free memory"
            ) from error
        except self._cuda.Error as error:
            raise EngineError(what, got=error) from error


@cache
def _primary_context(cuda: Any, ordinal: int) -> Any:
    return cuda.Device(ordinal).retain_primary_context()


def _import_cuda() -> tuple[Any, Any]:
    """PyCUDA's driver module and cuda-bindings' one."""
    try:
        import pycuda.driver
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingDependencyError(
            "running a TensorRT engine needs PyCUDA and cuda-bindings",
            got=error,
            fix=f"{ENGINES['tensorrt'].install_runtime} (PyCUDA compiles with the CUDA toolkit)",
        ) from error
    return pycuda.driver, driver
