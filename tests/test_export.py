"""Bundles: what the graphs contain, who can run them, and what happens when an export fails."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from built import Built
from canvases import Shape, block_tokens, greedy
from numpy.typing import NDArray
from synthetic import make_llada

from lacache_trt.artifacts import load_manifest
from lacache_trt.contract import GraphSpec, TensorSpec, graph_specs
from lacache_trt.engines.builder import build_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.errors import CapacityError, CheckpointError, OutputError, VerificationError
from lacache_trt.export import exporter, validate
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions
from lacache_trt.export.validate import validate_bundle
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import parameter_shapes
from lacache_trt.model.safetensors_file import read_safetensors_header
from lacache_trt.progress import SilentProgress
from lacache_trt.runtime import Runtime

GRAPHS = ("fill", "reuse", "plain")
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
    assert used["reuse"] == set(shapes)


@pytest.mark.parametrize("graph", GRAPHS)
def test_nodes_and_functions_of_the_domain(model_name: str, models: Any, graph: str) -> None:
    built: Built = models(model_name)
    layers = load_manifest(built.bundle).model.num_layers
    expected = {
        "fill": {"AttentionFill": 1},
        "reuse": {"AttentionReuse": 1, "Attention": layers - 1, "SampleBlock": 1},
        "plain": {"Attention": layers, "SampleBlock": 1},
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


@pytest.mark.parametrize("graph", ["reuse", "plain"])
def test_the_last_layer_runs_only_the_rows_that_are_read(
    float32_model: Built, graph: str, scratch: Path
) -> None:
    """Attention, output projection, FFN and head of the last layer see Bk + R rows, not N."""
    rows, length, width, extra = 2, 31, 5, 3
    manifest = load_manifest(float32_model.bundle)
    outputs = probe_shapes(float32_model.bundle, graph, scratch, (rows, length, width, extra))
    layers, read = manifest.model.num_layers, (rows, width + extra)
    first = 0 if graph == "plain" else 1
    attention = [shape[:2] for name, shape in outputs if name == "Attention"]
    assert attention == [
        read if layer == layers - 1 and layer > 0 else (rows, length)
        for layer in range(first, layers)
    ]
    products = {name: shape[:2] for name, shape in outputs if name.endswith(".weight")}
    assert products["head.weight"] == read
    last = f"layers.{layers - 1}."
    if layers > 1:
        cut = ("q", "attn_out", "gate_up", "down")
        assert {products[f"{last}{name}.weight"] for name in cut} == {read}
        assert products[last + "kv.weight"] == (rows, length)
        assert products["layers.0.down.weight"] == (rows, length)
    elif graph == "reuse":
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
        if node.op_type == "Attention":
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
    symbols = {"B": rows, "N": length, "Bk": width, "R": extra, "S": 1, "E": 1}
    inputs = {}
    for spec in load_manifest(bundle).contract[graph].inputs:
        shape = [symbols[dim] if isinstance(dim, str) else dim for dim in spec.shape]
        inputs[spec.name] = np.zeros(shape, spec.dtype)
    inputs["valid_to"][:] = length
    inputs["block_columns"][:] = 4 + np.arange(width)
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


@pytest.fixture
def instant(models: Any, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Exports of this model take their graphs from the finished bundle instead of tracing."""
    built: Built = models("llada")

    def recalled(_config: Any, name: str, *_: Any) -> ir.Model:
        return ir.load(built.bundle / f"{name}.onnx")

    monkeypatch.setattr(exporter, "capture_graph", recalled)
    return built


def test_nothing_is_overwritten_unless_asked(instant: Built, scratch: Path) -> None:
    out = scratch / "bundle"
    off = ExportOptions(validate="off")
    assert export_bundle(str(instant.checkpoint), out, off).out == out
    before = (out / "manifest.json").read_bytes()
    with pytest.raises(OutputError, match="not empty"):
        export_bundle(str(instant.checkpoint), out, off)
    assert (out / "manifest.json").read_bytes() == before
    replaced = ExportOptions(validate="off", overwrite=True, max_length=64)
    export_bundle(str(instant.checkpoint), out, replaced)
    manifest = load_manifest(out, "bundle")
    assert manifest.model.max_length == 64
    assert manifest.body["validation"] == {"mode": "off"}
    assert [path.name for path in scratch.iterdir()] == ["bundle"]


def test_a_length_beyond_the_models_is_refused(instant: Built, scratch: Path) -> None:
    with pytest.raises(CapacityError, match="longer than what the model was made for"):
        export_bundle(str(instant.checkpoint), scratch / "out", ExportOptions(max_length=5000))
    assert not any(scratch.iterdir())


def test_a_broken_checkpoint_leaves_nothing(instant: Built, scratch: Path) -> None:
    checkpoint = scratch / "checkpoint"
    shutil.copytree(instant.checkpoint, checkpoint)
    weights = checkpoint / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match="not finite"):
        export_bundle(str(checkpoint), scratch / "out")
    assert [path.name for path in scratch.iterdir()] == ["checkpoint"]


def misplace(model: onnx.ModelProto, name: str) -> None:
    """Let an initializer read the bytes before its own."""
    tensor = next(t for t in model.graph.initializer if t.name == name)
    for entry in tensor.external_data:
        if entry.key == "offset":
            entry.value = str(int(entry.value) - 128)


@pytest.mark.parametrize(
    ("graph", "weight"),
    [
        ("fill", "layers.0.attn_norm.weight"),
        ("reuse", "layers.1.attn_out.weight"),
        ("plain", "norm.weight"),
    ],
)
def test_validation_finds_a_wrong_graph(
    models: Any, scratch: Path, graph: str, weight: str
) -> None:
    """Graphs that read the wrong bytes are found, output by output."""
    bundle = scratch / "bundle"
    shutil.copytree(models("llada").bundle, bundle)
    model = load_graph(bundle, graph)
    misplace(model, weight)
    onnx.save(model, bundle / f"{graph}.onnx")
    config = load_manifest(models("llada").bundle).model
    with pytest.raises(VerificationError) as caught:
        validate_bundle(bundle, config, "float32", "full", SilentProgress())
    assert isinstance(caught.value.got, dict)
    assert {name.split(".")[0] for name in caught.value.got} == {graph}


def test_validation_finds_nan(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever among the outputs it stands."""
    run, bundle = validate._run_graph, models("llada-one").bundle

    def with_nan(path: Path, *others: Any) -> dict[str, NDArray[Any]]:
        outputs = run(path, *others)
        if path.stem == "reuse":
            outputs["confidence"] = np.full_like(outputs["confidence"], np.nan)
        return outputs

    monkeypatch.setattr(validate, "_run_graph", with_nan)
    with pytest.raises(VerificationError) as caught:
        validate_bundle(bundle, load_manifest(bundle).model, "float32", "full", SilentProgress())
    assert caught.value.got == {"reuse.confidence": "nan"}


def test_a_failed_validation_publishes_nothing(
    models: Any, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: Built = models("llada")

    def misread(_config: Any, name: str, *_: Any) -> ir.Model:
        model = load_graph(built.bundle, name)
        if name == "reuse":
            misplace(model, "layers.0.attn_out.weight")
        return ir.from_proto(model)

    monkeypatch.setattr(exporter, "capture_graph", misread)
    with pytest.raises(VerificationError, match="do not compute what the model computes"):
        export_bundle(str(built.checkpoint), scratch / "out")
    assert not any(scratch.iterdir())


def test_validation_by_slice(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model does not fit into memory, its first and last layer are validated."""
    monkeypatch.setattr(validate, "_available_bytes", lambda: 0)
    bundle = models("llada").bundle
    config = load_manifest(bundle).model
    report = validate_bundle(bundle, config, "float32", "auto", SilentProgress())
    assert report["mode"] == "slice"
    assert 0 < report["worst"] <= report["bound"]


def test_float16_through_to_generation(models: Any, scratch: Path) -> None:
    """Another dtype than the checkpoint's; the engine's weights are the rounded ones."""
    bundle, engine = scratch / "bundle", scratch / "engine"
    export_bundle(str(models("llada-one").checkpoint), bundle, ExportOptions(dtype="float16"))
    manifest = load_manifest(bundle, "bundle")
    assert (manifest.body["dtype"], manifest.body["source"]["dtype"]) == ("float16", "float32")
    build_engine(bundle, engine, BuildOptions(engine="onnxruntime", threads=1))
    config = GenerationConfig(gen_length=8, block_length=4, steps=8)
    with Runtime.load(engine) as runtime, Runtime.load(models("llada-one").engine) as other:
        rounded, full = runtime.generate([[1, 2, 3]] * 2, config), other.generate([1, 2, 3], config)
    agreeing = sum(a == b for a, b in zip(rounded[0].tokens, full.tokens, strict=True))
    assert agreeing >= 6


_MEMORY = """
import json, sys
from pathlib import Path
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions
export_bundle(sys.argv[1], Path(sys.argv[2]), ExportOptions(validate="off"))
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps({key: int(status[key].split()[0]) * 1024 for key in ("VmHWM", "RssAnon")}))
"""
SIZES: dict[str, dict[str, int]] = {
    "0.2 GB": {"hidden": 1024, "ffn": 4096, "vocab": 32000, "heads": 8},
    "1.2 GB": {"hidden": 3072, "ffn": 8192, "vocab": 64000, "heads": 24},
    "2.9 GB": {"hidden": 4096, "ffn": 12288, "vocab": 126464, "heads": 32},
}


def measure_export(scratch: Path, sizes: dict[str, int]) -> tuple[int, dict[str, int]]:
    """Bytes of the bundle of two layers, and the memory figures of the process that wrote it."""
    checkpoint, out = scratch / "checkpoint", scratch / "out"
    make_llada(checkpoint, layers=2, kv_heads=None, dtype="bfloat16", sparse=True, **sizes)
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(checkpoint), str(out)],
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
    )
    written = load_manifest(out, hashes="sizes").total_bytes()
    shutil.rmtree(checkpoint)
    shutil.rmtree(out)
    return written, json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("one", "other"),
    [("0.2 GB", "1.2 GB"), pytest.param("1.2 GB", "2.9 GB", marks=pytest.mark.slow)],
)
def test_memory_of_an_export_does_not_grow_with_the_weights(
    scratch: Path, one: str, other: str
) -> None:
    """VmHWM and RssAnon of `export --validate off` grow by less than 5% of the added weights."""
    (small, before), (large, after) = (measure_export(scratch, SIZES[n]) for n in (one, other))
    print(f"weights {small / 1e9:.2f} -> {large / 1e9:.2f} GB, {before} -> {after}")
    assert large - small > 10**9
    growth = {key: after[key] - before[key] for key in after}
    assert max(growth.values()) < 0.05 * (large - small), growth


# Forks, so that each child starts with everything imported, and kills itself at a chosen moment.
_KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from lacache_trt.export.exporter import export_bundle
from lacache_trt.export.options import ExportOptions

def export(fraction=None, whole=None):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    if fraction is not None:
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(fraction * whole, kill).start()
    export_bundle(sys.argv[1], Path(sys.argv[2]), ExportOptions(overwrite=True))
    os._exit(0)

started = time.monotonic()
assert export() == 0
whole = time.monotonic() - started
for fraction in (*map(float, sys.argv[3:]), None):
    print("ready", flush=True)
    sys.stdin.readline()
    print(export(fraction, whole), flush=True)
"""


@pytest.fixture
def exports(models: Any, scratch: Path) -> Iterator[Callable[[], int]]:
    """Runs the next export, killed at one of the moments; the last one runs to its end."""
    moments = ("0.03", "0.5", "0.9")
    arguments = [str(models("llada-one").checkpoint), str(scratch / "out"), *moments]
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        pipes = process.stdin, process.stdout

        def run_next() -> int:
            assert pipes[1].readline() == "ready\n"
            pipes[0].write("\n")
            return int(pipes[1].readline())

        yield run_next
        process.kill()


def test_a_killed_export_leaves_the_output_whole_or_absent(
    exports: Callable[[], int], scratch: Path
) -> None:
    """While replacing a bundle, and while writing a new one; the next export cleans up."""
    out = scratch / "out"
    killed = 0
    for keep in (True, False, False):
        if not keep:
            shutil.rmtree(out, ignore_errors=True)
        killed += exports() != 0
        if out.exists():
            load_manifest(out, "bundle")
        assert out.exists() or not keep
    assert killed
    assert exports() == 0
    load_manifest(out, "bundle")
    assert [path.name for path in scratch.iterdir()] == ["out"]
