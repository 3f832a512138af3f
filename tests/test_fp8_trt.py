"""An FP8 engine of the model that ships, built for SM89 by the real TensorRT-RTX."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import pytest
from built import SHIPPED
from fp8_models import build_fp8_once
from typer.testing import CliRunner

from lacache_trt.artifacts import load_manifest
from lacache_trt.cli.main import app
from lacache_trt.engines.builder import build_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.tensorrt import opening
from lacache_trt.engines.tensorrt.estimate import plan_build
from lacache_trt.engines.tensorrt.graphs import prepare_graph
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.engines.tensorrt.staging import bytes_of
from lacache_trt.errors import InvalidRequestError
from lacache_trt.model.fp8 import Fp8Recipe
from lacache_trt.plugins.packing import FIELD

pytestmark = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="TensorRT-RTX is not installed"
)
TENSORRT = TensorRTOptions(sm=89, profiles=("B=1:1:2,N=64:96:256,Bk=32",))


@pytest.mark.parametrize("weights", ["embedded", "shared"])
def test_tiny_llada_builds_with_fp8_plugins(
    models: Callable[[str], Any], tmp_path: Path, weights: Any
) -> None:
    built = models(SHIPPED)
    fp8 = build_fp8_once(built) / "bundle"
    settings = replace(TENSORRT, weights=weights)
    report = build_engine(
        fp8, tmp_path / "engine", BuildOptions(engine="tensorrt-rtx", tensorrt=settings)
    )
    manifest = load_manifest(report.out, "engine")
    linears = manifest.body["fp8"]["linears"]  # type: ignore[index]
    assert len(linears) == 10
    assert {"fill.plan", "reuse.plan"} <= set(manifest.files)
    check_graph(fp8 / "reuse.onnx", linears)

    # E4M3 weights are in the plan, or among the inputs that all plans share.
    inputs = opening._shared_weights(manifest)
    e4m3 = {name: spec for name, spec in inputs.items() if spec.dtype == "float8_e4m3fn"}
    assert e4m3.keys() == ({f"{name}.weight" for name in linears} if weights == "shared" else set())
    assert all(bytes_of(spec, {}) == math.prod(spec.shape) for spec in e4m3.values())
    assert ("weights.safetensors" in manifest.files) == (weights == "shared")

    # What a dry run of `build --fp8` from the unquantised bundle promises.
    options = BuildOptions(engine="tensorrt-rtx", tensorrt=settings, fp8=Fp8Recipe())
    planned = plan_build(load_manifest(built.bundle, "bundle", hashes="sizes"), options)
    assert planned["plugins"]["GroupLinear"] == 10
    assert planned["precision"]["layers.1"].keys() == {"bfloat16", "float8_e4m3fn", "float32"}
    assert planned["precision"]["layers.0"].keys() == {"bfloat16"}
    size = sum(sum(part.values()) for part in planned["precision"].values())
    assert ((report.out / "reuse.plan").stat().st_size > size) == (weights == "embedded")

    shown = json.loads(CliRunner().invoke(app, ["inspect", str(report.out), "--json"]).stdout)
    assert shown["fp8"] == manifest.body["fp8"]
    assert shown["weights"] == weights


@pytest.mark.parametrize("weights", ["embedded", "shared"])
def test_a_dry_run_plans_fp8_per_channel(
    models: Callable[[str], Any], weights: Any, tmp_path: Path
) -> None:
    """From the unquantised bundle: no plugins, a scale per output, FP8 weights in every plan."""
    bundle = load_manifest(models(SHIPPED).bundle, "bundle", hashes="sizes")
    settings = replace(TENSORRT, weights=weights, plugins=False)
    plain = BuildOptions(engine="tensorrt-rtx", tensorrt=settings)
    recipe = Fp8Recipe(recipe="per-channel")
    options = replace(plain, fp8=recipe, calibration=tmp_path / "prompts.jsonl")
    with pytest.raises(InvalidRequestError, match=r"cannot read prompts\.jsonl"):
        plan_build(bundle, options)
    (tmp_path / "prompts.jsonl").write_text('"What?"\n')
    planned = plan_build(bundle, options)
    assert planned["fp8"] == {"recipe": "per-channel", "linears": 10}
    assert planned["plugins"] == {}
    config = bundle.model
    inputs = {"gate_up": config.hidden_size, "down": config.intermediate_size}
    outputs = {"gate_up": 2 * config.intermediate_size, "down": config.hidden_size}
    found = planned["precision"]["layers.1"]
    values = sum(inputs[name] * outputs[name] for name in inputs)
    assert found["float8_e4m3fn"] == values
    assert found["float32"] == 4 * sum(size + 1 for size in outputs.values())
    before = plan_build(bundle, plain)
    assert before["fp8"] is None
    # Of a bfloat16 weight half is saved, in the one plan that has these layers.
    saved = before["memory"][0]["weights"] - planned["memory"][0]["weights"]
    assert saved == 5 * (values - found["float32"])


def check_graph(path: Path, linears: list[str]) -> None:
    """What the builder is given: every FP8 op is a plugin, and its weights are E4M3."""
    model = onnx.load_model_from_string(prepare_graph(path, plugin_sm=89))
    nodes = [node for node in model.graph.node if node.domain == "lacache"]
    counts = Counter(node.op_type for node in nodes)
    assert (counts["GroupLinear"], counts["RMSNormQuant"], counts["SwiGLUQuant"]) == (10, 5, 5)
    assert all(FIELD in {each.name for each in node.attribute} for node in nodes)
    kinds = {each.name: each.data_type for each in model.graph.initializer}
    e4m3 = {name for name, kind in kinds.items() if kind == onnx.TensorProto.FLOAT8E4M3FN}
    assert e4m3 == {f"{name}.weight" for name in linears}
