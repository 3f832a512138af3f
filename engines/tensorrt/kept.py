"""K and V of all layers of a lane, in device memory that two plans share.

`reuse-kv` writes them and `window` reads them, both in place. What `window` computes for its own
columns goes to buffers of the window's width first, since a plan cannot write at columns that it is
told; `put` then copies it to its columns. That copy stays out of the captured graphs: the columns
change from block to block, and a graph would keep those that it was captured with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lacache_trt.contract import KEY_VALUE_GRAPHS, TensorSpec
from lacache_trt.engines.base import Int
from lacache_trt.engines.tensorrt.call import LaneShape, Resources
from lacache_trt.engines.tensorrt.device import Corner
from lacache_trt.engines.tensorrt.loaded import LoadedPlan
from lacache_trt.engines.tensorrt.staging import ELEMENT_BYTES, bytes_of, shape_of
from lacache_trt.engines.windows import PAD
from lacache_trt.errors import EngineError

Runs = Sequence[tuple[int, int]]
"""First column and number of columns of each row's window."""
_REUSE_KV, _WINDOW = KEY_VALUE_GRAPHS


class KeptCaches:
    """`keys` and `values` [L, B, Hkv, N, d], and by width W those of windows [L, B, Hkv, W, d]."""

    def __init__(self, resources: Resources, shape: LaneShape) -> None:
        self._device, self._sizes = resources.device, shape.sizes
        self.specs = kept_specs(resources.plans)
        self._window_specs = window_specs(resources.plans)
        self._windows: dict[int, dict[str, int]] = {}
        self.addresses = self._allocate(self.specs, 0)

    def window(self, width: int) -> dict[str, int]:
        """Addresses of a window's K and V, allocated at the first use of the width."""
        if width not in self._windows:
            self._windows[width] = self._allocate(self._window_specs, width)
        return self._windows[width]

    def has_window(self, width: int) -> bool:
        """Whether the buffers of the width are there."""
        return width in self._windows

    def put(self, width: int, runs: Runs) -> None:
        """Enqueue the copies that put a window's K and V at its columns; pads are left out.

        The rows behind the last run are repeated ones, whose K and V nobody reads.
        """
        for kept, fresh in zip(self.specs, self._window_specs, strict=True):
            layers, rows, heads, columns, size = shape_of(kept, self._sizes())
            unit = size * ELEMENT_BYTES[kept.dtype]
            target, source = self.addresses[kept.name], self._windows[width][fresh.name]
            for row, (first, count) in enumerate(runs):
                self._device.copy_box(
                    Corner(target, columns * unit, rows * heads, first * unit, row * heads),
                    Corner(source, width * unit, rows * heads, 0, row * heads),
                    (count * unit, heads, layers),
                )

    def nbytes(self) -> int:
        """Bytes of `keys` and `values`."""
        return sum(bytes_of(spec, self._sizes()) for spec in self.specs)

    def release(self) -> None:
        """Give everything back."""
        for addresses in (self.addresses, *self._windows.values()):
            self._free(addresses)
        self._windows.clear()

    def _allocate(self, specs: Sequence[TensorSpec], width: int) -> dict[str, int]:
        """All of them or none."""
        addresses: dict[str, int] = {}
        try:
            for spec in specs:
                nbytes = bytes_of(spec, self._sizes(width=width))
                addresses[spec.name] = self._device.allocate(nbytes)
        except EngineError:
            self._free(addresses)
            raise
        return addresses

    def _free(self, addresses: dict[str, int]) -> None:
        for address in addresses.values():
            self._device.release(address)
        addresses.clear()


def kept_specs(plans: Mapping[str, LoadedPlan]) -> tuple[TensorSpec, ...]:
    """`keys` and `values`."""
    return plans[_REUSE_KV].spec.outputs[-2:]


def window_specs(plans: Mapping[str, LoadedPlan]) -> tuple[TensorSpec, ...]:
    """`window_keys` and `window_values`."""
    return plans[_WINDOW].spec.outputs[-2:]


def kept_bytes(plans: Mapping[str, LoadedPlan], shape: LaneShape) -> int:
    """Device bytes of K and V."""
    return sum(bytes_of(spec, shape.sizes()) for spec in kept_specs(plans))


def window_bytes(plans: Mapping[str, LoadedPlan], shape: LaneShape, width: int) -> int:
    """Device bytes of a window's K and V."""
    return sum(bytes_of(spec, shape.sizes(width=width)) for spec in window_specs(plans))


def runs_of(columns: Int) -> list[tuple[int, int]]:
    """The runs of `window_columns` [B, W] that have been checked."""
    counts: NDArray[np.int64] = (columns != PAD).sum(axis=1)
    return [(int(row[0]), int(count)) for row, count in zip(columns, counts, strict=True)]
