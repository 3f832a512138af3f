"""Named small arrays in one page-locked buffer with a device twin.

One copy moves them all; captured into a graph, it repeats with every replay. TensorRT wants every
tensor at a multiple of 256 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lacache_trt.contract import TensorSpec
from lacache_trt.engines.padding import Arrays, fitted
from lacache_trt.engines.tensorrt.device import Device

ALIGNMENT = 256
ELEMENT_BYTES = {"int32": 4, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


def shape_of(spec: TensorSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The tensor's shape for values of the contract's symbols."""
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)


def bytes_of(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    """The tensor's bytes, rounded up to the alignment; at least one unit, for its address."""
    nbytes = int(np.prod(shape_of(spec, sizes), dtype=np.int64)) * ELEMENT_BYTES[spec.dtype]
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


class Staging:
    """int32 and float32 tensors of fixed shapes, on both sides."""

    def __init__(
        self, device: Device, specs: Iterable[TensorSpec], sizes: Mapping[str, int]
    ) -> None:
        specs = tuple(specs)
        self.nbytes = sum(bytes_of(spec, sizes) for spec in specs)
        self._device = device
        self._base = device.allocate(self.nbytes)
        self._host = device.pinned(self.nbytes)
        self.addresses: dict[str, int] = {}
        self.arrays: dict[str, NDArray[Any]] = {}
        offset = 0
        for spec in specs:
            shape = shape_of(spec, sizes)
            nbytes = int(np.prod(shape, dtype=np.int64)) * ELEMENT_BYTES[spec.dtype]
            piece = self._host[offset : offset + nbytes]
            self.arrays[spec.name] = piece.view(spec.dtype).reshape(shape)
            self.addresses[spec.name] = self._base + offset
            offset += bytes_of(spec, sizes)

    def write(self, values: Arrays) -> None:
        """Set host values of the tensors that are here."""
        for name, target in self.arrays.items():
            if name in values:
                target[...] = fitted(name, values[name], target.shape)

    def upload(self) -> None:
        """Enqueue the copy to the device."""
        self._device.upload(self._base, self._host)

    def download(self) -> None:
        """Enqueue the copy from the device."""
        self._device.download(self._host, self._base)

    def release(self) -> None:
        """Give both sides back."""
        self.arrays.clear()
        self._device.release(self._base)
        self._device.unpin(self._host)
