"""Memory of quantising, measured in a process of its own, as in `test_export_memory`.

From 0.2 GB to 0.7 GB of weights, peak memory may grow by less than 5% of the added weights. The
sources are sparse files; what is written is not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from sample_bundle import MODEL

from lacache_trt.export.weights import plan_layout
from lacache_trt.model.config import parameter_shapes

# Freed bands go back to the system at once; else the figures show what malloc keeps, which varies.
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}
_SCRIPT = """
import json, sys
from pathlib import Path
from lacache_trt.export.quantise import quantise_weights
from lacache_trt.model.config import ModelConfig
from lacache_trt.model.fp8 import Fp8Recipe, select_linears
from lacache_trt.progress import SilentProgress
config = ModelConfig.from_json(json.loads(sys.argv[3]))
recipe = Fp8Recipe()
linears = frozenset(select_linears(config, recipe).linears)
quantise_weights(
    Path(sys.argv[1]), Path(sys.argv[2]), config, "bfloat16", linears, recipe, SilentProgress()
)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps({key: int(status[key].split()[0]) * 1024 for key in ("VmHWM", "RssAnon")}))
"""


def measure(folder: Path, layers: int) -> tuple[int, dict[str, int]]:
    """Bytes of the source, and the memory figures of the process that quantised it."""
    config = replace(
        MODEL,
        hidden_size=1024,
        num_layers=layers,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=4096,
        vocab_size=32000,
        mask_id=31999,
        dtype="bfloat16",
    )
    layout = plan_layout(parameter_shapes(config), "bfloat16")
    source, target = folder / f"{layers}.safetensors", folder / "out.safetensors"
    with open(source, "wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(source), str(target), json.dumps(config.to_json())],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, **_ALLOCATOR},
    )
    target.unlink()
    return layout.size, json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_quantising_is_streamed(tmp_path: Path) -> None:
    (small, before), (large, after) = measure(tmp_path, 3), measure(tmp_path, 19)
    assert large - small > 5 * 10**8
    growth = {key: after[key] - before[key] for key in after}
    print(f"weights {small / 1e9:.2f} -> {large / 1e9:.2f} GB, {before} -> {after}")
    assert max(growth.values()) < 0.05 * (large - small), growth
