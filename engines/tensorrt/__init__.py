"""The TensorRT and TensorRT-RTX engines; what each part needs is imported when it is called.

Building needs torch and Triton for the plugins' kernels, loading needs neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lacache_trt.artifacts import Manifest
    from lacache_trt.engines.options import BuildOptions
    from lacache_trt.engines.tensorrt.engine import TensorRTEngine
    from lacache_trt.progress import Progress


def build(
    bundle: Manifest, directory: Path, options: BuildOptions, progress: Progress
) -> dict[str, Any]:
    """Write the plans into `directory`; returns the engine part of the manifest."""
    from lacache_trt.engines.tensorrt.building import build as build_directory

    return build_directory(bundle, directory, options, progress)


def load(manifest: Manifest) -> TensorRTEngine:
    """Open an engine directory whose manifest has been checked."""
    from lacache_trt.engines.tensorrt.engine import load as load_directory

    return load_directory(manifest)
