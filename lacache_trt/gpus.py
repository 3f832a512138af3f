"""The NVIDIA GPUs of this machine, asked through the driver's own library."""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

# cuDeviceGetAttribute: CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_NAME_BYTES = 256
_SMI_SECONDS = 10


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    compute_capability: str
    memory_bytes: int

    @property
    def sm(self) -> int:
        """The compute capability as one number: 89, 90."""
        return int(self.compute_capability.replace(".", ""))


@dataclass(frozen=True)
class GpuReport:
    """The driver and its GPUs, or what is wrong.

    Attributes:
        driver: version of the driver, as nvidia-smi prints it.
        cuda: newest CUDA version that the driver runs.
        devices: the GPUs.
        problem: why there are none.
    """

    driver: str | None
    cuda: str | None
    devices: tuple[Gpu, ...]
    problem: str | None


class _DriverError(Exception):
    """A call of the driver's library failed."""


def find_gpus() -> GpuReport:
    """Ask libcuda; never raises."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return GpuReport(None, None, (), "no NVIDIA driver (libcuda.so.1 is missing)")
    try:
        _call(library.cuInit, ctypes.c_uint(0))
        number = _integer(library.cuDriverGetVersion)
        count = _integer(library.cuDeviceGetCount)
        devices = tuple(_device(library, index) for index in range(count))
    except (_DriverError, AttributeError) as error:
        return GpuReport(_driver_version(), None, (), str(error))
    cuda = f"{number // 1000}.{number % 1000 // 10}"
    return GpuReport(_driver_version(), cuda, devices, None if devices else "no GPU is visible")


def _device(library: ctypes.CDLL, index: int) -> Gpu:
    handle = ctypes.c_int(_integer(library.cuDeviceGet, ctypes.c_int(index)))
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _call(library.cuDeviceGetName, name, ctypes.c_int(_NAME_BYTES), handle)
    memory = ctypes.c_size_t()
    _call(library.cuDeviceTotalMem_v2, ctypes.byref(memory), handle)
    attribute = library.cuDeviceGetAttribute
    major = _integer(attribute, ctypes.c_int(_CAPABILITY_MAJOR), handle)
    minor = _integer(attribute, ctypes.c_int(_CAPABILITY_MINOR), handle)
    return Gpu(name.value.decode("utf-8", "replace"), f"{major}.{minor}", memory.value)


def _integer(function: Callable[..., int], *arguments: object) -> int:
    result = ctypes.c_int()
    _call(function, ctypes.byref(result), *arguments)
    return result.value


def _call(function: Callable[..., int], *arguments: object) -> None:
    status = function(*arguments)
    if status != 0:
        name = getattr(function, "__name__", "driver call")
        raise _DriverError(f"the NVIDIA driver does not answer: {name} returned {status}")


def _driver_version() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_SMI_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = answer.stdout.split()
    return lines[0] if lines else None
