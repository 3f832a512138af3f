"""The strided copy that puts a window's K and V at its columns.

On a GPU through PyCUDA, and anywhere over a stand-in of PyCUDA's class.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest

from lacache_trt.engines.tensorrt.device import Corner, CudaDevice


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()


@pytest.mark.gpu
@pytest.mark.skipif(
    find_spec("pycuda") is None or find_spec("cuda") is None,
    reason="PyCUDA and cuda-bindings are not installed",
)
@pytest.mark.parametrize(
    ("layers", "rows", "heads", "columns", "window", "unit"),
    [(1, 1, 1, 1, 1, 1), (3, 2, 2, 11, 5, 6), (4, 3, 2, 192, 64, 128), (32, 2, 32, 512, 64, 256)],
)
def test_a_box_goes_to_its_columns(
    device: CudaDevice, layers: int, rows: int, heads: int, columns: int, window: int, unit: int
) -> None:
    """A window's K or V [L, B, Hkv, W, d] into the kept ones, behind a replay, as a step does it.

    Every row has a run of its own; everything beside the runs must stay as it was.
    """
    rng = np.random.default_rng(columns)
    kept = rng.integers(0, 256, (layers, rows, heads, columns, unit), dtype=np.uint8)
    fresh = rng.integers(0, 256, (layers, rows, heads, window, unit), dtype=np.uint8)
    with device.activated():
        target, source = device.allocate(kept.nbytes), device.allocate(fresh.nbytes)
        host, back = device.pinned(fresh.nbytes), device.pinned(kept.nbytes)
        device.load(target, kept.reshape(-1))
        graph = device.capture(lambda: device.upload(source, host))
        for turn in range(3):
            fresh[...] = np.roll(fresh, turn + 1, axis=-1) + np.uint8(turn)
            host[...] = fresh.reshape(-1)
            device.replay(graph)
            for row in range(rows):
                count = int(rng.integers(1, window + 1))
                first = int(rng.integers(0, columns - count + 1))
                device.copy_box(
                    Corner(target, columns * unit, rows * heads, first * unit, row * heads),
                    Corner(source, window * unit, rows * heads, 0, row * heads),
                    (count * unit, heads, layers),
                )
                kept[:, row, :, first : first + count] = fresh[:, row, :, :count]
            device.download(back, target)
            device.synchronize()
            np.testing.assert_array_equal(back.reshape(kept.shape), kept)
        device.destroy(graph)
        for array in (host, back):
            device.unpin(array)
        for address in (target, source):
            device.release(address)


class Memcpy3D:
    """PyCUDA's class of that name over host memory: its fields, and what CUDA's driver does."""

    _SIDE = ("x_in_bytes", "y", "z", "device", "pitch", "height")
    __slots__ = (
        *("src_" + name for name in _SIDE),
        *("dst_" + name for name in _SIDE),
        *("width_in_bytes", "height", "depth"),
    )

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    def set_src_device(self, address: int) -> None:
        self.src_device = address

    def set_dst_device(self, address: int) -> None:
        self.dst_device = address

    def __call__(self, stream: object) -> None:
        assert stream == "stream"
        for side in ("src", "dst"):
            assert self._of(side, "x_in_bytes") + self.width_in_bytes <= self._of(side, "pitch")
            assert self._of(side, "y") + self.height <= self._of(side, "height")
        for z in range(self.depth):
            for y in range(self.height):
                source, target = self._address("src", y, z), self._address("dst", y, z)
                ctypes.memmove(target, source, self.width_in_bytes)

    def _address(self, side: str, y: int, z: int) -> int:
        row = (self._of(side, "z") + z) * self._of(side, "height") + self._of(side, "y") + y
        return (
            self._of(side, "device") + row * self._of(side, "pitch") + self._of(side, "x_in_bytes")
        )

    def _of(self, side: str, name: str) -> int:
        return int(getattr(self, f"{side}_{name}"))


def test_pycuda_is_told_the_same_copy() -> None:
    """`CudaDevice` and the simulated device copy alike; the former over a stand-in of PyCUDA."""
    device = object.__new__(CudaDevice)
    errors = {"Error": RuntimeError, "MemoryError": MemoryError}
    device._cuda = SimpleNamespace(Memcpy3D=Memcpy3D, **errors)
    device._stream = "stream"
    rng = np.random.default_rng(0)
    layers, rows, heads, columns, width, unit = 3, 2, 4, 11, 5, 6
    kept = rng.integers(0, 256, (layers, rows, heads, columns, unit), dtype=np.uint8)
    fresh = rng.integers(0, 256, (layers, rows, heads, width, unit), dtype=np.uint8)
    expected = kept.copy()
    for row, (first, count) in enumerate([(2, 5), (8, 3)]):
        expected[:, row, :, first : first + count] = fresh[:, row, :, :count]
        device.copy_box(
            Corner(kept.ctypes.data, columns * unit, rows * heads, first * unit, row * heads),
            Corner(fresh.ctypes.data, width * unit, rows * heads, 0, row * heads),
            (count * unit, heads, layers),
        )
    np.testing.assert_array_equal(kept, expected)
