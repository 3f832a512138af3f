"""Small host arrays packed into one pinned buffer and its device twin.

A captured graph holds one copy of the whole buffer and reads its pieces as views, so a step costs
the host one write per array and no call.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lacache_trt.engines.padding import fitted

Layout = Mapping[str, tuple[tuple[int, ...], str]]
_TORCH = {"int32": torch.int32, "float32": torch.float32}


class StagedInputs:
    """Named int32 and float32 arrays of fixed shapes.

    The host side is page-locked, so that a copy captured into a graph is asynchronous; only a
    device other than CUDA (tests) does without.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        sizes = {name: int(np.prod(shape)) for name, (shape, _) in layout.items()}
        total = max(1, sum(sizes.values()))
        self._host = torch.zeros(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(total, dtype=torch.int32, device=device)
        self.tensors: dict[str, Tensor] = {}
        self._arrays: dict[str, NDArray[np.generic]] = {}
        host, offset = self._host.numpy(), 0
        for name, (shape, dtype) in layout.items():
            piece = slice(offset, offset + sizes[name])
            self._arrays[name] = host[piece].view(dtype).reshape(shape)
            self.tensors[name] = self._device[piece].view(_TORCH[dtype]).view(shape)
            offset += sizes[name]

    def write(self, values: Mapping[str, NDArray[np.generic]]) -> None:
        """Write host values; id lists may be narrower than the buffer and are padded with -1."""
        for name, value in values.items():
            target = self._arrays[name]
            target[...] = fitted(name, value, target.shape)

    def upload(self) -> None:
        """Enqueue the copy to the device; captured into a graph, it repeats with each replay."""
        self._device.copy_(self._host, non_blocking=True)
