"""FP8 for TensorRT 8.5, which has no such type: what travels are int32 words of the same bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import prod

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from built import Built
from fp8_models import quantised
from native_entry import NativeEntry
from plugin_cases import CASES, SIZES

from lacache_trt.artifacts import Manifest, load_manifest
from lacache_trt.engines.tensorrt import attach_programs
from lacache_trt.engines.tensorrt.legacy_lowering import lower_graph
from lacache_trt.engines.tensorrt.legacy_types import LegacyTypes
from lacache_trt.errors import VerificationError
from lacache_trt.export.graphs import capture_graph, weight_locations
from lacache_trt.model.fp8 import fp8_linears
from lacache_trt.plugins import library
from lacache_trt.plugins.packing import pack

FLOAT, INT32, FP8 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32, onnx.TensorProto.FLOAT8E4M3FN
TENSORS = {"B": 2, "N": 24, "Bk": 8, "S": 3, "E": 2, "R": 0}


@pytest.fixture(scope="module")
def bundle(models: Callable[[str], Built], tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """tiny-llada with FP8 in its FFNs; of the graphs `reuse` alone."""
    plain = load_manifest(models("tiny-llada").bundle, "bundle", hashes="sizes")
    derived = quantised(plain, tmp_path_factory.mktemp("legacy-fp8") / "bundle")
    weights = weight_locations(derived.path("weights.safetensors"))
    linears = fp8_linears(derived.body, derived.model)
    graph = capture_graph(derived.model, "reuse", "float32", 23, weights, linears)
    ir.save(graph, derived.directory / "reuse.onnx")
    return derived


def external(tensor: onnx.TensorProto) -> tuple[str, str]:
    facts = {entry.key: entry.value for entry in tensor.external_data}
    return facts["offset"], facts["length"]


def test_fp8_weights_and_activations_become_words(
    bundle: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def program(op: str, dtype: torch.dtype, width: int, sm: int, as_words: bool) -> bytes:
        asked.append(as_words)
        return b"no kernel is compiled here"

    monkeypatch.setattr(attach_programs, "packed_program", program)
    path = bundle.directory / "reuse.onnx"
    before = onnx.load(path, load_external_data=False)
    graph = lower_graph(path, 90, TENSORS)
    after = onnx.load_model_from_string(graph.data)
    assert asked
    assert all(asked)
    layers = bundle.model.layers
    operators = Counter(node.op_type for node in after.graph.node if node.domain == "lacache")
    assert (operators["RMSNormQuant"], operators["SwiGLUQuant"], operators["GroupLinear"]) == (
        layers, layers, 2 * layers
    )  # fmt: skip

    weights = {each.name: each for each in before.graph.initializer if each.data_type == FP8}
    found = {each.name: each for each in after.graph.initializer}
    assert len(weights) == 2 * layers
    for name, weight in weights.items():
        rows, width = weight.dims
        assert (found[name].data_type, list(found[name].dims)) == (INT32, [rows, width // 4])
        assert external(found[name]) == external(weight)
        assert int(external(weight)[1]) == rows * width
    assert all(each.data_type != FP8 for each in after.graph.initializer)

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
            assert graph.types[node.output[0]] == "float32"


def test_a_weight_in_the_graph_keeps_its_bytes() -> None:
    values = torch.linspace(-400, 400, 24).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    tensor = ir.TensorProtoTensor(
        onnx.helper.make_tensor("w", FP8, [3, 8], values.tobytes(), raw=True)
    )
    weight = ir.Value(name="w", const_value=tensor, shape=ir.Shape([3, 8]))
    weight.dtype = ir.DataType.FLOAT8E4M3FN
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
    make.outputs[0].dtype = ir.DataType.FLOAT8E4M3FN
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
