"""The plugin library: found or compiled on this machine, then loaded into TensorRT once.

The sources lie in `native/`. They need a C++17 compiler and TensorRT's headers, and are linked with
neither TensorRT nor CUDA. The face is chosen by the headers: IPluginV3 for TensorRT 10, 11 and
TensorRT-RTX, IPluginV2DynamicExt for 8.5.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lacache_trt.errors import ArtifactError, EngineError, MissingDependencyError
from lacache_trt.output_file import check_output_file
from lacache_trt.plugins.abi import NATIVE, abi_hash

LIBRARY_NAME = "liblacache_trt_plugins.so"
NAMESPACE = "lacache"
CACHE_VARIABLE = "LACACHE_TRT_CACHE"
INCLUDE_VARIABLE = "LACACHE_TRT_INCLUDE"
LIBRARY_VARIABLE = "LACACHE_TRT_PLUGIN_LIBRARY"
HEADERS_FOLDER = ".plugin-headers"
_HEADER = "NvInferRuntime.h"
_PACKAGED_HEADERS = Path("include", "tensorrt")
_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-gnu-unique")
_SYSTEM_FOLDERS = (
    "/usr/include/x86_64-linux-gnu",
    "/usr/include/aarch64-linux-gnu",
    "/usr/include",
    "/usr/local/tensorrt/include",
    "/usr/local/TensorRT/include",
    "/opt/tensorrt/include",
)


@dataclass(frozen=True)
class Headers:
    """A folder with TensorRT's headers and the major version that they declare (RTX: 1)."""

    folder: Path
    major: int


def cache_folder() -> Path:
    """Where compiled libraries are kept: LACACHE_TRT_CACHE, else the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lacache-trt"


def find_headers(include: Path | None = None) -> Headers:
    """TensorRT's headers: in `include`, else where an installation or `make` puts them.

    Raises:
        MissingDependencyError: there are none.
    """
    folders = [include] if include is not None else list(_header_folders())
    for folder in folders:
        if (folder / _HEADER).is_file():
            return Headers(folder, _declared_major(folder))
    raise MissingDependencyError(
        "TensorRT's headers are needed to compile the plugin library",
        got=f"no {_HEADER} in {include}" if include is not None else f"no {_HEADER} found",
        fix="lacache-trt plugins build --include DIR with the folder of your TensorRT's headers, "
        "or in a checkout: make plugin-headers",
    )


def find_compiler() -> str:
    """The C++ compiler: CXX, else g++ or clang++.

    Raises:
        MissingDependencyError: there is none.
    """
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++"]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found:
            return found
    raise MissingDependencyError(
        "a C++17 compiler is needed to compile the plugin library",
        got=f"{' and '.join(candidates)} not found",
        fix="install one (Debian, Ubuntu: apt-get install g++), or name one: CXX=/path/to/g++",
    )


def find_library(include: Path | None = None) -> Path:
    """The compiled library: LACACHE_TRT_PLUGIN_LIBRARY, else one that the package carries, else
    from `build_library`, as always where `include` is given.

    A library of another ABI is found out when TensorRT hands it a program: it refuses.
    """
    chosen = os.environ.get(LIBRARY_VARIABLE)
    if include is None and chosen:
        return Path(chosen)
    carried = NATIVE / LIBRARY_NAME
    return carried if include is None and carried.is_file() else build_library(include)


def build_library(include: Path | None = None, out: Path | None = None) -> Path:
    """Compile the library, or take it from the cache, and return its path.

    With `out` it is also copied there; `out` may be a folder.

    Raises:
        MissingDependencyError: no compiler or no headers.
        EngineError: the compiler failed.
        OutputError: `out` cannot be written, as its folder does not exist.
    """
    target = None if out is None else out / LIBRARY_NAME if out.is_dir() else out
    if target is not None:
        check_output_file(target, "the library")
    headers = find_headers(include)
    compiler = find_compiler()
    cached = cache_folder() / "plugins" / _key(headers, compiler) / LIBRARY_NAME
    if not cached.is_file():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as folder:
            fresh = Path(folder) / LIBRARY_NAME
            _compile(compiler, headers, fresh)
            os.replace(fresh, cached)
    if target is None:
        return cached
    shutil.copyfile(cached, target)
    return target


def load_library(registry: Any, path: Path, op: str = "AttentionFill") -> None:
    """Load the library into a plugin registry unless its ops are there already.

    Raises:
        ArtifactError: there is no library at `path`.
        EngineError: TensorRT refused it.
    """
    if not path.is_file():
        raise ArtifactError(
            "the plugin library is missing", got=path, fix="lacache-trt plugins build"
        )
    # Loading the same library twice gives no handle, so the registry is asked first.
    if _registered(registry, op):
        return
    registry.load_library(str(path))
    if not _registered(registry, op):
        raise EngineError(
            "TensorRT could not load the plugin library",
            got=path,
            fix="compile it with this TensorRT's headers: lacache-trt plugins build --include DIR",
        )


def _registered(registry: Any, op: str) -> bool:
    """Whether a creator is there; asking for a missing one by name would log an error."""
    return any(
        (creator.name, creator.plugin_namespace) == (op, NAMESPACE)
        for creator in registry.all_creators
    )


def _header_folders() -> Iterator[Path]:
    for variable, suffix in ((INCLUDE_VARIABLE, ""), ("TENSORRT_ROOT", "include")):
        if os.environ.get(variable):
            yield Path(os.environ[variable], suffix)
    yield from map(Path, _SYSTEM_FOLDERS)
    yield NATIVE.parents[1] / HEADERS_FOLDER / "kernel_lens" / _PACKAGED_HEADERS
    package = find_spec("kernel_lens")
    if package is not None and package.submodule_search_locations:
        yield Path(next(iter(package.submodule_search_locations))) / _PACKAGED_HEADERS


def _declared_major(folder: Path) -> int:
    text = (folder / "NvInferVersion.h").read_text(errors="replace")
    for name in ("NV_TENSORRT_MAJOR", "TRT_MAJOR_ENTERPRISE", "TRT_MAJOR_RTX"):
        found = re.search(rf"#define\s+{name}\s+(\d+)", text)
        if found is not None:
            return int(found[1])
    raise MissingDependencyError(
        "the headers do not say which TensorRT they belong to", got=folder / "NvInferVersion.h"
    )


def _sources() -> list[Path]:
    return sorted(path for path in NATIVE.rglob("*") if path.suffix in (".cpp", ".h", ".map"))


def _key(headers: Headers, compiler: str) -> str:
    """Everything that the compiled library depends on."""
    digest = hashlib.sha256()
    for path in (*_sources(), *sorted(headers.folder.glob("NvInfer*.h"))):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest.update(version + " ".join(_FLAGS).encode())
    return digest.hexdigest()[:24]


def _compile(compiler: str, headers: Headers, out: Path) -> None:
    command = [
        compiler,
        *_FLAGS,
        f"-DLACACHE_ABI={abi_hash()}ull",
        f"-isystem{headers.folder}",
        f"-I{NATIVE / 'cuda'}",
        f"-Wl,--version-script={NATIVE / 'exports.map'}",
        "-Wno-deprecated-declarations",
        *(str(path) for path in _sources() if path.suffix == ".cpp"),
        "-ldl",
        "-o",
        str(out),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise EngineError(
            "the plugin library does not compile",
            got="\n".join(result.stderr.strip().splitlines()[:12]),
            fix=f"check the headers in {headers.folder} (TensorRT 8.5, 10, 11 or TensorRT-RTX)",
        )
