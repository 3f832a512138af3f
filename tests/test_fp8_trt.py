"""An FP8 engine of the model that ships, built for SM89 by the real TensorRT-RTX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import pytest

from lacache_trt.artifacts import load_manifest
from lacache_trt.engines.builder import build_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.tensorrt.estimate import plan_build
from lacache_trt.engines.tensorrt.graphs import prepare_graph
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.model.fp8 import Fp8Recipe
from lacache_trt.plugins.packing import FIELD

pytestmark = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="TensorRT-RTX is not installed"
)
TENSORRT = TensorRTOptions(sm=89, profiles=("B=1:1:2,N=64:96:256,Bk=32",))


def test_tiny_llada_builds_with_fp8_plugins(models: Callable[[str], Any], tmp_path: Path) -> None:
    built = models("tiny-llada")
    recipe = Fp8Recipe(exclude=("layers.3.*",))
    options = BuildOptions(engine="tensorrt-rtx", tensorrt=TENSORRT, fp8=recipe)
    report = build_engine(built.bundle, tmp_path / "engine", options)
    manifest = load_manifest(report.out, "engine")
    linears = manifest.body["fp8"]["linears"]  # type: ignore[index]
    assert len(linears) == 8
    assert {"fill.plan", "reuse.plan", "bundle/weights.safetensors"} <= set(manifest.files)

    # What the builder was given: every FP8 op is a plugin, and its weights are E4M3.
    model = onnx.load_model_from_string(
        prepare_graph(report.out / "bundle" / "reuse.onnx", plugin_sm=89)
    )
    nodes = [node for node in model.graph.node if node.domain == "lacache"]
    counts = Counter(node.op_type for node in nodes)
    assert (counts["GroupLinear"], counts["RMSNormQuant"], counts["SwiGLUQuant"]) == (8, 4, 4)
    assert all(FIELD in {each.name for each in node.attribute} for node in nodes)
    kinds = {each.name: each.data_type for each in model.graph.initializer}
    e4m3 = {name for name, kind in kinds.items() if kind == onnx.TensorProto.FLOAT8E4M3FN}
    assert e4m3 == {f"{name}.weight" for name in linears}

    # What the dry run promised.
    planned = plan_build(load_manifest(built.bundle, "bundle", hashes="sizes"), options)
    assert planned["plugins"]["GroupLinear"] == 8
    assert planned["precision"]["layers.1"].keys() == {"bfloat16", "float8_e4m3fn", "float32"}
    assert planned["precision"]["layers.3"].keys() == {"bfloat16"}
    weights = sum(sum(part.values()) for part in planned["precision"].values())
    assert (report.out / "reuse.plan").stat().st_size > weights
