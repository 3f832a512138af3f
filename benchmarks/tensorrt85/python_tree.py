"""A CPython 3.10 that moves, and the packages beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path

CUDA_HEADERS = Path("/usr/local/cuda/include")
PYCUDA = "pycuda==2026.1"
_UNUSED = ("test", "idlelib", "tkinter", "ensurepip", "lib2to3", "turtledemo", "site-packages")
_UNUSED_BINDINGS = ("nvrtc", "nvjitlink", "nvvm", "nvml", "cufile", "cudla", "nvfatbin")
_TENSORRT = ("tensorrt/__init__.py",)


def copy_python(installation: Path, target: Path) -> None:
    """The interpreter and its standard library, without tests and static libraries."""
    library = installation / "lib" / "python3.10"
    skipped = shutil.ignore_patterns(*_UNUSED, "__pycache__", "config-*", "*.a", "*_test*")
    shutil.copytree(library, target / "lib" / "python3.10", ignore=skipped)
    (target / "bin").mkdir()
    shutil.copy(installation / "bin" / "python3.10", target / "bin" / "python3.10")
    for shared in (installation / "lib").glob("libpython3.10.so*"):
        shutil.copy(shared, target / "lib" / shared.name)
    strip(target)


def copy_site(wheels: Path, pycuda: Path, target: Path) -> None:
    """NumPy, the CUDA packages and the Python side of TensorRT, whose library comes separately."""
    for pattern in ("numpy", "cuda_bindings", "cuda_pathfinder", "pytools", "mako", "platformdirs"):
        shutil.unpack_archive(next(wheels.glob(f"{pattern}-*.whl")), target, "zip")
    for pattern in ("siphash24", "typing_extensions"):
        shutil.unpack_archive(next(wheels.glob(f"{pattern}-*.whl")), target, "zip")
    shutil.unpack_archive(pycuda, target, "zip")
    unpacked = target / "unpacked"
    shutil.unpack_archive(next(wheels.glob("tensorrt-*.whl")), unpacked, "zip")
    for name in _TENSORRT:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copy(unpacked / name, target / name)
    shutil.rmtree(unpacked)
    bindings = target / "cuda" / "bindings"
    unused = [bindings.glob(f"*{name}*") for name in _UNUSED_BINDINGS]
    _remove(path for paths in unused for path in paths)
    _remove(target.glob("*.dist-info"))
    _remove(path for path in target.rglob("tests") if path.is_dir())
    _remove([target / "numpy" / "f2py", *target.rglob("*.a")])
    strip(target)


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def strip(folder: Path) -> None:
    """Debugging symbols are not needed there. Vendored libraries with odd layouts are left."""
    for path in folder.rglob("*.so*"):
        if ".libs" not in str(path.parent):
            subprocess.run(["strip", "--strip-unneeded", str(path)], check=False)


def wheel_of_pycuda(work: Path, python: Path) -> Path:
    """PyCUDA compiled here: its driver library only has to be there where it runs."""
    found = list((work / "wheels").glob("pycuda-*.whl"))
    if found:
        return found[0]
    interpreter = python / "bin" / "python3.10"
    environment = work / "build-environment"
    subprocess.run([interpreter, "-m", "venv", str(environment)], check=True)
    tools = environment / "bin" / "python"
    needs = ["numpy==2.2.6", "setuptools<80", "wheel", "pytools", "mako", "siphash24"]
    subprocess.run([tools, "-m", "pip", "install", "--quiet", *needs], check=True)
    source = ["--no-deps", "--no-binary", "pycuda", "--no-build-isolation", PYCUDA]
    subprocess.run(
        [tools, "-m", "pip", "download", "--quiet", "-d", str(work), *source], check=True
    )
    with tarfile.open(next(work.glob("pycuda-*.tar.gz"))) as tar:
        tar.extractall(work / "pycuda", filter="data")
    folder = next((work / "pycuda").iterdir())
    stub = _stub_driver(work)
    # The stand-in defines nothing, so the linker would not note that the driver is needed.
    options = ["--no-cuda-enable-curand", "--ldflags=-Wl,--no-as-needed"]
    options += [f"--cudadrv-lib-dir={stub}"]
    options += [f"--cuda-root={CUDA_HEADERS.parent}", f"--cuda-inc-dir={CUDA_HEADERS}"]
    subprocess.run([tools, "configure.py", *options], cwd=folder, check=True)
    paths = {"CPATH": str(CUDA_HEADERS), "LIBRARY_PATH": str(stub)}
    wheel = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(work / "wheels")]
    subprocess.run(
        [tools, "-m", "pip", *wheel, "."], cwd=folder, env=os.environ | paths, check=True
    )
    return next((work / "wheels").glob("pycuda-*.whl"))


def _stub_driver(work: Path) -> Path:
    folder = work / "stub"
    folder.mkdir(exist_ok=True)
    empty_library(folder / "libcuda.so", "libcuda.so.1")
    return folder


def empty_library(path: Path, name: str) -> None:
    """A library of that name without content: to link against, or where nothing of it is used."""
    command = ["gcc", "-shared", "-fPIC", "-x", "c", os.devnull, f"-Wl,-soname,{name}"]
    subprocess.run([*command, "-o", str(path)], check=True)
