"""Runs the kernels under Triton's interpreter, each file in a process of its own.

`TRITON_INTERPRET=1` must be set before triton is imported and turns every kernel of the process
into an interpreted one, while `test_kernels_aot.py` needs the real compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "name",
    ["interpreted_attention", "interpreted_sampling", "interpreted_fp8", "interpreted_tokenwise"],
)
def test_interpreted(name: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{name}.py"]
    result = subprocess.run(
        command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=600
    )
    print(result.stdout[-6000:])
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
