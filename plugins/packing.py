"""Describes an op's kernels as data and serialises them for the plugin library.

A `PluginProgram` is everything that the library needs to be that op on one SM: which kernels, when
and how to launch them, the outputs and the workspace. `pack` compiles the kernels, which needs no
GPU, and returns the bytes of the node's `program` attribute; `native/format.h` has the layout.

Why an attribute of every node and not one constant input shared by the nodes: an input's bytes lie
in device memory, where `enqueue` could only read them with a copy and a wait, which is forbidden
while a CUDA graph is captured (and TensorRT captures `enqueue` to time it). The price: TensorRT
stores a node's fields twice, about 0.2 MB per Attention node, 6 MB in a 16 GB plan. In memory the
library keeps equal programs once and loads their kernels once.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lacache_trt.errors import EngineError
from lacache_trt.plugins.abi import abi_hash
from lacache_trt.plugins.expressions import Expression, constant
from lacache_trt.plugins.triton_support import Compiled, Configuration, compile_configuration

FIELD = "program"
WORKSPACE = "workspace"
MAGIC = 0x314E49425543434C
_INPUT, _OUTPUT, _WORKSPACE_POINTER, _NULL, _SCALAR = range(5)
WORD_BYTES = 4
"""FP8 values in an INT32 of `fp8_as_int32`."""
_SCRATCH_POINTERS = 2  # global and profile scratch, since Triton 3.4
_MASK = (1 << 64) - 1
_DATA_TYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.int8: 2,
    torch.int32: 3,
    torch.float8_e4m3fn: 6,
    torch.bfloat16: 7,
}


@dataclass(frozen=True)
class InputRule:
    """An input: its name in the op's specification, dtype and rank."""

    name: str
    dtype: torch.dtype
    rank: int


@dataclass(frozen=True)
class OutputRule:
    """An output: its name in the op's specification, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[Expression, ...]


@dataclass(frozen=True)
class LaunchRule:
    """One kernel launch.

    Attributes:
        configuration: the kernel instance; its arguments are bound by name.
        grid: programs along x, y, z.
        scalars: value of every i32 argument.
        tensors: pointer argument name to tensor name, where they differ.
        condition: the launch is skipped where this is 0.
    """

    configuration: Configuration
    grid: tuple[Expression, Expression, Expression]
    scalars: Mapping[str, Expression]
    tensors: Mapping[str, str] = field(default_factory=dict)
    condition: Expression = field(default_factory=lambda: constant(1))


@dataclass(frozen=True)
class PluginProgram:
    """An op on one SM.

    Attributes:
        op: ONNX operator type.
        inputs: in the op's order.
        outputs: in the op's order.
        workspace: bytes; it must grow with every dimension, because TensorRT asks only for the
            largest shapes of a profile.
        launches: run in this order.
    """

    op: str
    inputs: tuple[InputRule, ...]
    outputs: tuple[OutputRule, ...]
    workspace: Expression
    launches: tuple[LaunchRule, ...]


def pack(
    program: PluginProgram, sm: int, *, ptx: bool = False, fp8_as_int32: bool = False
) -> bytes:
    """Compile the kernels for `sm` and serialise.

    Args:
        program: the op.
        sm: compute capability, 89 or 90.
        ptx: pack PTX, for tests on a newer GPU.
        fp8_as_int32: declare FP8 tensors as INT32, four values to a word, for TensorRT 8.5.
    """
    compiled: dict[str, Compiled] = {}
    for launch in program.launches:
        name = launch.configuration.name
        if name not in compiled:
            compiled[name] = compile_configuration(launch.configuration, sm)
    writer = _Writer([rule.name for rule in program.inputs])
    writer.words(MAGIC, abi_hash(), sm)
    writer.blob(program.op.encode())
    writer.words(len(program.inputs))
    for rule in program.inputs:
        writer.words(_data_type(rule.dtype, fp8_as_int32), rule.rank)
    writer.words(len(program.outputs))
    for output in program.outputs:
        writer.words(_data_type(output.dtype, fp8_as_int32), len(output.shape))
        carried = fp8_as_int32 and output.dtype == torch.float8_e4m3fn
        writer.expressions(*(_in_words(output.shape) if carried else output.shape))
    writer.expressions(program.workspace)
    writer.words(len(compiled))
    for kernel in compiled.values():
        writer.blob(kernel.entry.encode())
        writer.blob(kernel.ptx.encode() + b"\0" if ptx else kernel.cubin)
        writer.words(32 * kernel.warps, kernel.shared)
    writer.words(len(program.launches))
    for launch in program.launches:
        _write_launch(writer, program, launch, list(compiled).index(launch.configuration.name))
    return writer.finish()


def _write_launch(writer: _Writer, program: PluginProgram, launch: LaunchRule, kernel: int) -> None:
    arguments = launch.configuration.arguments
    writer.words(kernel)
    writer.expressions(launch.condition, *launch.grid)
    writer.words(len(arguments) + _SCRATCH_POINTERS)
    for name, kind in arguments.items():
        if kind == "i32":
            writer.words(_SCALAR)
            writer.expressions(_scalar(program, launch, name))
        else:
            writer.words(*_pointer(program, launch, name))
    for _ in range(_SCRATCH_POINTERS):
        writer.words(_NULL, 0)


def _scalar(program: PluginProgram, launch: LaunchRule, name: str) -> Expression:
    if name not in launch.scalars:
        raise EngineError(
            f"{program.op}: no value for argument {name!r} of {launch.configuration.name}",
            got=", ".join(launch.scalars),
        )
    return launch.scalars[name]


def _pointer(program: PluginProgram, launch: LaunchRule, argument: str) -> tuple[int, int]:
    name = launch.tensors.get(argument, argument)
    if name == WORKSPACE:
        return _WORKSPACE_POINTER, 0
    for kind, rules in ((_INPUT, program.inputs), (_OUTPUT, program.outputs)):
        names = [rule.name for rule in rules]
        if name in names:
            return kind, names.index(name)
    raise EngineError(
        f"{program.op} has no tensor for {argument!r} of {launch.configuration.name}",
        got=name,
    )


def _in_words(shape: tuple[Expression, ...]) -> tuple[Expression, ...]:
    return (*shape[:-1], shape[-1] // WORD_BYTES)


def _data_type(dtype: torch.dtype, fp8_as_int32: bool) -> int:
    if fp8_as_int32 and dtype == torch.float8_e4m3fn:
        dtype = torch.int32
    if dtype not in _DATA_TYPES:
        raise EngineError(
            "TensorRT plugins cannot have this dtype",
            got=dtype,
            expected=", ".join(str(known) for known in _DATA_TYPES),
        )
    return _DATA_TYPES[dtype]


class _Writer:
    """Appends words, bytes and expressions; see `native/format.h`."""

    def __init__(self, inputs: Sequence[str]) -> None:
        self._inputs = inputs
        self._data = bytearray()

    def words(self, *values: int) -> None:
        for value in values:
            self._data += struct.pack("<Q", value & _MASK)

    def blob(self, data: bytes) -> None:
        self.words(len(data))
        self._data += data + bytes(-len(data) % 8)

    def expressions(self, *expressions: Expression) -> None:
        for expression in expressions:
            instructions = expression.instructions(self._inputs)
            self.words(len(instructions), *instructions)

    def finish(self) -> bytes:
        self.words(_fnv1a(self._data))
        return bytes(self._data)


def _fnv1a(data: bytearray) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & _MASK
    return value
