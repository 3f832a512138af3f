"""FP8 for TensorRT 8.5, which has no such type: what travels are int32 words of the same bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from native_entry import NativeEntry
from plugin_cases import CASES, SIZES

from lacache_trt.demo.run import CHECKPOINT
from lacache_trt.engines.tensorrt import attach_programs
from lacache_trt.engines.tensorrt.legacy_lowering import lower_model
from lacache_trt.engines.tensorrt.legacy_types import LegacyTypes
from lacache_trt.errors import VerificationError
from lacache_trt.export.graphs import capture_graph
from lacache_trt.export.passes.external_weights import WeightLocation
from lacache_trt.model.checkpoint import Checkpoint
from lacache_trt.model.config import fp8_dtypes, parameter_shapes
from lacache_trt.model.fp8 import Fp8Recipe, select_linears
from lacache_trt.plugins import library
from lacache_trt.plugins.packing import pack

FP8 = ir.DataType.FLOAT8E4M3FN
KINDS = {"float16": ir.DataType.FLOAT16, "float32": ir.DataType.FLOAT, "float8_e4m3fn": FP8}
TENSORS = {"B": 2, "N": 24, "Bk": 8, "S": 3, "E": 2, "R": 0}


@pytest.fixture(scope="module")
def reuse() -> ir.Model:
    """`reuse` of three layers of tiny-llada's width in float16 with FP8 in two FFNs, no weights."""
    config = replace(Checkpoint.open(CHECKPOINT).config, num_layers=3, dtype="float16")
    linears = select_linears(config, Fp8Recipe()).linears
    kinds, offset, locations = fp8_dtypes(linears), 0, {}
    for name, shape in parameter_shapes(config, linears).items():
        dtype = KINDS[kinds.get(name, "float16")]
        nbytes = int(prod(shape) * dtype.itemsize)
        locations[name] = WeightLocation("weights.safetensors", offset, nbytes, dtype, shape)
        offset += nbytes
    return capture_graph(config, "reuse", "float16", 23, locations, linears)


def external(tensor: ir.TensorProtocol | None) -> tuple[int | None, int | None]:
    assert isinstance(tensor, ir.ExternalTensor)
    return tensor.offset, tensor.length


def test_fp8_weights_and_activations_become_words(
    reuse: ir.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def program(op: str, dtype: torch.dtype, width: int, sm: int, as_words: bool) -> bytes:
        asked.append(as_words)
        return b"no kernel is compiled here"

    monkeypatch.setattr(attach_programs, "packed_program", program)
    weights = {
        name: (each.const_value.shape.numpy(), external(each.const_value))
        for name, each in reuse.graph.initializers.items()
        if each.const_value is not None and each.const_value.dtype == FP8
    }
    assert len(weights) == 4
    graph = lower_model(reuse, 90, TENSORS)
    assert asked
    assert all(asked)
    after = onnx.load_model_from_string(graph.data)
    operators = Counter(node.op_type for node in after.graph.node if node.domain == "lacache")
    counts = [operators[op] for op in ("RMSNormQuant", "SwiGLUQuant", "GroupLinear")]
    assert counts == [2, 2, 4]

    found = ir.from_proto(after).graph.initializers
    for name, ((rows, width), place) in weights.items():
        words = found[name].const_value
        assert words is not None
        assert (words.dtype, words.shape.numpy()) == (ir.DataType.INT32, (rows, width // 4))
        assert external(words) == place
        assert place[1] == rows * width
    assert FP8 not in {each.dtype for each in found.values()}

    shapes = {
        each.name: [dim.dim_value for dim in each.type.tensor_type.shape.dim]
        for each in after.graph.value_info
    }
    for node in after.graph.node:
        if node.op_type in ("RMSNormQuant", "SwiGLUQuant"):
            words, scale = node.output
            assert (graph.types[words], graph.types[scale]) == ("int32", "float32")
            assert prod(shapes[words]) * 4 == prod(shapes[scale]) * 128
        if node.op_type == "GroupLinear":
            assert graph.types[node.input[0]] == "int32"
            assert graph.types[node.output[0]] == "float16"


def test_a_weight_in_the_graph_keeps_its_bytes() -> None:
    values = torch.linspace(-400, 400, 24).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    tensor = ir.TensorProtoTensor(
        onnx.helper.make_tensor("w", int(FP8), [3, 8], values.tobytes(), raw=True)
    )
    weight = ir.Value(name="w", const_value=tensor, shape=ir.Shape([3, 8]))
    weight.dtype = FP8
    node = ir.node("GroupLinear", [weight], domain="lacache")
    node.outputs[0].dtype = ir.DataType.FLOAT
    graph = ir.Graph([], node.outputs, nodes=[node], initializers=[weight])
    LegacyTypes()(ir.Model(graph, ir_version=8))
    assert weight.const_value is not None
    assert weight.const_value.numpy().dtype == np.int32
    assert weight.const_value.numpy().shape == (3, 2)
    assert weight.const_value.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("op", "domain", "width", "message"),
    [("Identity", "", 8, "no type"), ("GroupLinear", "lacache", 6, "whole int32 words")],
)
def test_fp8_outside_plugins_and_part_words_are_refused(
    op: str, domain: str, width: int, message: str
) -> None:
    x = ir.Value(name="x", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.FLOAT))
    make = ir.node("GroupQuant", [x], domain="lacache")
    make.outputs[0].name, make.outputs[0].shape = "words", ir.Shape([1, width])
    make.outputs[0].dtype = FP8
    use = ir.node(op, make.outputs, domain=domain)
    use.outputs[0].dtype = ir.DataType.FLOAT
    graph = ir.Graph([x], use.outputs, nodes=[make, use])
    with pytest.raises(VerificationError, match=message):
        LegacyTypes()(ir.Model(graph, ir_version=8))


@pytest.mark.parametrize("name", ["RMSNormQuant", "SwiGLUQuant", "GroupQuant", "GroupLinear"])
def test_programs_give_words_and_launch_the_same(name: str) -> None:
    """The plugin library reads both forms: shapes of FP8 tensors differ, nothing else does."""
    entry = NativeEntry(library.build_library())
    case, sizes = CASES[name], SIZES[0]
    program = case.plugin_program(torch.float16, sizes, 90)
    shapes = case.shapes(sizes)
    in_words = {
        rule.name: (*shapes[rule.name][:-1], shapes[rule.name][-1] // 4)
        if rule.dtype == torch.float8_e4m3fn
        else shapes[rule.name]
        for rule in program.inputs
    }
    plain = entry.describe(pack(program, 90), [shapes[rule.name] for rule in program.inputs])
    words = entry.describe(
        pack(program, 90, fp8_as_int32=True), [in_words[rule.name] for rule in program.inputs]
    )
    assert words.launches == plain.launches
    assert words.workspace == plain.workspace
    for rule, (kind, shape), (words_kind, words_shape) in zip(
        program.outputs, plain.outputs, words.outputs, strict=True
    ):
        if rule.dtype == torch.float8_e4m3fn:
            assert (words_kind, words_shape) == (3, (*shape[:-1], shape[-1] // 4))
        else:
            assert (words_kind, words_shape) == (kind, shape)
