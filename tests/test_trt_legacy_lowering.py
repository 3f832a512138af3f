"""What TensorRT 8.5 gets to parse: opset 17, fixed sizes, plugins as nodes, the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from built import Built
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx_ir.passes.common import InlinePass

from lacache_trt.artifacts import Manifest, load_manifest
from lacache_trt.contract import GraphSpec
from lacache_trt.engines.tensorrt import attach_programs
from lacache_trt.engines.tensorrt.legacy_graph import LoweredGraph
from lacache_trt.engines.tensorrt.legacy_lowering import lower_graph
from lacache_trt.engines.tensorrt.legacy_opset import LowerOpset
from lacache_trt.engines.tensorrt.legacy_sizes import FixSizes
from lacache_trt.engines.tensorrt.legacy_types import NAMES, LegacyTypes
from lacache_trt.errors import ArtifactError, VerificationError
from lacache_trt.plugins.functions import all_functions

SIZES = {"B": 2, "N": 24, "Bk": 8, "S": 3, "E": 2, "R": 0}
PROGRAM = b"no kernel is compiled here"


@pytest.fixture
def bundle(models: Callable[[str], Built], monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """A float32 bundle whose plugin nodes get a stand-in for their program."""
    monkeypatch.setattr(attach_programs, "packed_program", lambda *_: PROGRAM)
    return load_manifest(models("llada").bundle, "bundle")


def lowered(bundle: Manifest, name: str, **sizes: int) -> LoweredGraph:
    return lower_graph(bundle.path(f"{name}.onnx"), 90, {**SIZES, **sizes})


def resolved(spec: GraphSpec, **sizes: int) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    values = {**SIZES, **sizes}
    return {
        side: [
            (tensor.name, tuple(values[d] if isinstance(d, str) else d for d in tensor.shape))
            for tensor in tensors
        ]
        for side, tensors in (("input", spec.inputs), ("output", spec.outputs))
    }


def declared(model: onnx.ModelProto) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    return {
        side: [
            (value.name, tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim))
            for value in values
        ]
        for side, values in (("input", model.graph.input), ("output", model.graph.output))
    }


@pytest.mark.parametrize("name", ["fill", "reuse"])
@pytest.mark.parametrize("columns", [0, 4], ids=["no logits", "logits"])
def test_only_what_the_parser_reads_is_left(
    bundle: Manifest, tmp_path: Path, name: str, columns: int
) -> None:
    graph = lowered(bundle, name, R=columns)
    model = onnx.load_model_from_string(graph.data)
    versions = {each.domain: each.version for each in model.opset_import}
    assert versions == {"": 17, "lacache": 1}
    assert (model.ir_version, len(model.functions)) == (8, 0)
    plugins = [node for node in model.graph.node if node.domain == "lacache"]
    assert plugins
    for node in plugins:
        attributes = {each.name: each for each in node.attribute}
        assert attributes["plugin_namespace"].s == b"lacache"
        assert attributes["program"].t.data_type == onnx.TensorProto.INT8
        assert attributes["program"].t.raw_data == PROGRAM
    others = [node for node in model.graph.node if node.domain != "lacache"]
    for node in others:
        schema = onnx.defs.get_schema(node.op_type, 17, "")
        assert {each.name for each in node.attribute} <= set(schema.attributes)
        assert node.op_type not in ("Shape", "Constant", "Identity", "Range", "Clip")
    path = bundle.directory / f"{tmp_path.name}.{name}.onnx"
    path.write_bytes(graph.data)
    try:
        onnx.checker.check_model(path)
    finally:
        path.unlink()


@pytest.mark.parametrize("name", ["fill", "reuse"])
@pytest.mark.parametrize("columns", [0, 4], ids=["no logits", "logits"])
def test_inputs_and_outputs_are_the_contract_at_these_sizes(
    bundle: Manifest, name: str, columns: int
) -> None:
    graph = lowered(bundle, name, R=columns)
    expected = resolved(bundle.contract[name], R=columns)
    if columns == 0 and name == "reuse":
        assert graph.absent == ("logit_columns", "logits")
        expected = {
            side: [each for each in tensors if each[0] not in graph.absent]
            for side, tensors in expected.items()
        }
    else:
        assert graph.absent == ()
    assert declared(onnx.load_model_from_string(graph.data)) == expected


@pytest.mark.parametrize("name", ["fill", "reuse"])
def test_every_value_has_a_type_that_8_5_has(bundle: Manifest, name: str) -> None:
    graph = lowered(bundle, name)
    model = ir.from_proto(onnx.load_model_from_string(graph.data))
    for node in model.graph:
        for value in node.outputs:
            assert graph.types[str(value.name)] in NAMES.values()
    for value in model.graph.initializers.values():
        if value.dtype == ir.DataType.INT64:
            assert value.const_value is not None
            assert np.abs(value.const_value.numpy()).max() < 2**31


def with_functions(graph: LoweredGraph, folder: Path) -> ort.InferenceSession:
    """The lowered graph with each plugin node replaced by its op's function."""
    model = ir.from_proto(onnx.load_model_from_string(graph.data))
    for node in model.graph:
        if node.domain == "lacache":
            function = all_functions()[node.op_type]
            function.attributes["program"] = ir.Attr("program", ir.AttributeType.TENSOR, None)
            function.opset_imports[""] = 17
            model.functions[function.identifier()] = function
    model = LowerOpset()(InlinePass()(model).model).model
    path = folder / "with-functions.onnx"
    path.write_bytes(ir.to_proto(model).SerializeToString())
    try:
        return ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    finally:
        path.unlink()


def feeds_of(spec: GraphSpec, sizes: dict[str, int], seed: int) -> dict[str, Any]:
    """Random inputs: a canvas whose rows have different ranges and blocks."""
    rng = np.random.default_rng(seed)
    rows, columns, block = sizes["B"], sizes["N"], sizes["Bk"]
    first = rng.integers(0, 4, rows)
    special = {
        "valid_from": first,
        "valid_to": columns - rng.integers(0, 3, rows),
        "positions": np.maximum(np.arange(columns)[None] - first[:, None], 0),
        "block_columns": 4 + 3 * np.arange(rows)[:, None] + np.arange(block),
        "guide_row": np.arange(rows),
        "temperature": np.full(rows, 0.7),
    }
    feeds = {}
    for tensor in spec.inputs:
        shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape)
        if tensor.dtype == "float32":
            value = np.abs(rng.normal(size=shape)) + 0.5 if tensor.name == "fa_sum" else None
            value = rng.normal(size=shape) if value is None else value
        else:
            value = rng.integers(0, 20, shape)
        feeds[tensor.name] = np.asarray(special.get(tensor.name, value)).astype(tensor.dtype)
    return feeds


@pytest.mark.parametrize(
    "sizes",
    [SIZES, {"B": 1, "N": 40, "Bk": 4, "S": 1, "E": 1, "R": 3}],
    ids=["without logits", "with logits"],
)
@pytest.mark.parametrize("name", ["fill", "reuse"])
def test_the_lowered_graph_computes_what_the_bundle_computes(
    bundle: Manifest, name: str, sizes: dict[str, int]
) -> None:
    graph = lowered(bundle, name, **sizes)
    feeds = feeds_of(bundle.contract[name], sizes, 7)
    original = ort.InferenceSession(bundle.path(f"{name}.onnx"), providers=["CPUExecutionProvider"])
    session = with_functions(graph, bundle.directory)
    names = [output.name for output in session.get_outputs()]
    left = {key: value for key, value in feeds.items() if key not in graph.absent}
    got, expected = session.run(names, left), original.run(names, feeds)
    for label, mine, theirs in zip(names, got, expected, strict=True):
        if label.startswith("fa_"):  # undefined in rows of the block
            mine, theirs = (_outside_block(each, feeds) for each in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5, err_msg=label)


def _outside_block(array: Any, feeds: dict[str, Any]) -> Any:
    kept = np.ones(array.shape[:3], bool)
    for row, columns in enumerate(feeds["block_columns"]):
        kept[row][:, columns] = False
    return np.where(kept.reshape(kept.shape + (1,) * (array.ndim - 3)), array, 0)


def test_a_lowered_graph_survives_its_files(bundle: Manifest, tmp_path: Path) -> None:
    graph = lowered(bundle, "reuse")
    graph.write(tmp_path / "reuse.onnx")
    assert LoweredGraph.read(tmp_path / "reuse.onnx") == graph
    (tmp_path / "reuse.types.json").unlink()
    with pytest.raises(ArtifactError, match="incomplete"):
        LoweredGraph.read(tmp_path / "reuse.onnx")


# --- single passes ---


def model_of(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(text))


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 4))
def test_fixed_sizes_reach_every_value(rows: int, columns: int, extra: int) -> None:
    model = model_of(
        """<ir_version: 10, opset_import: ["" : 23]>
        g (int32[B, N] x, int32[B, R] more) => (int32[B, C] joined, int32[M] flat) {
          joined = Concat <axis = 1> (x, more)
          minus = Constant <value_ints = [-1]> ()
          flat = Reshape (joined, minus)
        }"""
    )
    joined, flat = model.graph.outputs
    joined.shape, flat.shape = ir.Shape(["B", "N + R"]), ir.Shape(["B*(N + R)"])
    FixSizes({"B": rows, "N": columns, "R": extra})(model)
    assert [list(value.shape) for value in model.graph.outputs if value.shape is not None] == [
        [rows, columns + extra],
        [rows * (columns + extra)],
    ]
    assert [value.name for value in model.graph.inputs] == (["x", "more"] if extra else ["x"])


def test_axes_of_a_reduction_become_an_attribute() -> None:
    model = model_of(
        """<ir_version: 10, opset_import: ["" : 23]>
        g (float[2, 3] x) => (float[2, 1] y) <int64[1] axes = {-1}> {
          y = ReduceMean <keepdims = 1> (x, axes)
        }"""
    )
    LowerOpset()(model)
    (node,) = model.graph
    assert (len(node.inputs), node.attributes["axes"].as_ints()) == (1, (-1,))


def test_computed_axes_are_refused() -> None:
    model = model_of(
        """<ir_version: 10, opset_import: ["" : 23]>
        g (float[2, 3] x, int64[1] axes) => (float[2, 1] y) { y = ReduceMax (x, axes) }"""
    )
    with pytest.raises(VerificationError, match="computed"):
        LowerOpset()(model)


def test_an_operator_that_changed_later_is_refused() -> None:
    model = model_of(
        """<ir_version: 10, opset_import: ["" : 23]>
        g (float[2, 3] x) => (float[2, 3] y) { y = Gelu (x) }"""
    )
    with pytest.raises((VerificationError, onnx.defs.SchemaError)):
        LowerOpset()(model)


@pytest.mark.parametrize(
    ("value", "user", "expected"),
    [(2**63 - 1, "Slice", 2**31 - 1), (-(2**40), "Slice", -(2**31)), (7, "Gather", 7)],
)
def test_constants_are_narrowed(value: int, user: str, expected: int) -> None:
    end = ir.Value(name="end", const_value=ir.tensor(np.array([value], np.int64)))
    end.dtype = ir.DataType.INT64
    x = ir.Value(name="x", shape=ir.Shape([4]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node(user, [x, end, end] if user == "Slice" else [x, end])
    node.outputs[0].dtype = ir.DataType.FLOAT
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[end], opset_imports={"": 17})
    LegacyTypes()(ir.Model(graph, ir_version=8))
    narrowed = graph.initializers["end"].const_value
    assert narrowed is not None
    assert narrowed.numpy().tolist() == [expected]


def test_a_wide_constant_and_a_wide_value_are_refused() -> None:
    for text in (
        "g (int32[1] x) => (int64[1] y) { y = Cast <to = 7> (x) }",
        "g (bfloat16[1] x) => (bfloat16[1] y) { y = Neg (x) }",
    ):
        model = model_of(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
        for node in model.graph:
            node.outputs[0].dtype = model.graph.outputs[0].dtype
        with pytest.raises(VerificationError, match="no type"):
            LegacyTypes()(model)
