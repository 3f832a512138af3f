"""FP8 per channel whole: calibration and logits against transformers in float64, the model that
ships on ONNX Runtime, and its plans by the real TensorRT-RTX.

Bounds as in `test_fp8_engine`: an ulp before a quantiser can become a step of E4M3 behind it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from canvases import block_tokens, greedy, random_shape, relative_error
from channel_reference import largest_inputs, quantise_linears
from eager import EagerSession
from fp8_models import load_fp8_eager, make_bundle, make_checkpoint
from reference_model import load_reference
from safetensors.torch import load_file

from lacache_trt import GenerationConfig, Runtime
from lacache_trt.artifacts import Manifest, load_manifest
from lacache_trt.cli.build_view import show_planned
from lacache_trt.demo.problems import is_correct, problem
from lacache_trt.demo.shipped import CHECKPOINT
from lacache_trt.engines.builder import build_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.tensorrt.estimate import plan_build
from lacache_trt.engines.tensorrt.graphs import prepare_graph
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.engines.tensorrt.share_weights import large_weights
from lacache_trt.model.fp8 import Fp8Recipe
from lacache_trt.model.safetensors_file import read_safetensors_header

WORST, MEDIAN = 1e-1, 1e-4
TIE, CASES = 0.2, 12
IDS = ([3, 4, 5, 6, 7], [40, 3, 90], [11, 12])
PROBLEMS = [problem("held-out", index) for index in range(2)]
RECIPES = {
    "dream": Fp8Recipe(recipe="per-channel", scope="all", layers="0-1"),
    "tiny-llada": Fp8Recipe(recipe="per-channel"),
}
TENSORRT = TensorRTOptions(sm=89, profiles=("B=1:1:2,N=64:96:256,Bk=32",))
RTX = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="TensorRT-RTX is not installed"
)
Folders = tuple[Path, Path]
"""Checkpoint and ONNX Runtime engine, with the FP8 bundle in it."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Folders]:
    """Directories by name of model, each made once. Dream has an FFN no multiple of 128 wide."""

    @cache
    def build(name: str) -> Folders:
        folder = tmp_path_factory.mktemp(name)
        prompts: Any = [problem("tune", index).question for index in range(4)]
        checkpoint = CHECKPOINT
        if name == "dream":
            prompts = [IDS[0], {"prompt": IDS[1]}, IDS[2]]
            checkpoint = make_checkpoint("dream", folder / "checkpoint", layers=2, ffn=192)
        bundle = make_bundle(checkpoint, folder / "bundle", tokenizer=name != "dream")
        file = folder / "prompts.jsonl"
        file.write_text("\n".join(map(json.dumps, prompts)) + "\n\n")
        options = BuildOptions(engine="onnxruntime", threads=1, fp8=RECIPES[name], calibration=file)
        build_engine(bundle.directory, folder / "engine", options)
        return checkpoint, folder / "engine"

    return build


def fp8_bundle(built: Callable[[str], Folders], name: str) -> Manifest:
    """The FP8 bundle inside the engine directory."""
    return load_manifest(built(name)[1] / "bundle", "bundle")


@pytest.fixture(scope="module")
def runtime(built: Callable[[str], Folders]) -> Iterator[Runtime]:
    """tiny-llada, open."""
    with Runtime.load(built("tiny-llada")[1]) as opened:
        yield opened


def input_scales(bundle: Manifest) -> dict[str, float]:
    """The static scales of a bundle's weights file."""
    tensors = load_file(bundle.path("weights.safetensors"))
    ends = ".input_scale"
    return {n.removesuffix(ends): float(t) for n, t in tensors.items() if n.endswith(ends)}


def test_the_scales_are_what_the_prompts_show(built: Any) -> None:
    """Against transformers in float64, decoding on its own and watched by hooks."""
    bundle = fp8_bundle(built, "dream")
    section: Any = bundle.body["fp8"]
    expected = largest_inputs(load_reference(built("dream")[0]), 2, IDS)
    scales = input_scales(bundle)
    assert set(scales) == set(section["linears"]) == set(expected)
    assert "layers.1.down" in scales  # 192 wide
    assert not section["unfit"]
    for name, amax in expected.items():
        assert section["facts"][name]["input_amax"] == pytest.approx(amax, rel=1e-4)
        assert scales[name] == pytest.approx(amax / 448, rel=1e-4)
    facts = section["calibration"]
    assert (facts["prompts"], facts["tokens"], facts["steps"]) == (3, 10, 64)
    assert load_manifest(built("dream")[1]).body["fp8"] == section


def test_logits_are_those_of_the_fake_quantised_reference(built: Any) -> None:
    """ONNX Runtime and the eager module, each against transformers in float64."""
    checkpoint, engine = built("dream")
    bundle = fp8_bundle(built, "dream")
    reference = load_reference(checkpoint)
    plain = load_reference(checkpoint)
    quantise_linears(reference.network, 2, input_scales(bundle))
    errors: dict[str, list[float]] = {"eager": [], "onnxruntime": [], "no FP8": []}
    with Runtime.load(engine) as runtime:
        sessions = {
            "eager": EagerSession(load_fp8_eager(bundle)),
            "onnxruntime": runtime.engine.session(),
        }
        for seed in range(CASES):
            shape = random_shape(seed)
            canvas, block = shape.canvas(bundle.model), shape.block_columns
            sampling = greedy(shape.rows, bundle.model)
            found = {
                key: session.plain(canvas, block, sampling, block).logits
                for key, session in sessions.items()
            }
            for row in range(shape.rows):
                first, end = shape.valid_from[row], shape.valid_to[row]
                tokens = canvas.tokens[row, first:end].tolist()
                truth = reference.row_logits(tokens)[block[row] - first]
                for key, logits in found.items():
                    errors[key].append(relative_error(logits[row], truth))
                without = plain.row_logits(tokens)[block[row] - first]
                errors["no FP8"].append(relative_error(without, truth))
    medians = {key: float(np.median(values)) for key, values in errors.items()}
    print({key: max(values) for key, values in errors.items()}, medians)
    for key in sessions:
        assert max(errors[key]) <= WORST
        assert medians[key] <= MEDIAN
        assert medians[key] < medians["no FP8"] / 2  # FP8 is really there


def test_exact_equals_plain_in_tokens(runtime: Runtime) -> None:
    """Within one engine, on random canvases."""
    config, session = runtime.engine.config, runtime.engine.session()
    for seed in range(CASES):
        shape = random_shape(seed)
        canvas, block = shape.canvas(config), shape.block_columns
        sampling = greedy(shape.rows, config)
        plain = session.plain(canvas, block, sampling, block)
        session.fill(canvas, block)
        reuse = session.reuse(block_tokens(canvas, block), sampling, block)
        again = session.reuse(block_tokens(canvas, block), sampling, block)
        np.testing.assert_array_equal(reuse.logits, again.logits)
        assert relative_error(reuse.logits, plain.logits) <= WORST
        for row, place in np.argwhere(reuse.token != plain.token):
            logits = plain.logits[row, place].copy()
            logits[config.mask_id] = -np.inf
            second, best = np.sort(logits)[-2:]
            assert best - second < TIE


def test_real_problems_come_out_right_with_and_without_caches(runtime: Runtime) -> None:
    settings = GenerationConfig(gen_length=64, block_length=32, steps=64)
    questions = [each.question for each in PROBLEMS]
    exact = runtime.generate(questions, replace(settings, cache="exact"))
    plain = runtime.generate(questions, replace(settings, cache="none"))
    assert [one.tokens for one in exact] == [one.tokens for one in plain]
    assert all(is_correct(a, b.text or "") for a, b in zip(PROBLEMS, exact, strict=True))


def test_the_graphs_hold_standard_operators_only(built: Any) -> None:
    """E4M3 only between QuantizeLinear and DequantizeLinear; their scales are float32."""
    bundle = fp8_bundle(built, "tiny-llada")
    model = onnx.load_model_from_string(prepare_graph(bundle.path("reuse.onnx"), None))
    nodes = model.graph.node
    assert {node.domain for node in nodes} == {""}
    counts = Counter(node.op_type for node in nodes)
    assert (counts["QuantizeLinear"], counts["DequantizeLinear"]) == (10, 20)
    kinds = {each.name: each.data_type for each in model.graph.initializer}
    e4m3 = {name for name, kind in kinds.items() if kind == onnx.TensorProto.FLOAT8E4M3FN}
    assert e4m3 == {f"{name}.weight" for name in bundle.body["fp8"]["linears"]}  # type: ignore[index]
    for node in nodes:
        if node.op_type.endswith("quantizeLinear") or node.op_type == "QuantizeLinear":
            assert kinds[node.input[1]] == onnx.TensorProto.FLOAT
    onnx.checker.check_model(bundle.path("reuse.onnx"))
    shared = {spec.name for spec in large_weights(ir.load(bundle.path("reuse.onnx")))}
    assert shared
    assert not shared & e4m3  # TensorRT dequantises constants only


@RTX
@pytest.mark.parametrize("plugins", [False, True])
@pytest.mark.parametrize("weights", ["embedded", "shared"])
def test_tiny_llada_builds_with_tensorrt_rtx(
    built: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    plugins: bool,
    weights: Any,
) -> None:
    """Each E4M3 weight lies in the plan once, byte for byte: nothing was dequantised at build."""
    bundle = fp8_bundle(built, "tiny-llada")
    settings = replace(TENSORRT, plugins=plugins, weights=weights)
    options = BuildOptions(engine="tensorrt-rtx", tensorrt=settings)
    report = build_engine(bundle.directory, tmp_path / "engine", options)
    manifest = load_manifest(report.out, "engine")
    assert manifest.body["fp8"] == bundle.body["fp8"]
    assert (manifest.body["plugin_abi"] is not None) == plugins
    plan = (report.out / "reuse.plan").read_bytes()
    stored = bundle.path("weights.safetensors").read_bytes()
    header = read_safetensors_header(bundle.path("weights.safetensors"))
    for name in bundle.body["fp8"]["linears"]:  # type: ignore[index]
        tensor = header[f"{name}.weight"]
        assert plan.count(stored[tensor.offset : tensor.offset + tensor.nbytes]) == 1

    # What a dry run says of it.
    planned = plan_build(bundle, options)
    assert planned["fp8"] == {"recipe": "per-channel", "linears": 10}
    assert "GroupLinear" not in planned["plugins"]
    assert planned["precision"]["layers.1"].keys() == {"bfloat16", "float8_e4m3fn", "float32"}
    show_planned(planned)
    assert "10 linears, per-channel" in capsys.readouterr().out
