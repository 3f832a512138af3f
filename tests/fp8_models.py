"""Synthetic checkpoints whose widths FP8 fits, their bundles, and the eager module over them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from synthetic import make_dream, make_llada

from lacache_trt.artifacts import Manifest, load_manifest
from lacache_trt.export.derive import derive_bundle
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions
from lacache_trt.model.fp8 import Fp8Recipe, fp8_linears
from lacache_trt.model.ops import TorchOps
from lacache_trt.model.transformer import Transformer
from lacache_trt.progress import SilentProgress

SIZES = {"hidden": 128, "heads": 2, "kv_heads": 1, "ffn": 256, "head_scale": 6.0}
FAMILIES = {"llada": make_llada, "dream": make_dream}


def make_checkpoint(family: str, path: Path, **changes: object) -> Path:
    """Three layers of width 128 unless changed."""
    return FAMILIES[family](path, **{**SIZES, "seed": 11, **changes})  # type: ignore[arg-type]


def export_once(checkpoint: Path, bundle: Path) -> Manifest:
    """The bundle of a checkpoint; the export's own validation has its own tests."""
    if not bundle.exists():
        export_bundle(str(checkpoint), bundle, ExportOptions(validate="off", cache="exact"))
    return load_manifest(bundle, "bundle")


def quantised(
    source: Manifest, directory: Path, recipe: Fp8Recipe | None = None, *, graphs: bool = False
) -> Manifest:
    """The FP8 bundle of a bundle."""
    return derive_bundle(source, directory, recipe or Fp8Recipe(), SilentProgress(), graphs=graphs)


def load_fp8_eager(bundle: Manifest, dtype: torch.dtype = torch.float32) -> Transformer:
    """The module over a bundle's weights; FP8 tensors as they are, the others in `dtype`."""
    linears = fp8_linears(bundle.body, bundle.model)
    with torch.device("meta"):
        model = Transformer(bundle.model, TorchOps(), dtype, linears)
    tensors = load_file(bundle.path("weights.safetensors"))
    assert {name.replace(".", "/") for name in tensors} == set(model.weights)
    for name, value in tensors.items():
        kept = name.rpartition(".")[0] in linears and not name.endswith(".bias")
        parameter = value if kept else value.to(dtype)
        model.weights[name.replace(".", "/")] = torch.nn.Parameter(parameter, False)
    return model
