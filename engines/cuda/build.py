"""Writes an engine directory for the CUDA engine: weights and a measured GEMM table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lacache_trt.artifacts import Manifest
from lacache_trt.contract import graph_specs
from lacache_trt.contract_json import contract_to_json
from lacache_trt.engines.cuda.engine import require_cuda
from lacache_trt.engines.cuda.fp8 import measure_fp8_table, require_fp8, require_per_group
from lacache_trt.engines.cuda.gemm import measure_table
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.placing import place_file
from lacache_trt.errors import ArtifactError
from lacache_trt.model.fp8 import fp8_linears
from lacache_trt.progress import Progress

WEIGHTS = "weights.safetensors"
HEAD_DIMS = (64, 128)


def build(
    bundle: Manifest, directory: Path, options: BuildOptions, progress: Progress
) -> dict[str, Any]:
    """Write the weights into `directory`; returns the engine part of the manifest."""
    require_cuda()
    linears = fp8_linears(bundle.body, bundle.model)
    require_per_group(bundle.body)
    require_fp8(linears)
    dtype = str(bundle.body["dtype"])
    _check_supported(bundle, dtype)
    progress.start("copy weights")
    place_file(bundle, WEIGHTS, directory)
    progress.start("measure GEMMs")
    gemms = measure_table(bundle.model, getattr(torch, dtype), fp8=linears)
    fp8_gemms = measure_fp8_table(bundle.model, linears, getattr(torch, dtype))
    return {
        "engine": "cuda",
        "device": torch.cuda.get_device_name(),
        "compute_capability": list(torch.cuda.get_device_capability()),
        "dtype": dtype,
        "gemms": gemms.to_json(),
        **({"fp8_gemms": fp8_gemms.to_json()} if linears else {}),
        "contract": contract_to_json(graph_specs(bundle.model, dtype)),
    }


def _check_supported(bundle: Manifest, dtype: str) -> None:
    if dtype not in ("bfloat16", "float16"):
        raise ArtifactError(
            "the cuda engine runs bfloat16 and float16",
            got=f"a {dtype} bundle",
            fix="export again with --dtype bfloat16",
        )
    if bundle.model.head_dim not in HEAD_DIMS:
        raise ArtifactError(
            "the cuda engine has no attention kernel for this head dimension",
            got=bundle.model.head_dim,
            expected=" or ".join(str(size) for size in HEAD_DIMS),
            fix="use --engine onnxruntime",
        )
