"""Runs `LayerStack.launch` on the CPU, and compiles its kernel ahead of time."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from gluon_machine import Machine, run_threads
from gluon_memory import TIMEOUT_SECONDS, Barrier, Barriers, Box, Pointer, Shared
from torch import Tensor

from lacache_trt.plugins.window_layers import (
    attend,
    grid,
    kernel,
    launch,
    multiply,
    phases,
    stream,
)

_here = threading.local()


def raw(address: int, count: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """Memory at an address, not touched until it is read."""
    buffer = (ctypes.c_int8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


def record(*names: str) -> Any:
    """A constructor that takes these fields by position."""
    return lambda *values: SimpleNamespace(**dict(zip(names, values, strict=True)))


def product_shape(width: int, columns: int, fp8: bool, programs: int) -> SimpleNamespace:
    steps = width // (128 if fp8 else 64)
    tiles = columns // 128
    most = launch.most_parts(tiles, programs)
    return SimpleNamespace(N=columns, STEPS=steps, TOTAL=tiles * steps, FP8=fp8, MOST=most)


def compile_for_hopper(fp8: bool) -> Any:
    """LLaDA-8B's instance."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    half, floats = "*bf16", "*fp32"
    weight_box = f"tensordesc<i8[64, 128],{stream.BYTE_TILE.value!r}>"
    rows_box = f"tensordesc<i8[32, 128],{stream.BYTE_TILE.value!r}>"
    scale_box = f"tensordesc<i8[1, 128],{stream.ROW_SCALES.value!r}>"
    types = dict.fromkeys(kernel.window_layers_kernel.arg_names, "constexpr")
    types |= {"table": "*i64", "places": "*i32", "counter": "*i32"}
    types |= dict.fromkeys(("window_columns", "valid_from", "valid_to"), "*i32")
    types |= dict.fromkeys(("qkv", "attn_out", "gate_up", "down", "keys", "values"), weight_box)
    types |= dict.fromkeys(("hidden", "kept_keys", "kept_values", "x_attn", "x_out"), half)
    types |= dict.fromkeys(("x_ffn", "x_down"), "*fp8e4nv" if fp8 else half)
    types |= dict.fromkeys(("x_attn_box", "x_out_box", "x_ffn_box", "x_down_box"), rows_box)
    types |= dict.fromkeys(("ffn_scale_box", "down_scale_box"), scale_box)
    types |= dict.fromkeys(("cos", "sin", "ffn_scale", "down_scale", "partial"), floats)
    types |= dict.fromkeys(("squares", "state", "maxima", "totals"), floats)
    numbers = ("layers", "length", "rows")
    types |= dict.fromkeys(numbers, "i32")
    sizes = launch.LayerSizes(4096, 4096, 4096, 12288, fp8, False, 1e-5)
    function = kernel.window_layers_kernel
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if types[name].startswith("*")
    }
    constants = launch.constants(sizes, 132)
    source = GluonASTSource(function, types, constexprs=constants, attrs=aligned)
    options = {"num_warps": launch.WARPS, "launch_cooperative_grid": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


class GridCounter:
    """The arrivals of a grid's programs, which the CPU's threads wait for."""

    def __init__(self, programs: int) -> None:
        self.programs, self.arrived = programs, 0
        self.changed = threading.Condition()

    def arrive(self, counter: Any) -> None:
        with self.changed:
            self.arrived += 1
            self.changed.notify_all()

    def wait(self, counter: Any, arrivals: int) -> None:
        assert arrivals % self.programs == 0
        with self.changed:
            if not self.changed.wait_for(lambda: self.arrived >= arrivals, TIMEOUT_SECONDS):
                raise AssertionError("the grid was waited for in vain")

    def functions(self) -> dict[str, Any]:
        return {"arrive": self.arrive, "wait": self.wait, "wait_to_copy": self.wait}


class Grid:
    """Launches a kernel's source as threads, one for each group of warps of each program."""

    def __init__(self) -> None:
        self.machine = Machine([grid, stream, multiply, phases, attend, kernel])
        self.machine.supply(
            Source=record(
                "table", "places", "head_row", "layer_rows", "key_pairs", "program", "layers",
                "PROGRAMS", "IN_FLIGHT", "EARLY",
            ),
            Sizes=record(
                "D", "Q", "KV", "F", "FP8", "BIAS", "EPS", "SCALE", "LANES", "CHUNKS",
            ),
            Window=record(
                "cos", "sin", "kept_keys", "kept_values", "rows", "start", "kept", "low", "high",
                "first_key",
            ),
            Work=record(
                "hidden", "x_attn", "x_out", "x_ffn", "x_down", "ffn_scale", "down_scale",
                "partial", "squares", "state", "maxima", "totals", "counter",
            ),
            Channel=record(
                "ring", "x_ring", "scale_ring", "full", "x_full", "empty", "x_empty", "go",
                "factors",
            ),
            Product=product_shape,
            address=self.address,
        )  # fmt: skip
        language = self.machine.gl
        language.program_id = lambda axis: _here.program
        language.allocate_shared_memory = self.allocate
        language.warp_specialize = self.specialise

    def __getitem__(self, shape: tuple[int]) -> Any:
        self.programs = shape[0]
        return self.run

    def run(
        self, *arguments: Any, num_warps: int, launch_cooperative_grid: bool, **constants: Any
    ) -> None:
        self.machine.supply(**GridCounter(self.programs).functions())
        found = [self.argument(each) for each in arguments]
        program = self.machine.window_layers_kernel

        def body(number: int) -> None:
            _here.program = number
            program(*found, **constants)

        run_threads([lambda number=number: body(number) for number in range(self.programs)])

    def argument(self, given: Any) -> Any:
        return Pointer(given.view(-1)) if isinstance(given, Tensor) else given

    def address(self, source: Any, layer: int, column: int, dtype: torch.dtype) -> Pointer | None:
        found = int(source.table.memory[layer * int(self.machine.TABLE_COLUMNS) + column])
        return Pointer(raw(found, 1 << 22, dtype)) if found else None

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if type(layout).__name__ == "MBarrierLayout":
            return Barriers(Barrier() for _ in range(shape[0]))
        size = int(torch.tensor(shape).prod()) * dtype.itemsize
        memory = torch.randint(-128, 127, (size,), dtype=torch.int8)
        return Shared(memory, dtype, tuple(shape))

    def specialise(self, functions: Any, warps: list[int], registers: list[int]) -> None:
        number = _here.program

        def body(function: Any, arguments: Any) -> None:
            _here.program = number
            function(*arguments)

        run_threads([lambda f=f, a=a: body(f, a) for f, a in functions])


def run_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`LayerStack.launch` runs on the CPU from here on."""

    def descriptor(base: Tensor, shape: list[int], stride: int, rows: int, *_: Any) -> Box:
        return Box(raw(base.data_ptr(), shape[0] * stride), stride, rows)

    monkeypatch.setattr(launch, "_descriptor", descriptor)
    monkeypatch.setattr(kernel, "window_layers_kernel", Grid())
