"""Writes an engine directory for ONNX Runtime: the bundle's graphs and weights in float32.

onnxruntime's CPU kernels cannot run bf16, and run fp16 slower than float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lacache_trt.artifacts import Manifest
from lacache_trt.contract import known_contract
from lacache_trt.contract_json import contract_to_json
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.placing import place_file
from lacache_trt.errors import MissingDependencyError
from lacache_trt.progress import Progress

WEIGHTS = "weights.safetensors"


def build(
    bundle: Manifest, directory: Path, options: BuildOptions, progress: Progress
) -> dict[str, Any]:
    """Write graphs and weights into `directory`; returns the engine part of the manifest."""
    if bundle.body.get("dtype") == "float32":
        for name in (*(f"{graph}.onnx" for graph in bundle.contract), WEIGHTS):
            progress.start(f"copy {name}")
            place_file(bundle, name, directory)
    else:
        _convert(bundle, directory, progress)
    return {
        "engine": "onnxruntime",
        "device": "cpu",
        "dtype": "float32",
        "threads": options.threads,
        "contract": contract_to_json(known_contract(bundle.contract, bundle.model, "float32")),
    }


def _convert(bundle: Manifest, directory: Path, progress: Progress) -> None:
    try:
        import onnx_ir as ir

        from lacache_trt.export.convert import convert_weights
        from lacache_trt.export.graphs import weight_locations
        from lacache_trt.export.passes.to_float32 import ToFloat32
    except ImportError as error:
        raise MissingDependencyError(
            "a half-precision bundle is converted to float32 for ONNX Runtime, "
            "which needs the export packages",
            got=f"{error.name} is not installed",
            fix='pip install "lacache-trt[export]", or export with --dtype float32',
        ) from error
    convert_weights(bundle.path(WEIGHTS), directory / WEIGHTS, "float32", progress)
    locations = weight_locations(directory / WEIGHTS)
    for graph in bundle.contract:
        progress.start(f"convert {graph}.onnx")
        model = ToFloat32(locations)(ir.load(bundle.path(f"{graph}.onnx"))).model
        ir.save(model, directory / f"{graph}.onnx")
