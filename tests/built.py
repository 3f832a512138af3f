"""Synthetic checkpoints, exported and built once per test run, shared by all workers.

An export takes seconds, so the configurations are few: each covers several layouts at once. The
heads are scaled so that the median top-1 probability lies above one half.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from synthetic import make_dream, make_llada

from lacache_trt.demo.run import CHECKPOINT
from lacache_trt.engines.builder import build_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions

HEAD_SCALE = 6.0
KEEP_VARIABLE = "LACACHE_TRT_TEST_MODELS"
"""Names a folder that keeps the built models between runs; delete it after changing an export."""

CONFIGURATIONS: dict[str, Callable[[Path], Path]] = {
    "llada": lambda path: make_llada(path, seed=1, head_scale=HEAD_SCALE, tokenizer=True),
    "llada-bf16": lambda path: make_llada(
        path, layers=2, kv_heads=4, seed=2, head_scale=HEAD_SCALE, dtype="bfloat16"
    ),
    "llada-one": lambda path: make_llada(path, layers=1, seed=3, head_scale=HEAD_SCALE, tied=True),
    "dream": lambda path: make_dream(path, seed=4, head_scale=HEAD_SCALE, tokenizer=True),
    "dream-one": lambda path: make_dream(path, layers=1, kv_heads=1, seed=5, head_scale=HEAD_SCALE),
}
SYNTHETIC = tuple(CONFIGURATIONS)
FLOAT32 = tuple(name for name in SYNTHETIC if not name.endswith("bf16"))
SHIPPED = CHECKPOINT.name
CONFIGURATIONS[SHIPPED] = lambda path: Path(shutil.copytree(CHECKPOINT, path))


@dataclass(frozen=True)
class Built:
    """Directories of one configuration."""

    name: str
    checkpoint: Path
    bundle: Path
    engine: Path


def build_once(name: str, shared: Path) -> Built:
    """The directories of a configuration under `shared`, made by whichever process comes first."""
    folder = Path(os.environ.get(KEEP_VARIABLE) or shared) / name
    folder.mkdir(parents=True, exist_ok=True)
    built = Built(name, folder / "checkpoint", folder / "bundle", folder / "engine")
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.engine.exists():
            CONFIGURATIONS[name](built.checkpoint)
            if not built.bundle.exists():
                export_bundle(str(built.checkpoint), built.bundle, ExportOptions())
            build_engine(built.bundle, built.engine, BuildOptions(engine="onnxruntime", threads=1))
    return built
