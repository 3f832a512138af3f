"""What `gluon_machine` runs on: values, pointers, shared memory, mbarriers, TMA descriptors."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TIMEOUT_SECONDS = 20.0


class Value(torch.Tensor):
    """A tensor with Triton's casts."""

    def to(self, dtype: Any, *others: Any, bitcast: bool = False, **more: Any) -> Any:  # type: ignore[override]
        if bitcast:
            return self.view(dtype)
        return super().to(dtype, *others, **more)


def value(tensor: Tensor) -> Any:
    """As a `Value`."""
    return tensor.as_subclass(Value)


@dataclass(frozen=True)
class ElementType:
    """What a pointer points to."""

    element_ty: torch.dtype


@dataclass
class Pointer:
    """Places in a flat tensor."""

    memory: Tensor
    offset: Any = 0

    @property
    def dtype(self) -> ElementType:
        """Triton's pointer type."""
        return ElementType(self.memory.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + other)

    __radd__ = __add__


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all arrivals and all announced bytes are there."""

    count: int = 0
    arrived: int = 0
    bytes_missing: int = 0
    phase: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def update(self, arrivals: int = 0, announced: int = 0, copied: int = 0) -> None:
        """Count; bytes may come before they are announced."""
        with self.changed:
            self.arrived += arrivals
            self.bytes_missing += announced - copied
            if self.arrived > self.count:
                raise AssertionError("an mbarrier was arrived at too often")
            if self.arrived == self.count and self.bytes_missing == 0:
                self.arrived = 0
                self.phase += 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        """Until the phase of this parity has ended."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase % 2 != parity, TIMEOUT_SECONDS):
                raise AssertionError("an mbarrier was waited for in vain")


@dataclass
class Shared:
    """Bytes of shared memory seen as a tensor."""

    memory: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]

    def index(self, place: int) -> Any:
        """The part at a place of the first dimension."""
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        if not 0 <= place < self.shape[0]:
            raise AssertionError(f"place {place} of {self.shape}")
        part = self.memory[place * size : (place + 1) * size]
        return Shared(part, self.dtype, self.shape[1:])

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        return Shared(self.memory, dtype, tuple(shape))

    def permute(self, order: Sequence[int]) -> Turned:
        """Transposed."""
        return Turned(self)

    def _view(self) -> Tensor:
        """A swizzled tile of two bytes and rows of 256 lies as two halves of 128 bytes."""
        if len(self.shape) == 2 and self.shape[1] * self.dtype.itemsize == 256:
            halves = self.memory.view(self.dtype).view(2, self.shape[0], -1)
            return halves.permute(1, 0, 2)
        return self.memory.view(self.dtype).view(self.shape)

    def load(self, layout: Any) -> Any:
        """The values."""
        return value(self._view().clone().reshape(self.shape))

    def store(self, values: Tensor) -> None:
        """Overwrite it."""
        view = self._view()
        view.copy_(values.reshape(view.shape))


@dataclass
class Turned:
    """A transposed view."""

    of: Shared

    def load(self, layout: Any) -> Any:
        """The values."""
        return value(self.of.load(layout).t())

    def store(self, values: Tensor) -> None:
        """Overwrite it."""
        self.of.store(values.t())


class Barriers(list[Barrier]):
    """An array of mbarriers."""

    def index(self, place: int) -> Barrier:  # type: ignore[override]
        """One of them."""
        return self[int(place)]


@dataclass
class Box:
    """A TMA descriptor: a byte matrix of some stride, and the box that one copy moves."""

    memory: Tensor
    stride: int
    rows: int

    def read(self, row: int, byte: int) -> Tensor:
        """The box [rows, 128] at a place; zeros behind the memory."""
        places = (torch.arange(self.rows)[:, None] + row) * self.stride + byte + torch.arange(128)
        known = places < self.memory.numel()
        return torch.where(known, self.memory[places.clamp(max=self.memory.numel() - 1)], 0)
