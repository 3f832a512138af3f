"""Memory of writing the weights file, measured in a process of its own.

Between weights files of 0.3 GB and 0.9 GB, peak memory (VmHWM, and RssAnon at the end) may grow by
less than 5% of the added weights. The checkpoints are sparse files, the written files are not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import make_llada

SIZES = {"small": 6, "large": 24}
_SCRIPT = """
import json, sys
from pathlib import Path
from lacache_trt.export.weights import write_weights
from lacache_trt.model.checkpoint import Checkpoint
checkpoint = Checkpoint.open(sys.argv[1])
write_weights(checkpoint, Path(sys.argv[2]), sys.argv[3])
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps({key: int(status[key].split()[0]) * 1024 for key in ("VmHWM", "RssAnon")}))
"""


def measure(root: Path, target: Path, dtype: str) -> tuple[int, dict[str, int]]:
    """Bytes written, and the memory figures of the process that wrote them."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(root), str(target), dtype],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    size = target.stat().st_size
    target.unlink()
    return size, json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_are_streamed(tmp_path: Path) -> None:
    """float32 to bfloat16, the case that needs the most temporaries per band."""
    results = {}
    for name, layers in SIZES.items():
        root = make_llada(
            tmp_path / name,
            hidden=1024,
            layers=layers,
            heads=8,
            kv_heads=8,
            ffn=4096,
            vocab=32000,
            dtype="float32",
            shards=2,
            sparse=True,
        )
        results[name] = measure(root, tmp_path / "weights.safetensors", "bfloat16")
    (small, before), (large, after) = results["small"], results["large"]
    assert large - small > 5 * 10**8
    growth = {key: after[key] - before[key] for key in after}
    print(f"weights {small / 1e9:.2f} -> {large / 1e9:.2f} GB, {before} -> {after}")
    assert max(growth.values()) < 0.05 * (large - small), growth
