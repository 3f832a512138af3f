"""What every Triton kernel of the toolkit shares on the host.

A `Configuration` is one kernel instance that ships: the jitted function, the types of its run-time
arguments, the values of its constants and its launch geometry. `compile_configuration` compiles it
ahead of time for one SM without a GPU and reads what it costs. The rules that make the result fit
a plugin's cubin field, and which `compile_configuration` checks:
    - pointers are 16-byte aligned, every run-time scalar is an i32, the rest is constant;
    - no global or profile scratch, one CTA per cluster;
    - no register spills (a stack frame is a spill: these kernels have no other use for one).
Kernels are decorated with `unspecialised`, so a scalar that happens to be 1 or a multiple of 16
does not change the code: what the JIT runs is what the ahead-of-time compiler produced.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from lacache_trt.errors import EngineError

LOG2_E = 1.4426950408889634
POINTER_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
}
SHARED_MEMORY_LIMIT = {89: 99 * 1024, 90: 227 * 1024}


def unspecialised(*scalars: str) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` that compiles one kernel for all values of the named i32 arguments."""
    decorate: Callable[[Callable[..., None]], Any] = triton.jit(do_not_specialize=list(scalars))
    return decorate


@dataclass(frozen=True)
class Tiles:
    """Geometry of a tiled attention kernel: query rows x keys per step, warps, pipeline depth."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def label(self) -> str:
        """Short stable name, for example m64n64w4s3."""
        return f"m{self.rows}n{self.keys}w{self.warps}s{self.stages}"


@dataclass(frozen=True)
class Configuration:
    """One kernel instance that ships.

    Attributes:
        name: stable name, unique over all ops.
        kernel: the jitted function.
        arguments: run-time argument name to Triton type ("*bf16", "*i32", "i32"), in call order.
        constants: constexpr name to value.
        warps: warps per program.
        stages: software pipeline depth.
    """

    name: str
    kernel: Any
    arguments: Mapping[str, str]
    constants: Mapping[str, object]
    warps: int
    stages: int


@dataclass(frozen=True)
class Compiled:
    """An ahead-of-time compiled configuration and what it costs."""

    name: str
    sm: int
    entry: str
    cubin: bytes
    ptx: str
    shared: int
    registers: int
    spills: int
    warps: int

    def summary(self) -> str:
        """One line for a table."""
        return (
            f"{self.name:58s} sm_{self.sm} {self.registers:4d} registers "
            f"{self.shared:7d} B shared {self.spills:4d} B spilled {len(self.cubin):7d} B cubin"
        )


def dtype_label(dtype: torch.dtype) -> str:
    """fp16, bf16 or fp32."""
    return POINTER_TYPES[dtype].removeprefix("*")


def next_power_of_two(value: int) -> int:
    """Smallest power of two that is at least `value` and at least 1."""
    return 1 << max(0, value - 1).bit_length()


def ceil_div(value: int, divisor: int) -> int:
    """Integer division rounded up."""
    return -(-value // divisor)


def compile_configuration(configuration: Configuration, sm: int) -> Compiled:
    """Compile for `sm` (89, 90, ...) on any machine and check the plugin's rules."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = configuration.kernel
    types = {name: configuration.arguments.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if types[name].startswith("*")
    }
    source = ASTSource(kernel, types, constexprs=dict(configuration.constants), attrs=aligned)
    options = {"num_warps": configuration.warps, "num_stages": configuration.stages}
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True  # a third of the cubin's size
        result = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    metadata = result.metadata
    registers, stack = resource_usage(result.asm["cubin"])
    compiled = Compiled(
        name=configuration.name,
        sm=sm,
        entry=metadata.name,
        cubin=result.asm["cubin"],
        ptx=result.asm["ptx"],
        shared=metadata.shared,
        registers=registers,
        spills=stack,
        warps=metadata.num_warps,
    )
    _check_limits(compiled, metadata.global_scratch_size + metadata.profile_scratch_size)
    return compiled


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers per thread, stack bytes per thread) of a cubin with one kernel."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if found is None:
        raise EngineError("cuobjdump printed no resource usage", got=text)
    return int(found[1]), int(found[2]) + int(found[3])


def _check_limits(compiled: Compiled, scratch: int) -> None:
    if scratch:
        raise EngineError(f"{compiled.name} needs global scratch memory", got=scratch, expected=0)
    if compiled.spills:
        raise EngineError(
            f"{compiled.name} spills registers on sm_{compiled.sm}",
            got=f"{compiled.spills} bytes",
            expected="none",
            fix="use smaller tiles or more warps",
        )
    limit = SHARED_MEMORY_LIMIT.get(compiled.sm)
    if limit is not None and compiled.shared > limit:
        raise EngineError(
            f"{compiled.name} does not fit in the shared memory of sm_{compiled.sm}",
            got=compiled.shared,
            expected=f"at most {limit}",
            fix="use smaller tiles or fewer stages",
        )


def device_sm(tensor: torch.Tensor) -> int:
    """Compute capability that kernels are compiled for: 89, 90, ...; 90 for the interpreter.

    Triton's TRITON_OVERRIDE_ARCH=sm89 is honoured, so that the kernels of an L40S can be checked
    on a newer GPU.
    """
    override = triton.knobs.runtime.override_arch
    if override:
        return int(override.removeprefix("sm"))
    if tensor.device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


@triton.jit
def safe_anchor(maximum):  # type: ignore[no-untyped-def]
    """The maximum, or 0 where it is -inf, so that no difference with it is NaN."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)
