"""`build --engine tensorrt --trt-version 8.5`: the old TensorRT that can be had whole.

The same passes, plugin library and manifest as for TensorRT 10 and 11. What 8.5 cannot have is
refused: bfloat16, plugin-free plans (it has no Mod), ranges of sizes. So is
float32: the attention kernels spill registers in it, and no plugin is shipped that does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lacache_trt.artifacts import Manifest
from lacache_trt.engines.tensorrt.bindings import TENSORRT, import_tensorrt
from lacache_trt.engines.tensorrt.layout import GRAPHS
from lacache_trt.engines.tensorrt.legacy_api import LEGACY, is_legacy
from lacache_trt.engines.tensorrt.legacy_build import LegacyTarget
from lacache_trt.engines.tensorrt.legacy_directory import LegacyModel, fixed_profile, write_plans
from lacache_trt.engines.tensorrt.legacy_lowering import lower_graph
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.errors import InvalidRequestError, MissingDependencyError
from lacache_trt.gpus import find_gpus
from lacache_trt.plugins.library import find_library
from lacache_trt.progress import Progress

DTYPE = "float16"


def build_legacy(
    bundle: Manifest, directory: Path, settings: TensorRTOptions, progress: Progress
) -> dict[str, Any]:
    """Write the plans into `directory`; returns the engine part of the manifest.

    Raises:
        InvalidRequestError: an option or the bundle asks for what 8.5 does not have.
        MissingDependencyError: TensorRT 8.5, a GPU, a compiler or the headers are missing.
        EngineError: TensorRT failed.
    """
    dtype = str(bundle.body["dtype"])
    _check(dtype, settings)
    profile = fixed_profile(settings.profiles, bundle.model.max_length)
    trt = import_tensorrt(TENSORRT)
    here = find_gpus().devices
    if not is_legacy(trt) or not here:
        raise MissingDependencyError(
            f"--trt-version {LEGACY} needs TensorRT {LEGACY} and a GPU on this machine",
            got=f"TensorRT {trt.__version__}, {len(here)} GPUs",
            fix=f"pip install 'tensorrt=={LEGACY}.3.1' (Python 3.10), or leave --trt-version out",
        )
    sizes = {name: size.tuned for name, size in profile.ranges.items()}
    shared = settings.weights == "shared"
    model = LegacyModel(
        graphs={
            name: lower_graph(bundle.path(f"{name}.onnx"), here[0].sm, sizes, shared)
            for name in GRAPHS
        },
        contract={name: bundle.contract[name] for name in GRAPHS},
        dtype=dtype,
        profile=profile,
        weights=bundle.directory,
    )
    target = LegacyTarget(trt, find_library(settings.include), settings.timing_cache)
    return write_plans(target, model, directory, progress)


def _check(dtype: str, settings: TensorRTOptions) -> None:
    if dtype != DTYPE:
        missing = {"float32": "our plugins have no float32 kernels"}
        raise InvalidRequestError(
            missing.get(dtype, f"TensorRT {LEGACY} has no {dtype}"),
            got=dtype,
            expected=DTYPE,
            fix=f"export again with --dtype {DTYPE}",
        )
    refused = {
        "--no-plugins": not settings.plugins,
        "--cache exact,kv": settings.cache == "exact,kv",
    }
    asked = [flag for flag, is_set in refused.items() if is_set]
    if asked:
        raise InvalidRequestError(
            f"--trt-version {LEGACY} builds with our plugins and for exact caches only",
            got=" ".join(asked),
            fix="leave it out",
        )
