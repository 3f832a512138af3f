"""The onnx_ir passes, each against the numbered rules of its docstring."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import onnx_ir as ir
import pytest

from lacache_trt.errors import VerificationError
from lacache_trt.export.passes.attach_functions import AttachFunctions
from lacache_trt.export.passes.drop_metadata import DropMetadata
from lacache_trt.export.passes.external_weights import (
    PARAMETER_PREFIX,
    ExternalWeights,
    WeightLocation,
    parameter_name,
)
from lacache_trt.export.passes.fold_shapes import FoldShapes
from lacache_trt.export.passes.to_float32 import ToFloat32
from lacache_trt.plugins.spec import DOMAIN, NODE_ATTRIBUTES, VERSION

FLOAT, HALF, BF16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16
PARAMETER = PARAMETER_PREFIX + "layers/0/down/weight"
NAME = "layers.0.down.weight"
PLACE = WeightLocation("weights.safetensors", 4096, 24, FLOAT, (2, 3))


class Untouchable(ir.Tensor):
    """A weight that must never be read."""

    def numpy(self) -> NoReturn:
        """Fail."""
        raise AssertionError("a pass read a weight")

    def tobytes(self) -> NoReturn:
        """Fail."""
        raise AssertionError("a pass read a weight")


def value(name: str, dtype: ir.DataType = FLOAT, shape: tuple[Any, ...] = (2, 3)) -> ir.Value:
    """A typed value without producer."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def weight(name: str, dtype: ir.DataType = FLOAT) -> ir.Value:
    """An initializer that a pass may look at but not read."""
    made = value(name, dtype)
    made.const_value = Untouchable(np.zeros((2, 3), dtype.numpy()), name=name)
    return made


def constant(name: str, array: Any) -> ir.Value:
    """A small initializer."""
    tensor = ir.tensor(np.asarray(array), name=name)
    made = value(name, tensor.dtype, tuple(tensor.shape))
    made.const_value = tensor
    return made


def model_of(
    inputs: list[ir.Value], outputs: list[ir.Value], nodes: list[ir.Node], *initializers: ir.Value
) -> ir.Model:
    """A model of these nodes."""
    graph = ir.Graph(
        inputs, outputs, nodes=nodes, initializers=initializers, opset_imports={"": 23}
    )
    return ir.Model(graph, ir_version=10)


def op(name: str, *inputs: ir.Value, dtype: ir.DataType = FLOAT, **attributes: Any) -> ir.Node:
    """A node with one output of the first input's shape."""
    shape = inputs[0].shape
    output = ir.Value(name=f"{name}_out", type=ir.TensorType(dtype), shape=shape)
    return ir.node(name, list(inputs), attributes, outputs=[output])


class TestAttachFunctions:
    """Only what is used; nodes stay as they are."""

    def test_only_used_functions_are_added(self) -> None:
        q, out = value("q"), value("out")
        node = ir.node("Attention", [q], NODE_ATTRIBUTES, domain=DOMAIN, outputs=[out])
        model = model_of([q], [out], [node])
        result = AttachFunctions()(model)
        assert result.modified
        assert [name for _, name, _ in model.functions] == ["Attention"]
        assert model.opset_imports[DOMAIN] == VERSION
        assert (node.domain, node.op_type) == (DOMAIN, "Attention")
        assert {key: a.as_string() for key, a in node.attributes.items()} == NODE_ATTRIBUTES

    def test_a_graph_without_them_is_left_alone(self) -> None:
        x = value("x")
        node = op("Neg", x)
        model = model_of([x], list(node.outputs), [node])
        assert not AttachFunctions()(model).modified
        assert not model.functions
        assert DOMAIN not in model.opset_imports


class TestDropMetadata:
    """Nothing of the machine stays, the graph gets its contract name."""

    def test_everything_recorded_goes(self) -> None:
        x, w = value("x"), weight("w")
        node = op("Add", x, w)
        model = model_of([x], list(node.outputs), [node], w)
        graph = model.graph
        held = (model, graph, node, node.outputs[0], x, w)
        for owner in held:
            owner.metadata_props["pkg.torch.stack"] = "/home/someone/model.py"
        for owner in (model, graph, node):
            owner.doc_string = "a trace"
        model.producer_version = "2.11"
        DropMetadata("fill")(model)
        assert graph.name == "fill"
        assert model.producer_name == "lacache-trt"
        assert model.producer_version is None
        assert not any(owner.metadata_props for owner in held)
        assert not any(owner.doc_string for owner in (model, graph, node))


class TestExternalWeights:
    """Weights become references; constants stay; a contradiction is an error."""

    def test_parameters_become_references(self) -> None:
        x, w, small = value("x"), weight(PARAMETER), constant("scale", np.float32(2))
        add = op("Add", x, w)
        scaled = op("Mul", add.outputs[0], small)
        model = model_of([x], list(scaled.outputs), [add, scaled], w, small)
        assert ExternalWeights({NAME: PLACE})(model).modified
        assert set(model.graph.initializers) == {NAME, "scale"}
        tensor = model.graph.initializers[NAME].const_value
        assert isinstance(tensor, ir.ExternalTensor)
        assert (tensor.location, tensor.offset, tensor.length) == (PLACE.file, 4096, 24)
        assert (tensor.name, tensor.dtype, tuple(tensor.shape)) == (NAME, FLOAT, (2, 3))
        assert add.inputs[1] is model.graph.initializers[NAME]
        assert model.graph.initializers["scale"].const_value is small.const_value

    def test_a_model_without_parameters_is_left_alone(self) -> None:
        x, small = value("x"), constant("scale", np.float32(2))
        node = op("Mul", x, small)
        assert not ExternalWeights({})(model_of([x], list(node.outputs), [node], small)).modified

    @pytest.mark.parametrize(
        "place",
        [
            WeightLocation("weights.safetensors", 0, 24, FLOAT, (3, 2)),
            WeightLocation("weights.safetensors", 0, 12, HALF, (2, 3)),
        ],
        ids=["shape", "dtype"],
    )
    def test_a_contradicting_file_is_an_error(self, place: WeightLocation) -> None:
        x, w = value("x"), weight(PARAMETER)
        node = op("Add", x, w)
        with pytest.raises(VerificationError, match=NAME):
            ExternalWeights({NAME: place}).call(model_of([x], list(node.outputs), [node], w))

    def test_names(self) -> None:
        assert parameter_name(PARAMETER) == NAME
        assert parameter_name("val_3") is None


class TestFoldShapes:
    """Shape arithmetic goes, weights are neither read nor folded, unused ones disappear."""

    @staticmethod
    def model() -> ir.Model:
        """x + w, reshaped to (B, 3, 1) by shape arithmetic; two more weights are not used."""
        x, w = value("x", shape=("B", 3)), weight(PARAMETER)
        doubled = op("Add", w, w)
        total = op("Add", x, w)
        one, two = constant("one", np.array([1])), constant("two", np.array([2]))
        three = op("Add", one, two, dtype=ir.DataType.INT64)
        target = ir.node(
            "Concat",
            [constant_minus := constant("minus", [-1]), three.outputs[0], one],
            {"axis": 0},
        )
        target.outputs[0].dtype = ir.DataType.INT64
        shaped = ir.node("Reshape", [total.outputs[0], target.outputs[0]])
        unused = weight(PARAMETER_PREFIX + "unused/weight")
        for index, node in enumerate((doubled, total, three, target, shaped)):
            node.outputs[0].name = f"value_{index}"
        shaped.outputs[0].dtype = FLOAT
        nodes = [doubled, total, three, target, shaped]
        return model_of([x], list(shaped.outputs), nodes, w, unused, one, two, constant_minus)

    def test_weights_are_not_read_and_unused_ones_go(self) -> None:
        model = self.model()
        FoldShapes()(model)
        assert {node.op_type for node in model.graph} == {"Add", "Reshape"}
        assert sum(node.op_type == "Add" for node in model.graph) == 1
        assert PARAMETER in model.graph.initializers
        assert PARAMETER_PREFIX + "unused/weight" not in model.graph.initializers
        assert [inner.name for inner in model.graph.inputs] == ["x"]
        reshape = next(node for node in model.graph if node.op_type == "Reshape")
        folded = reshape.inputs[1].const_value
        assert folded is not None
        assert folded.numpy().tolist() == [-1, 3, 1]


class TestToFloat32:
    """Half-precision types, casts and constants become float32; weights move."""

    @pytest.mark.parametrize("dtype", [HALF, BF16])
    def test_types_casts_and_constants(self, dtype: ir.DataType) -> None:
        x, ids = value("x", dtype), value("ids", ir.DataType.INT32)
        w = value(NAME, dtype)
        w.const_value = WeightLocation("weights.safetensors", 8, 12, dtype, (2, 3)).tensor(NAME)
        half = constant("half", np.full((1,), 0.5, np.float32).astype(dtype.numpy()))
        add = op("Add", x, w, dtype=dtype)
        scaled = op("Mul", add.outputs[0], half, dtype=dtype)
        cast = op("Cast", ids, dtype=dtype, to=int(dtype))
        down = op("Cast", scaled.outputs[0], dtype=ir.DataType.INT32, to=int(ir.DataType.INT32))
        down.outputs[0].name = "down"
        held = ir.tensor(np.array([1.5, -2.0], np.float32).astype(dtype.numpy()))
        fixed = ir.node("Constant", [], {"value": held})
        fixed.outputs[0].dtype = dtype
        outputs = [node.outputs[0] for node in (scaled, cast, down, fixed)]
        nodes = [add, scaled, cast, down, fixed]
        model = model_of([x, ids], outputs, nodes, w, half)
        ToFloat32({NAME: PLACE})(model)
        assert [inner.dtype for inner in model.graph.inputs] == [FLOAT, ir.DataType.INT32]
        assert [o.dtype for o in outputs] == [FLOAT, FLOAT, ir.DataType.INT32, FLOAT]
        assert add.outputs[0].dtype == FLOAT
        assert cast.attributes["to"].as_int() == FLOAT
        assert down.attributes["to"].as_int() == ir.DataType.INT32
        stored = fixed.attributes["value"].as_tensor()
        assert (stored.dtype, stored.numpy().tolist()) == (FLOAT, [1.5, -2.0])
        initializers = model.graph.initializers
        assert initializers["half"].dtype == FLOAT
        assert initializers["half"].const_value.numpy().tolist() == [0.5]  # type: ignore[union-attr]
        moved = initializers[NAME].const_value
        assert isinstance(moved, ir.ExternalTensor)
        assert (moved.offset, moved.length, moved.dtype) == (4096, 24, FLOAT)

    def test_other_constants_stay(self) -> None:
        x, index = value("x"), constant("index", np.array([1, 2]))
        node = op("Gather", x, index)
        model = model_of([x], list(node.outputs), [node], index)
        ToFloat32({})(model)
        assert model.graph.initializers["index"].const_value is index.const_value
