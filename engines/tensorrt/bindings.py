"""Finds TensorRT or TensorRT-RTX and evens out what differs between their packages."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lacache_trt.engines.registry import ENGINES
from lacache_trt.engines.tensorrt.legacy_api import LegacyTensorRT, is_legacy
from lacache_trt.errors import EngineError, MissingDependencyError
from lacache_trt.plugins.library import cache_folder, find_compiler

TENSORRT, RTX = "tensorrt", "tensorrt-rtx"
_RTX_NAME = "libtensorrt_rtx.so"


def import_tensorrt(flavour: str) -> Any:
    """The Python module of `tensorrt` or `tensorrt-rtx`.

    Raises:
        MissingDependencyError: it is not installed or does not load.
    """
    # The meta package of a flavour imports its bindings under the short name; either may be there.
    entry = ENGINES[flavour]
    modules = entry.requires[0]
    for name in modules:
        if find_spec(name) is None:
            continue
        try:
            module = import_module(name)
        except (ImportError, OSError) as error:
            raise MissingDependencyError(
                f"{name} is installed but does not load",
                got=error,
                fix=f"reinstall it together with its libraries: {entry.install}, "
                "or choose another engine with --engine",
            ) from error
        if flavour == RTX:
            _provide_unversioned_name()
        return LegacyTensorRT(module) if is_legacy(module) else module
    raise MissingDependencyError(
        f"{flavour} is not installed",
        got=f"no module {' or '.join(modules)}",
        fix=f"{entry.install}, or choose another engine with --engine",
    )


def _provide_unversioned_name() -> None:
    """Make `libtensorrt_rtx.so` known to the loader.

    The ONNX parser of TensorRT-RTX opens its runtime by that name when it meets a plugin, and ends
    the process if it is not there. The Python package has only `libtensorrt_rtx.so.1`. A library of
    that name which consists of a reference to the versioned one, opened beforehand, is enough, and
    leaves the package's folder alone.
    """
    try:
        ctypes.CDLL(_RTX_NAME)
        return
    except OSError:
        pass
    runtime = _loaded_library(f"{_RTX_NAME}.1")
    stub = cache_folder() / "tensorrt-rtx" / _RTX_NAME
    if not stub.is_file():
        stub.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=stub.parent) as folder:
            fresh = Path(folder) / _RTX_NAME
            _link_stub(runtime, fresh)
            os.replace(fresh, stub)
    ctypes.CDLL(str(stub), ctypes.RTLD_GLOBAL)


def _loaded_library(name: str) -> Path:
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name == name:
            return path
    raise EngineError(
        "the TensorRT-RTX library is not in this process",
        got=f"no {name} loaded",
        fix=ENGINES[RTX].install,
    )


def _link_stub(runtime: Path, out: Path) -> None:
    command = [
        find_compiler(),
        "-shared",
        "-x",
        "c++",
        os.devnull,
        "-x",
        "none",
        f"-Wl,-soname,{_RTX_NAME}",
        "-Wl,--no-as-needed",
        str(runtime),
        "-o",
        str(out),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise EngineError(
            f"the ONNX parser of TensorRT-RTX needs a file {_RTX_NAME}, which could not be made",
            got=result.stderr.strip(),
            fix=f"ln -s {runtime.name} {runtime.parent / _RTX_NAME}",
        )
