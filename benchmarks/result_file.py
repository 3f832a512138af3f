"""One JSON file per benchmark run, in the form that `benchmarks/results/` keeps.

{"command", "date", "device", "versions", "commit", "metrics": {name: number}, "details": ...}
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMIT_VARIABLE = "LACACHE_TRT_COMMIT"
_PACKAGES = ("torch", "triton", "transformers", "onnxruntime", "numpy")


def write_result(
    name: str,
    device: str,
    metrics: Mapping[str, float],
    details: object,
    folder: Path | None = None,
) -> Path:
    """Write `name`.json into `folder`; by default $OUT, or `benchmarks/results/` without it."""
    target = folder or Path(os.environ.get("OUT", ROOT / "benchmarks" / "results"))
    target.mkdir(parents=True, exist_ok=True)
    content = {
        "command": " ".join(["python3", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "versions": versions(),
        "commit": commit(),
        "metrics": {k: float(f"{v:.6g}") for k, v in metrics.items() if math.isfinite(v)},
        "details": _finite(details),
    }
    path = target / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def versions() -> dict[str, str]:
    """Python and the packages that decide how fast something runs, as far as they are loaded."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        if package in sys.modules:
            found[package] = str(getattr(sys.modules[package], "__version__", "unknown"))
    if "torch" in sys.modules:
        torch = import_module("torch")
        found["cuda"] = str(torch.version.cuda)
        if torch.cuda.is_available():
            found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def commit() -> str:
    """The checkout's commit; a copy without history is told it by an environment variable."""
    told = os.environ.get(COMMIT_VARIABLE)
    if told:
        return told
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _finite(value: object) -> object:
    """JSON has no NaN: what is not finite becomes null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
