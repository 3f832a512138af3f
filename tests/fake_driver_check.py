"""Run by `test_plugin_fields` with a fake driver in LD_LIBRARY_PATH; argument: the library."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import pytest
import torch
from native_entry import NativeEntry, NativeFailure

from lacache_trt.plugins.programs import packed_program


def main(library: Path) -> None:
    """Print `ok` at the end."""
    driver = ctypes.CDLL("libcuda.so.1")
    entry = NativeEntry(library)
    blob = packed_program("AttentionReuse", torch.bfloat16, 128, 90)
    kernels = blob.count(b"\x7fELF")
    assert kernels > 1

    # The last cubin does not load, then the last kernel is not found: nothing stays.
    for number, knob in enumerate(("fakeFailingLoad", "fakeFailingKernel"), start=1):
        reset(driver)
        count(driver, knob).value = kernels - 1
        refused(entry, blob, "CUDA_ERROR_OUT_OF_MEMORY")
        loaded = kernels - 1 if number == 1 else kernels
        assert count(driver, "fakeLoads").value == loaded
        assert count(driver, "fakeUnloads").value == loaded

    # A foreign GPU is refused before anything is loaded.
    reset(driver)
    count(driver, "fakeSm").value = 89
    refused(entry, blob, "sm_89")
    refused(entry, blob, "lacache-trt build BUNDLE OUT --force")
    assert count(driver, "fakeLoads").value == 0

    # The same program in the same process loads afterwards, once.
    reset(driver)
    entry.prepare(blob)
    entry.prepare(blob)
    assert count(driver, "fakeLoads").value == kernels
    assert count(driver, "fakeUnloads").value == 0
    print("ok")


def count(driver: ctypes.CDLL, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(driver, name)


def reset(driver: ctypes.CDLL) -> None:
    values = {"fakeSm": 90, "fakeFailingLoad": -1, "fakeFailingKernel": -1}
    counts = dict.fromkeys(("fakeLoads", "fakeKernels", "fakeUnloads"), 0)
    for name, value in {**values, **counts}.items():
        count(driver, name).value = value


def refused(entry: NativeEntry, blob: bytes, words: str) -> None:
    with pytest.raises(NativeFailure, match=re.escape(words)):
        entry.prepare(blob)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
