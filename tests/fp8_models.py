"""Synthetic checkpoints whose widths FP8 fits, their bundles, and the eager module over them.

Deriving an FP8 bundle exports the graphs again and never reads those of its source. So the sources
here have stand-ins for graphs, which saves half of the exports, the slow part of these tests. A
real bundle is quantised by `build_fp8_once`.
"""

from __future__ import annotations

import fcntl
from collections.abc import Collection
from pathlib import Path

import torch
from built import Built
from safetensors.torch import load_file
from synthetic import make_dream, make_llada

from lacache_trt.artifacts import Manifest, load_manifest, publish_directory, write_manifest
from lacache_trt.contract import graph_specs
from lacache_trt.contract_json import contract_to_json
from lacache_trt.engines.builder import build_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.export.options import OPSET
from lacache_trt.export.tokenizer import write_tokenizer
from lacache_trt.export.weights import write_weights
from lacache_trt.model.checkpoint import Checkpoint
from lacache_trt.model.fp8 import Fp8Recipe, fp8_granularity, fp8_linears
from lacache_trt.model.ops import TorchOps
from lacache_trt.model.transformer import Transformer

SIZES = {"hidden": 128, "heads": 2, "kv_heads": 1, "ffn": 256, "head_scale": 6.0}
FAMILIES = {"llada": make_llada, "dream": make_dream}


def make_checkpoint(family: str, path: Path, **changes: object) -> Path:
    """Three layers of width 128 unless changed."""
    return FAMILIES[family](path, **{**SIZES, "seed": 11, **changes})  # type: ignore[arg-type]


def make_bundle(
    checkpoint: Path,
    bundle: Path,
    graphs: Collection[str] = ("fill", "reuse", "plain"),
    tokenizer: bool = False,
) -> Manifest:
    """A bundle of a checkpoint in its dtype: the weights are real, the graphs are stand-ins."""
    source = Checkpoint.open(checkpoint)
    specs = graph_specs(source.config, source.config.dtype)
    with publish_directory(bundle) as directory:
        write_weights(source, directory / "weights.safetensors", source.config.dtype)
        if tokenizer:
            write_tokenizer(checkpoint, directory)
        for name in graphs:
            (directory / f"{name}.onnx").write_bytes(b"stand-in")
        body = {
            "model": source.config.to_json(),
            "dtype": source.config.dtype,
            "opset": OPSET,
            "contract": contract_to_json({name: specs[name] for name in graphs}),
        }
        write_manifest(directory, "bundle", body)
    return load_manifest(bundle, "bundle")


def build_fp8_once(built: Built) -> Path:
    """The ONNX Runtime engine that `build --fp8` makes of a configuration of `built`.

    It lies beside the configuration's own engine and is made by whichever process comes first; its
    FP8 bundle is the folder `bundle` in it.
    """
    folder = built.engine.parent
    engine = folder / "fp8-engine"
    with open(folder / "fp8-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not engine.exists():
            options = BuildOptions(engine="onnxruntime", threads=1, fp8=Fp8Recipe())
            build_engine(built.bundle, engine, options)
    return engine


def load_fp8_eager(bundle: Manifest, dtype: torch.dtype = torch.float32) -> Transformer:
    """The module over a bundle's weights; FP8 tensors as they are, the others in `dtype`."""
    linears = fp8_linears(bundle.body, bundle.model)
    with torch.device("meta"):
        granularity = fp8_granularity(bundle.body)
        model = Transformer(bundle.model, TorchOps(), dtype, linears, granularity)
    tensors = load_file(bundle.path("weights.safetensors"))
    assert {name.replace(".", "/") for name in tensors} == set(model.weights)
    for name, value in tensors.items():
        kept = name.rpartition(".")[0] in linears and not name.endswith(".bias")
        parameter = value if kept else value.to(dtype)
        model.weights[name.replace(".", "/")] = torch.nn.Parameter(parameter, False)
    return model
