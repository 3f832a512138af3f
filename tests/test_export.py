"""Bundles: what the graphs contain, and who can run them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from built import Built
from canvases import Shape, block_tokens, greedy
from numpy.typing import NDArray

from lacache_trt.artifacts import load_manifest
from lacache_trt.contract import GraphSpec, TensorSpec, graph_specs
from lacache_trt.model.config import parameter_shapes
from lacache_trt.model.safetensors_file import read_safetensors_header
from lacache_trt.runtime import Runtime

GRAPHS = ("fill", "reuse", "plain", "reuse-kv", "window")
WINDOW = 12
DTYPES = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.INT32: "int32",
}
# Index inputs of an operator that decide a shape or a slice; TensorRT wants those on the host.
SHAPE_OPERANDS = {
    "Reshape": (1,),
    "Expand": (1,),
    "Slice": (1, 2, 3, 4),
    "Range": (0, 1, 2),
    "Tile": (1,),
    "ConstantOfShape": (0,),
    "Unsqueeze": (1,),
    "Squeeze": (1,),
    "TopK": (1,),
    "Pad": (1,),
    "Split": (1,),
}


def load_graph(directory: Path, name: str) -> onnx.ModelProto:
    """A graph without the weights it refers to."""
    return onnx.load(directory / f"{name}.onnx", load_external_data=False)


def graph_contract(model: onnx.ModelProto) -> GraphSpec:
    """Inputs and outputs as the file declares them."""

    def spec(value: onnx.ValueInfoProto) -> TensorSpec:
        tensor = value.type.tensor_type
        dims = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
        return TensorSpec(value.name, dims, DTYPES[tensor.elem_type])

    inputs = tuple(spec(value) for value in model.graph.input)
    return GraphSpec(model.graph.name, inputs, tuple(spec(value) for value in model.graph.output))


def open_unmodified(directory: Path, name: str) -> ort.InferenceSession:
    """onnxruntime as installed, on the file of the bundle."""
    return ort.InferenceSession(directory / f"{name}.onnx", providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("graph", GRAPHS)
def test_checker_is_clean(model_name: str, models: Any, graph: str) -> None:
    onnx.checker.check_model(models(model_name).bundle / f"{graph}.onnx")


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_manifest_states_the_real_inputs_and_outputs(
    model_name: str, models: Any, graph: str
) -> None:
    built: Built = models(model_name)
    for directory, kind in ((built.bundle, "bundle"), (built.engine, "engine")):
        manifest = load_manifest(directory, kind)
        assert graph_contract(load_graph(directory, graph)) == manifest.contract[graph]
        dtype = str(manifest.body["dtype"])
        assert manifest.contract == graph_specs(manifest.model, dtype)
    assert load_manifest(built.engine).body["dtype"] == "float32"


def test_unmodified_onnxruntime_runs_the_bundle(float32_model: Built) -> None:
    """The three files by hand give what the engine gives."""
    bundle = float32_model.bundle
    with Runtime.load(float32_model.engine) as runtime:
        config, session = runtime.engine.config, runtime.engine.session()
        shape = Shape(23, 5, (3, 11), (1, 6), (20, 23), seed=9)
        canvas, block, sampling = shape.canvas(config), shape.block_columns, greedy(2, config)
        geometry = {
            "positions": canvas.positions,
            "valid_from": canvas.valid_from,
            "valid_to": canvas.valid_to,
            "block_columns": block,
        }
        step = {**geometry, **vars(sampling), "logit_columns": block[:, :2].copy()}
        fill = open_unmodified(bundle, "fill")
        caches = fill.run(None, {**geometry, "tokens": canvas.tokens})
        names = [output.name for output in fill.get_outputs()]
        inputs = {**step, **dict(zip(names, caches, strict=True))}
        inputs["block_tokens"] = block_tokens(canvas, block)
        reuse = open_unmodified(bundle, "reuse").run(None, inputs)
        plain = open_unmodified(bundle, "plain").run(None, {**step, "tokens": canvas.tokens})
        session.fill(canvas, block)
        expected = session.reuse(inputs["block_tokens"], sampling, block[:, :2].copy())
    for found, other, name in zip(reuse, plain, vars(expected), strict=True):
        np.testing.assert_allclose(found, getattr(expected, name), atol=1e-6, err_msg=name)
        np.testing.assert_allclose(other, getattr(expected, name), atol=2e-4, err_msg=name)


@pytest.mark.parametrize("graph", GRAPHS)
def test_weights_are_references_into_the_weights_file(
    model_name: str, models: Any, graph: str
) -> None:
    built: Built = models(model_name)
    for directory in (built.bundle, built.engine):
        stored = read_safetensors_header(directory / "weights.safetensors")
        external = []
        for tensor in load_graph(directory, graph).graph.initializer:
            if tensor.data_location != onnx.TensorProto.EXTERNAL:
                assert np.prod(tensor.dims, dtype=int) <= 64, tensor.name
                continue
            place = {entry.key: entry.value for entry in tensor.external_data}
            there = stored[tensor.name]
            assert place["location"] == "weights.safetensors"
            assert (int(place["offset"]), int(place["length"])) == (there.offset, there.nbytes)
            assert tuple(tensor.dims) == there.shape
            external.append(tensor.name)
        assert len(external) == len(set(external))
        assert (directory / f"{graph}.onnx").stat().st_size < 100_000


def test_a_bundle_holds_the_weights_once(model_name: str, models: Any) -> None:
    built: Built = models(model_name)
    manifest = load_manifest(built.bundle, "bundle")
    shapes = parameter_shapes(manifest.model)
    weights = read_safetensors_header(built.bundle / "weights.safetensors")
    assert {name: tensor.shape for name, tensor in weights.items()} == shapes
    used = {
        graph: {t.name for t in load_graph(built.bundle, graph).graph.initializer} & set(shapes)
        for graph in GRAPHS
    }
    assert used["plain"] == set(shapes)
    first = {"embed.weight", "layers.0.attn_norm.weight", "layers.0.qkv.weight"}
    biases = {"layers.0.qkv.bias"} if manifest.model.qkv_bias else set()
    assert used["fill"] == first | biases
    for graph in ("reuse", "reuse-kv", "window"):
        assert used[graph] == set(shapes)


@pytest.mark.parametrize("graph", GRAPHS)
def test_nodes_and_functions_of_the_domain(model_name: str, models: Any, graph: str) -> None:
    built: Built = models(model_name)
    layers = load_manifest(built.bundle).model.num_layers
    expected = {
        "fill": {"AttentionFill": 1},
        "reuse": {"AttentionReuse": 1, "Attention": layers - 1, "SampleBlock": 1},
        "plain": {"Attention": layers, "SampleBlock": 1},
        "reuse-kv": {"AttentionReuse": 1, "Attention": layers - 1, "SampleBlock": 1},
        "window": {"AttentionWindow": layers, "SampleBlock": 1},
    }[graph]
    expected = {name: count for name, count in expected.items() if count}
    model = load_graph(built.bundle, graph)
    nodes = [node for node in model.graph.node if node.domain == "lacache"]
    counts = {name: sum(node.op_type == name for node in nodes) for name in expected}
    assert counts == expected
    assert len(nodes) == sum(expected.values())
    for node in nodes:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert attributes == {"plugin_namespace": b"lacache", "plugin_version": b"1"}
    assert {function.name for function in model.functions} == set(expected)
    for function in model.functions:
        declared = {a.name for a in function.attribute_proto} | set(function.attribute)
        assert declared == {"plugin_namespace", "plugin_version"}
        assert {node.domain for node in function.node} == {""}
    assert {node.domain for node in model.graph.node} == {"", "lacache"}
    assert {(o.domain, o.version) for o in model.opset_import} == {("", 23), ("lacache", 1)}


@pytest.mark.parametrize("graph", GRAPHS)
def test_nothing_of_the_exporting_machine_is_recorded(
    model_name: str, models: Any, graph: str
) -> None:
    data = (models(model_name).bundle / f"{graph}.onnx").read_bytes()
    for trace in (b".py", b"/home", b"/work", b"/root", b"torch", b"pkg."):
        assert trace not in data, trace


@pytest.mark.parametrize("graph", GRAPHS)
def test_no_input_decides_a_shape(model_name: str, models: Any, graph: str) -> None:
    """Values of inputs reach no Slice, Reshape or Range; only their shapes do."""
    model = load_graph(models(model_name).bundle, graph)
    inputs = {value.name for value in model.graph.input}
    assert_shapes_are_free(model.graph.node, inputs)
    for function in model.functions:
        assert_shapes_are_free(function.node, set(function.input))


def assert_shapes_are_free(nodes: Any, data: set[str]) -> None:
    """Follow what depends on the values of `data`; `Shape` and `Size` cut the dependence."""
    reached = set(data)
    for node in nodes:
        for place in SHAPE_OPERANDS.get(node.op_type, ()):
            if place < len(node.input):
                assert node.input[place] not in reached, (node.op_type, node.name)
        if node.op_type not in ("Shape", "Size") and reached & set(node.input):
            reached.update(node.output)


@pytest.mark.parametrize("graph", GRAPHS)
def test_no_weight_is_cast_or_copied(model_name: str, models: Any, graph: str) -> None:
    """Weights feed Gather, MatMul, Mul and Add only: nothing converts or transposes them."""
    model = load_graph(models(model_name).bundle, graph)
    weights = {
        t.name for t in model.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL
    }
    users = {node.op_type for node in model.graph.node if weights & set(node.input)}
    assert users <= {"Gather", "MatMul", "Mul", "Add"}
    matrices = {name for name in weights if name.endswith(".weight") and "norm" not in name}
    multiplied = {n.input[1] for n in model.graph.node if n.op_type == "MatMul"} & weights
    assert multiplied == matrices - {"embed.weight"}


@pytest.mark.parametrize("graph", ["reuse", "plain", "reuse-kv", "window"])
def test_the_last_layer_runs_only_the_rows_that_are_read(
    float32_model: Built, graph: str, scratch: Path
) -> None:
    """Attention, output projection, FFN and head of the last layer see Bk + R rows, not all."""
    rows, length, width, extra = 2, 31, 5, 3
    every = WINDOW if graph == "window" else length
    manifest = load_manifest(float32_model.bundle)
    outputs = probe_shapes(float32_model.bundle, graph, scratch, (rows, length, width, extra))
    layers, read = manifest.model.num_layers, (rows, width + extra)
    first = 0 if graph in ("plain", "window") else 1
    attention = [shape[:2] for name, shape in outputs if name in ("Attention", "AttentionWindow")]
    assert attention == [
        read if layer == layers - 1 and layer > 0 else (rows, every)
        for layer in range(first, layers)
    ]
    products = {name: shape[:2] for name, shape in outputs if name.endswith(".weight")}
    assert products["head.weight"] == read
    last = f"layers.{layers - 1}."
    if layers > 1:
        cut = ("q", "attn_out", "gate_up", "down")
        assert {products[f"{last}{name}.weight"] for name in cut} == {read}
        assert products[last + "kv.weight"] == (rows, every)
        assert products["layers.0.down.weight"] == (rows, every)
    elif graph.startswith("reuse"):
        assert products[last + "down.weight"] == read
        assert products[last + "qkv.weight"] == (rows, width)


def probe_shapes(
    bundle: Path, graph: str, scratch: Path, sizes: tuple[int, int, int, int]
) -> list[tuple[str, tuple[int, ...]]]:
    """Shapes of every Attention output and every product with a weight, in graph order."""
    model = load_graph(bundle, graph)
    weights = {t.name for t in model.graph.initializer}
    probes = []
    for node in model.graph.node:
        if node.op_type in ("Attention", "AttentionWindow"):
            probes.append((node.op_type, node.output[0]))
        elif node.op_type == "MatMul" and node.input[1] in weights:
            probes.append((node.input[1], node.output[0]))
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(o) for _, o in probes)
    shutil.copy(bundle / "weights.safetensors", scratch)
    onnx.save(model, scratch / "probe.onnx")
    session = open_unmodified(scratch, "probe")
    values = session.run([name for _, name in probes], random_inputs(bundle, graph, sizes))
    return [(name, value.shape) for (name, _), value in zip(probes, values, strict=True)]


def random_inputs(
    bundle: Path, graph: str, sizes: tuple[int, int, int, int]
) -> dict[str, NDArray[Any]]:
    """Zeros of the contract's shapes, with a sensible geometry."""
    rows, length, width, extra = sizes
    symbols = {"B": rows, "N": length, "Bk": width, "W": WINDOW, "R": extra, "S": 1, "E": 1}
    inputs = {}
    for spec in load_manifest(bundle).contract[graph].inputs:
        shape = [symbols[dim] if isinstance(dim, str) else dim for dim in spec.shape]
        inputs[spec.name] = np.zeros(shape, spec.dtype)
    inputs["valid_to"][:] = length
    inputs["block_columns"][:] = 4 + np.arange(width)
    if "window_columns" in inputs:
        inputs["window_columns"][:] = 2 + np.arange(WINDOW)
    return inputs


def test_the_manifest_of_a_bundle(models: Any) -> None:
    manifest = load_manifest(models("llada").bundle, "bundle")
    assert manifest.body["source"] == {
        "model": "checkpoint",
        "revision": None,
        "dtype": "float32",
    }
    validation: Any = manifest.body["validation"]
    assert validation["mode"] == "full"
    assert 0 < validation["worst"] <= validation["bound"]
    assert {name.split(".")[0] for name in validation["outputs"]} == set(GRAPHS)
    assert str(models("llada").checkpoint.parent) not in json.dumps(dict(manifest.body))
    assert {*manifest.files} == {
        *(f"{graph}.onnx" for graph in GRAPHS),
        "weights.safetensors",
        "tokenizer.json",
        "text.json",
    }
    assert "tokenizer.json" not in load_manifest(models("llada-one").bundle).files


def test_bfloat16_bundles_keep_their_dtype(models: Any) -> None:
    built: Built = models("llada-bf16")
    manifest = load_manifest(built.bundle)
    assert manifest.body["dtype"] == "bfloat16"
    sizes = {
        directory: (directory / "weights.safetensors").stat().st_size
        for directory in (built.bundle, built.engine)
    }
    assert 1.9 < sizes[built.engine] / sizes[built.bundle] < 2.1
    caches = {spec.name: spec.dtype for spec in manifest.contract["fill"].outputs}
    assert {caches[name] for name in ("embed", "q", "k", "v")} == {"bfloat16"}
    assert {caches[name] for name in ("fa_max", "fa_sum", "fa_acc")} == {"float32"}
