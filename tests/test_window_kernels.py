"""AttentionWindow and the window write ahead of time, and interpreted (in a process of its own)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch

from lacache_trt.plugins.attention_window import kernel
from lacache_trt.plugins.triton_support import compile_configuration
from lacache_trt.plugins.window_write import kernel as write

HERE = Path(__file__).parent
SMS = (89, 90)
DTYPES = (torch.float16, torch.bfloat16)


def test_interpreted() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "interpreted_window.py"],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(result.stdout[-6000:])
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16"])
def test_ships(dtype: torch.dtype, head_dim: int, sm: int) -> None:
    """`compile_configuration` raises on spills and beyond the limits of the SM."""
    window = kernel.configurations(dtype, head_dim, sm)
    for configuration in (*window[:2], *write.configurations(dtype, head_dim)):
        result = compile_configuration(configuration, sm)
        print(result.summary())
        assert result.spills == 0
        assert result.registers * result.warps * 32 <= 65536
        if sm == 90 and "window_write" in result.name:
            assert "st.global.v4.b32" in result.ptx
