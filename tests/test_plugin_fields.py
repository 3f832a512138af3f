"""The IPluginV3 face without TensorRT: what a plugin serialises makes an equal plugin.

The Python bindings do not show what a C++ plugin serialises, so a small program asks the library as
TensorRT does. A fake driver shows what happens to cubins that load only in part.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lacache_trt.plugins.abi import NATIVE
from lacache_trt.plugins.library import build_library, find_compiler, find_headers
from lacache_trt.plugins.programs import PROGRAMS, packed_program

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled `native_fields.cpp`."""
    out = tmp_path_factory.mktemp("fields") / "native_fields"
    folders = [f"-isystem{find_headers().folder}", f"-I{NATIVE / 'cuda'}"]
    source = str(TESTS / "native_fields.cpp")
    command = [find_compiler(), "-std=c++17", "-O1", "-w", *folders, source, "-ldl", "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return out


@pytest.mark.parametrize("op", PROGRAMS)
def test_serialised_fields_make_an_equal_plugin(program: Path, tmp_path: Path, op: str) -> None:
    blob = tmp_path / "program"
    blob.write_bytes(packed_program(op, torch.bfloat16, 128, 90))
    command = [str(program), str(build_library()), op, str(blob)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("equal\n", 0), done.stderr
    assert "the first word is 0" in done.stderr  # the refusal at the end


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that counts, compiled from `fake_driver.cpp`."""
    folder = tmp_path_factory.mktemp("driver")
    out = folder / "libcuda.so.1"
    source = ["-x", "c++", str(TESTS / "fake_driver.cpp")]
    command = [find_compiler(), "-shared", "-fPIC", *source, "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", str(out)], check=True, capture_output=True)
    return folder


def test_cubins_that_load_in_part_are_unloaded(fake_driver: Path) -> None:
    """Run in a process of its own: this one may have met a driver, or its absence, already."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "fake_driver_check.py"), str(build_library())],
        env={**os.environ, "LD_LIBRARY_PATH": str(fake_driver)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "ok\n", done.stdout + done.stderr
