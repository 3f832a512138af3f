"""Runs Gluon kernels on a CPU, as they are written: every group of warps is a thread.

Triton has no interpreter for Gluon. Here the Python source of the kernel's functions runs with
stand-ins for the language: tensors are torch tensors and layouts are ignored, a pointer is a flat
tensor and an offset, shared memory is bytes, an mbarrier counts arrivals and bytes, and copies of
the TMA happen at once. What it shows is that indices, masks, orders and waits are right, and that
nothing waits forever; not that layouts fit or that memory is ordered as a GPU orders it.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gluon_memory import TIMEOUT_SECONDS, Barrier, Box, ElementType, Pointer, Shared, value
from torch import Tensor


class _Mbarrier:
    """Stands for the module `mbarrier`."""

    class MBarrierLayout:
        """Marks allocations of mbarriers."""

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = count

    @staticmethod
    def wait(barrier: Barrier, parity: Any, pred: Any = True) -> None:
        if pred:
            barrier.wait(int(parity))

    @staticmethod
    def arrive(barrier: Barrier, pred: Any = True) -> None:
        if pred:
            barrier.update(arrivals=1)

    @staticmethod
    def expect(barrier: Barrier, count: int) -> None:
        barrier.update(arrivals=1, announced=count)


class _Tma:
    """Stands for the module `tma`."""

    @staticmethod
    def async_copy_global_to_shared(box: Box, place: Any, barrier: Barrier, target: Shared) -> None:
        found = box.read(int(place[0]), int(place[1]))
        target.memory.copy_(found.reshape(-1))
        barrier.update(copied=found.numel())


def _load(pointer: Pointer, mask: Any = None, other: Any = 0.0) -> Any:
    offset = torch.as_tensor(pointer.offset)
    if mask is None:
        found = pointer.memory[offset]
        return found.item() if offset.ndim == 0 and not found.is_floating_point() else value(found)
    wanted, offset = torch.broadcast_tensors(torch.as_tensor(mask), offset)
    found = pointer.memory[torch.where(wanted, offset, 0)]
    return value(torch.where(wanted, found, torch.tensor(other, dtype=found.dtype)))


def _store(pointer: Pointer, values: Any, mask: Any = None) -> None:
    offset = torch.as_tensor(pointer.offset)
    values = torch.as_tensor(values).to(pointer.memory.dtype)
    offset, values = torch.broadcast_tensors(offset, values)
    if mask is not None:
        wanted = torch.as_tensor(mask).expand(offset.shape)
        offset, values = offset[wanted], values[wanted]
    pointer.memory[offset.as_subclass(Tensor)] = values.as_subclass(Tensor)


def _product(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    left, right = (x.load(None) if not isinstance(x, Tensor) else x for x in (a, b))
    found = left.to(torch.float32) @ right.to(torch.float32)
    return value(found + acc) if use_acc else value(found)


def _either(choose: Callable[..., Any]) -> Callable[..., Any]:
    def call(a: Any, b: Any) -> Any:
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            return int(choose(torch.tensor(a), torch.tensor(b)))
        return value(choose(torch.as_tensor(a), torch.as_tensor(b)))

    return call


def _where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(condition, Tensor):
        return a if condition else b
    return value(torch.where(condition, a, b))


def _full_like(x: Tensor, fill: float) -> Any:
    return value(torch.full_like(x, fill))


def language() -> types.SimpleNamespace:
    """Stands for `gl`."""
    return types.SimpleNamespace(
        float32=torch.float32, bfloat16=torch.bfloat16, int32=torch.int32, int64=torch.int64,
        int8=torch.int8, float8e4nv=torch.float8_e4m3fn,
        constexpr=lambda x: x, static_range=range, load=_load, store=_store, where=_where,
        minimum=_either(torch.minimum), maximum=_either(torch.maximum), full_like=_full_like,
        SliceLayout=lambda *_: None, BlockedLayout=lambda *_: None,
        DotOperandLayout=lambda *_: None, cdiv=lambda a, b: -(-a // b),
        arange=lambda first, stop, layout: value(torch.arange(first, stop, dtype=torch.int64)),
        zeros=lambda shape, dtype, layout: value(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, fill, dtype, layout: value(torch.full(shape, fill, dtype=dtype)),
        sum=lambda x, axis: _scalar(x.sum(axis)), max=lambda x, axis: value(x.amax(axis)),
        exp=torch.exp, exp2=torch.exp2, rsqrt=torch.rsqrt, div_rn=lambda a, b: a / b,
        fma=lambda a, b, c: (a.double() * b.double() + c.double()).to(torch.float32),
        convert_layout=lambda x, layout: x, permute=lambda x, order: value(x.permute(order)),
        reshape=lambda x, shape: value(x.reshape(shape)),
        join=lambda a, b: value(torch.stack([a, b], dim=-1)),
        multiple_of=lambda x, n: x, thread_barrier=lambda: None,
        pointer_type=ElementType,
    )  # fmt: skip


def _scalar(x: Tensor) -> Any:
    return int(x) if x.ndim == 0 and not x.is_floating_point() else value(x)


class Machine:
    """The functions of some modules, ready to run on the CPU."""

    def __init__(self, modules: Sequence[types.ModuleType]) -> None:
        self._names: dict[str, Any] = {}
        common = {
            "gl": language(), "mbarrier": _Mbarrier, "tma": _Tma, "warpgroup_mma": _product,
            "mma_v2": _product, "fence_async_shared": lambda: None,
            "warpgroup_mma_wait": lambda pending, deps: deps[0] if len(deps) == 1 else tuple(deps),
        }  # fmt: skip
        for module in modules:
            for name, found in vars(module).items():
                if hasattr(found, "fn"):
                    self._names.setdefault(name, self._function(found.fn))
                elif type(found).__name__ == "constexpr":
                    self._names.setdefault(name, found.value)
        self._names |= common

    def _function(self, function: types.FunctionType) -> Callable[..., Any]:
        return types.FunctionType(
            function.__code__, self._names, function.__name__, function.__defaults__
        )

    def __getattr__(self, name: str) -> Any:
        return self._names[name]

    def supply(self, **names: Any) -> None:
        """Replace functions by name, for example the grid's barrier."""
        self._names |= names


def run_threads(bodies: Sequence[Callable[[], None]]) -> None:
    """Run all at once, often interrupted; the first error of any ends the test."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        _run_threads(bodies)
    finally:
        sys.setswitchinterval(before)


def _run_threads(bodies: Sequence[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_SECONDS)
    if errors:
        raise errors[0]
    if any(thread.is_alive() for thread in threads):
        raise AssertionError("a thread did not end")
