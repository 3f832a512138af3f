"""Our use of TensorRT's Python API against the real bindings, of TensorRT 11.4 and TensorRT-RTX.

The lean runtime stands in for the full TensorRT: nothing executes here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lacache_trt.plugins.library import build_library

TESTS = Path(__file__).parent
LEAN = pytest.mark.skipif(
    find_spec("tensorrt_bindings") is None or find_spec("tensorrt_lean_libs") is None,
    reason="the TensorRT bindings and the lean runtime are not installed",
)
_PARSER_STUB = (
    "createInferBuilder_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "initLibNvInferPlugins",
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for LD_LIBRARY_PATH with all libraries that the bindings want."""
    folder = tmp_path_factory.mktemp("lean")
    package = find_spec("tensorrt_lean_libs")
    assert package is not None
    assert package.submodule_search_locations
    lean = Path(package.submodule_search_locations[0]) / "libnvinfer_lean.so.11"
    (folder / "libnvinfer.so.11").symlink_to(lean)
    source = folder / "stub.cpp"
    source.write_text(
        "".join(f'extern "C" void* {name}() {{ return nullptr; }}\n' for name in _PARSER_STUB)
    )
    for name in ("libnvonnxparser.so.11", "libnvinfer_plugin.so.11"):
        out = ["-o", str(folder / name), f"-Wl,-soname,{name}"]
        subprocess.run(["g++", "-shared", "-fPIC", str(source), *out], check=True)
    return folder


def run_script(
    name: str, argument: str, libraries: Path | None = None
) -> subprocess.CompletedProcess[str]:
    path = {"LD_LIBRARY_PATH": str(libraries)} if libraries is not None else {}
    return subprocess.run(
        [sys.executable, str(TESTS / name), argument],
        env={**os.environ, **path},
        capture_output=True,
        text=True,
        check=False,
    )


@LEAN
def test_library_registers_in_the_bindings_of_tensorrt_11(libraries: Path) -> None:
    result = run_script("trt_lean_check.py", str(build_library()), libraries)
    assert result.stdout.splitlines()[-1:] == ["ok"], result.stdout + result.stderr
    assert "lacache-trt build" in result.stderr


@LEAN
def test_what_the_engines_use_exists_in_tensorrt_11(libraries: Path) -> None:
    result = run_script("trt_api_check.py", "tensorrt_bindings", libraries)
    assert result.stdout == "ok\n", result.stdout + result.stderr


@pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="TensorRT-RTX is not installed"
)
def test_what_the_engines_use_exists_in_tensorrt_rtx() -> None:
    result = run_script("trt_api_check.py", "tensorrt_rtx_bindings")
    assert result.stdout == "ok\n", result.stdout + result.stderr
