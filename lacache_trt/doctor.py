"""What this machine can export, build and run. Nothing heavy is imported to find out."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import lacache_trt
from lacache_trt.doctor_extras import Extra, find_extras, fp8_ability
from lacache_trt.doctor_tensorrt import Ability as Ability
from lacache_trt.doctor_tensorrt import install_line, tensorrt_abilities
from lacache_trt.engines.registry import ENGINES, TENSORRT_ENGINES, EngineEntry
from lacache_trt.gpus import GpuReport, find_gpus

# Import name, distributions that provide it, and what it is for.
_PACKAGES = (
    ("numpy", ("numpy",), "everything"),
    ("onnxruntime", ("onnxruntime", "onnxruntime-gpu"), "onnxruntime engine"),
    ("tokenizers", ("tokenizers",), "text prompts"),
    ("jinja2", ("jinja2",), "chat templates"),
    ("torch", ("torch",), "export, cuda engine"),
    ("transformers", ("transformers",), "export"),
    ("safetensors", ("safetensors",), "export"),
    ("onnx", ("onnx",), "export"),
    ("onnx_ir", ("onnx-ir",), "export"),
    ("onnxscript", ("onnxscript",), "export"),
    ("triton", ("triton",), "cuda engine, TensorRT plugins"),
    (
        "tensorrt",
        ("tensorrt", "tensorrt-cu13-bindings", "tensorrt-cu12-bindings"),
        "tensorrt engine",
    ),
    ("tensorrt_rtx", ("tensorrt-rtx", "tensorrt-rtx-cu13-bindings"), "tensorrt-rtx engine"),
    ("pycuda", ("pycuda",), "running TensorRT engines"),
    ("cuda.bindings", ("cuda-bindings",), "running TensorRT engines"),
)
_EXPORT = ("torch", "transformers", "safetensors", "onnx", "onnx_ir", "onnxscript")


@dataclass(frozen=True)
class Package:
    """One package: its version, or None where it is not installed."""

    name: str
    version: str | None
    used_for: str


@dataclass(frozen=True)
class MachineReport:
    """Everything that `doctor` found."""

    toolkit_version: str
    python: str
    system: str
    cpus: int
    memory_bytes: int | None
    free_memory_bytes: int | None
    free_disk_bytes: int
    compilers: dict[str, str | None]
    gpu: GpuReport
    packages: tuple[Package, ...]
    extras: tuple[Extra, ...]
    abilities: tuple[Ability, ...]
    healthy: bool


def examine() -> MachineReport:
    """Look at this machine."""
    packages = tuple(_package(*entry) for entry in _PACKAGES)
    installed = {package.name for package in packages if package.version is not None}
    gpu = find_gpus()
    others = (entry for entry in ENGINES.values() if entry.name not in TENSORRT_ENGINES)
    abilities = (
        _export_ability(installed),
        *tensorrt_abilities(gpu),
        *(_engine(entry) for entry in others),
        fp8_ability(gpu),
    )
    memory = _memory()
    return MachineReport(
        toolkit_version=lacache_trt.__version__,
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        memory_bytes=memory.get("MemTotal"),
        free_memory_bytes=memory.get("MemAvailable"),
        free_disk_bytes=shutil.disk_usage(".").free,
        compilers={name: shutil.which(name) for name in ("c++", "nvcc", "trtexec")},
        gpu=gpu,
        packages=packages,
        extras=find_extras(version),
        abilities=abilities,
        healthy=any(ability.works for ability in abilities if ability.name == "run onnxruntime"),
    )


def _package(name: str, distributions: tuple[str, ...], used_for: str) -> Package:
    for distribution in distributions:
        try:
            return Package(name, version(distribution), used_for)
        except PackageNotFoundError:
            continue
    return Package(name, None, used_for)


def _export_ability(installed: set[str]) -> Ability:
    missing = [name for name in _EXPORT if name not in installed]
    if missing:
        return Ability(
            "export",
            False,
            f"{', '.join(missing)} not installed",
            install_line('pip install "lacache-trt[export]"'),
        )
    return Ability("export", True, "all packages are installed")


def _engine(entry: EngineEntry) -> Ability:
    name = f"run {entry.name}"
    missing = entry.missing()
    if missing:
        reason = f"{', '.join(missing)} not installed"
        return Ability(name, False, reason, install_line(entry.install))
    problem = entry.gpu_problem()
    if problem is not None:
        return Ability(name, False, problem)
    return Ability(name, True, entry.description)


def _memory() -> dict[str, int]:
    """Bytes by the names of /proc/meminfo; empty where there is none."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            rows = [line.split() for line in file]
    except OSError:
        return {}
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}
