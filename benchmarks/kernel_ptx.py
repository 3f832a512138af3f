"""Runs the kernels of another SM from their PTX, through the driver, behind the same `launch`.

An L40S kernel (sm_89) is PTX that any later GPU can load: the driver compiles it for the device at
hand. `borrowed(89)` replaces every jitted kernel by a `PtxKernel`, so that the checks of
`kernel_checks` run unchanged on what `compile_configuration(configuration, 89)` produced, with the
geometry and the launch arguments that an L40S would get. A launch that fits no configuration that
ships is an error, and the ledger of names tells which ones were launched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import fp8_checks
import kernel_checks as checks
import torch
import window_checks
from torch import Tensor
from triton import knobs

from lacache_trt.plugins.attention import split
from lacache_trt.plugins.triton_support import (
    POINTER_TYPES,
    Compiled,
    Configuration,
    compile_configuration,
)

DTYPES = (torch.float16, torch.bfloat16)
TYPES = POINTER_TYPES | {torch.int32: "*i32"}
HOMES = (
    (checks.fill, "attention_fill_kernel"),
    (checks.reuse, "attention_reuse_kernel"),
    (checks.attention, "attention_kernel"),
    (checks.attention, "attention_split_kernel"),
    (split, "attention_merge_kernel"),
    (checks.sample_block, "sample_chunk_kernel"),
    (checks.sample_block, "sample_merge_kernel"),
    (checks.rms_norm, "rms_norm_kernel"),
    (checks.rope, "rope_kernel"),
    (checks.swiglu, "swiglu_kernel"),
    (window_checks.kernel, "attention_window_kernel"),
    (window_checks.kernel, "attention_window_split_kernel"),
    (window_checks.write, "window_write_kernel"),
    (fp8_checks.rms_norm_quant, "rms_norm_quant_kernel"),
    (fp8_checks.swiglu_quant, "swiglu_quant_kernel"),
    (fp8_checks.group_quant, "group_quant_kernel"),
    (fp8_checks.group_linear, "stream_kernel"),
    (fp8_checks.group_linear, "tiled_kernel"),
    (fp8_checks.group_linear, "merge_kernel"),
)
Key = tuple[tuple[str, ...], frozenset[tuple[str, object]], int]


def shipping(sm: int) -> list[Configuration]:
    """Every configuration of every op at the shapes that the checks use."""
    found: list[Configuration] = []
    for dtype in DTYPES:
        for head_dim in (64, 128):
            found += checks.fill.configurations(dtype, head_dim, sm)
            found += checks.reuse.configurations(dtype, head_dim, sm)
            found += checks.attention.configurations(dtype, head_dim, sm)
            found += checks.rope.configurations(dtype, head_dim)
            found += window_checks.kernel.configurations(dtype, head_dim, sm)
            found += window_checks.write.configurations(dtype, head_dim)
        for vocabulary in checks.VOCABULARIES:
            found += checks.sample_block.configurations(dtype, vocabulary)
        for width in checks.NORM_WIDTHS:
            found += checks.rms_norm.configurations(dtype, width, 1e-5)
        for width in checks.FFN_WIDTHS:
            found += checks.swiglu.configurations(dtype, width)
        for width in fp8_checks.NORM_WIDTHS:
            found += fp8_checks.rms_norm_quant.configurations(dtype, width, sm)
            found += fp8_checks.group_quant.configurations(dtype, width, sm)
        for width in (*fp8_checks.FFN_WIDTHS, fp8_checks.NORM_WIDTHS[0]):
            found += fp8_checks.swiglu_quant.configurations(dtype, width, sm)
        for add in (False, True):
            found += fp8_checks.group_linear.configurations(dtype, sm, add)
    return found


def driver_call(function: Callable[..., Any], *arguments: object) -> Any:
    """Call the driver, raise on an error, return its one result if any."""
    status, *results = function(*arguments)
    if int(status) != 0:
        raise RuntimeError(f"{function.__name__}: {status}")
    return results[0] if results else None


class PtxKernel:
    """Stands for a jitted kernel: `kernel[grid](*arguments, **constants)` launches PTX."""

    def __init__(self, kernel: Any, sm: int, configurations: list[Configuration]) -> None:
        self.sm = sm
        self.loaded: dict[Key, tuple[Any, int]] = {}
        self.instances: dict[Key, list[Configuration]] = {}
        for each in configurations:
            if each.kernel is kernel:
                key = key_of(tuple(each.arguments.values()), each.constants, each.warps)
                self.instances.setdefault(key, []).append(each)

    @property
    def launched(self) -> list[str]:
        """Names of the configurations whose kernel ran; equal instances have several names."""
        return [each.name for key in self.loaded for each in self.instances[key]]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, (*grid, 1, 1)[:3])

    def _launch(
        self, grid: tuple[int, ...], *arguments: Tensor | int, num_warps: int, num_stages: int,
        **constants: object,
    ) -> None:  # fmt: skip
        types = tuple(TYPES[a.dtype] if isinstance(a, Tensor) else "i32" for a in arguments)
        key = key_of(types, constants, num_warps)
        configuration = self.instances[key][0]
        if configuration.stages != num_stages:
            raise ValueError(f"{configuration.name} ships with {configuration.stages} stages")
        if key not in self.loaded:
            self.loaded[key] = _load(compile_configuration(configuration, self.sm))
        function, shared = self.loaded[key]
        values = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
        kinds = [ctypes.c_void_p if isinstance(a, Tensor) else ctypes.c_int32 for a in arguments]
        scratch = (0, 0), (ctypes.c_void_p, ctypes.c_void_p)
        parameters = (*values, *scratch[0]), (*kinds, *scratch[1])
        from cuda.bindings import driver

        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        driver_call(
            driver.cuLaunchKernel, function, *grid, 32 * num_warps, 1, 1, shared, stream,
            parameters, 0,
        )  # fmt: skip


def key_of(types: tuple[str, ...], constants: Mapping[str, object], warps: int) -> Key:
    """What tells instances of a kernel apart: argument types, constants and warps."""
    return types, frozenset(constants.items()), warps


def _load(compiled: Compiled) -> tuple[Any, int]:
    """(the driver's function, its dynamic shared memory)."""
    from cuda.bindings import driver

    torch.cuda.current_stream().synchronize()  # the primary context exists and is current
    module = driver_call(driver.cuModuleLoadData, compiled.ptx.encode() + b"\0")
    function = driver_call(driver.cuModuleGetFunction, module, compiled.entry.encode())
    size = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver_call(driver.cuFuncSetAttribute, function, size, compiled.shared)
    return function, compiled.shared


@contextmanager
def borrowed(sm: int) -> Iterator[list[PtxKernel]]:
    """Within it, `launch` of every op runs the PTX of `sm`."""
    configurations = shipping(sm)
    originals = [getattr(home, name) for home, name in HOMES]
    kernels = [PtxKernel(kernel, sm, configurations) for kernel in originals]
    with knobs.runtime.scope():
        knobs.runtime.override_arch = f"sm{sm}"
        for (home, name), kernel in zip(HOMES, kernels, strict=True):
            setattr(home, name, kernel)
        try:
            yield kernels
        finally:
            for (home, name), original in zip(HOMES, originals, strict=True):
                setattr(home, name, original)
