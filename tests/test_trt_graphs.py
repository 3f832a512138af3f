"""What a graph and a profile are before TensorRT sees them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from lacache_trt.contract import GraphSpec, TensorSpec
from lacache_trt.engines.tensorrt.cut_integer_chains import CutIntegerChains
from lacache_trt.engines.tensorrt.profiles import Range, parse_profiles
from lacache_trt.engines.tensorrt.share_weights import share_weights
from lacache_trt.errors import CapacityError, InvalidRequestError
from lacache_trt.plugins.functions import all_functions


def test_cut_chains_compute_the_same_bits() -> None:
    function = all_functions()["SampleBlock"]
    plain, cut = _sampler(function), _sampler(function)
    CutIntegerChains()(cut)
    assert sum(1 for node in cut.graph if node.op_type == "Gather") > sum(
        1 for node in plain.graph if node.op_type == "Gather"
    )
    generator = np.random.default_rng(5)
    feeds = {
        "logits": generator.normal(0, 3, (3, 5, 97)).astype(np.float32),
        "positions": generator.integers(0, 4000, (3, 5), np.int32),
        "temperature": np.array([0.0, 0.7, 1.3], np.float32),
        "seed": generator.integers(-(2**31), 2**31 - 1, 3).astype(np.int32),
        "step": np.array([0, 1, 77], np.int32),
        "guide_row": np.array([0, 2, 2], np.int32),
        "cfg_scale": np.array([0.0, 1.5, 0.0], np.float32),
        "suppress_ids": np.array([[96], [3], [-1]], np.int32),
        "confidence_exclude_ids": np.array([[-1], [5], [96]], np.int32),
    }
    sessions = [ort.InferenceSession(ir.to_proto(m).SerializeToString()) for m in (plain, cut)]
    expected, got = (session.run(None, feeds) for session in sessions)
    for left, right in zip(expected, got, strict=True):
        np.testing.assert_array_equal(left, right)


def _sampler(function: ir.Function) -> ir.Model:
    """A model of one SampleBlock whose function is inlined."""
    from onnx_ir.passes.common import InlinePass

    types = {"logits": 1, "temperature": 1, "cfg_scale": 1}
    shapes = {
        "logits": ["B", "R", 97],
        "positions": ["B", "R"],
        "suppress_ids": ["B", "S"],
        "confidence_exclude_ids": ["B", "E"],
    }
    inputs = [
        onnx.helper.make_tensor_value_info(
            value.name, types.get(value.name, 6), shapes.get(value.name, ["B"])
        )
        for value in function.inputs
    ]
    names = ["token", "confidence", "margin", "neg_entropy"]
    outputs = [
        onnx.helper.make_tensor_value_info(name, 6 if name == "token" else 1, ["B", "R"])
        for name in names
    ]
    node = onnx.helper.make_node(
        "SampleBlock", [value.name for value in function.inputs], names, domain="lacache"
    )
    proto = onnx.helper.make_model(
        onnx.helper.make_graph([node], "sampler", inputs, outputs),
        opset_imports=[onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("lacache", 1)],
        functions=[ir.to_proto(function)],
        ir_version=10,
    )
    return InlinePass()(ir.from_proto(proto)).model


# --- shared weights ---


def _linears(kinds: list[int]) -> onnx.ModelProto:
    """A model of one function call per weight of 2 GiB; the weights file does not exist."""
    sizes = {"big": (32768, 16384), "small": (8, 8)}
    initializers, nodes, value, offset = [], [], "x", 0
    for name, kind in [(f"{size}{kind}", kind) for kind in kinds for size in sizes]:
        dims = sizes["big" if "big" in name else "small"]
        tensor = onnx.TensorProto(name=name, data_type=kind, dims=dims)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        length = dims[0] * dims[1] * onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize
        facts = {"location": "weights.safetensors", "offset": offset, "length": length}
        for key, fact in facts.items():
            tensor.external_data.add(key=key, value=str(fact))
        offset += length
        initializers.append(tensor)
        nodes.append(onnx.helper.make_node("Use", [value, name], [f"after_{name}"], domain="own"))
        value = f"after_{name}"
    ends = [onnx.helper.make_tensor_value_info(name, 10, ["B", 4]) for name in ("x", value)]
    opsets = [onnx.helper.make_opsetid("", 23), onnx.helper.make_opsetid("own", 1)]
    body = [onnx.helper.make_node("Identity", ["a"], ["c"])]
    function = onnx.helper.make_function("own", "Use", ["a", "b"], ["c"], body, opsets[:1], ["how"])
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], initializers)
    return onnx.helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=10)


def test_large_weights_become_inputs_without_being_read(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT8E4M3FN]
    before = _linears(kinds)
    after = share_weights(ir.from_proto(before))
    inputs = {each.name: each.type.tensor_type for each in after.graph.input}
    assert list(inputs) == ["x", *(f"big{kind}" for kind in kinds)]
    for kind in kinds:
        found = inputs[f"big{kind}"]
        assert found.elem_type == kind
        assert [dim.dim_value for dim in found.shape.dim] == [32768, 16384]
    kept = {each.name: each for each in after.graph.initializer}
    assert kept.keys() == {f"small{kind}" for kind in kinds}
    for tensor in before.graph.initializer:
        if tensor.name in kept:
            assert kept[tensor.name].external_data == tensor.external_data
            assert kept[tensor.name].data_type == tensor.data_type
    assert [list(node.input) for node in after.graph.node] == [
        list(node.input) for node in before.graph.node
    ]
    assert after.functions == before.functions
    assert after.opset_import == before.opset_import
    assert capsys.readouterr().out == ""


# --- profiles ---


def test_profiles_read_sizes_and_ranges() -> None:
    (profile,) = parse_profiles(("B=2, N=64:384:1152,Bk=32",), 4096)
    assert profile.ranges["B"] == Range(2, 2, 2)
    assert profile.ranges["N"] == Range(64, 384, 1152)
    tokens = TensorSpec("tokens", ("B", "N"), "int32")
    block_columns = TensorSpec("block_columns", ("B", "Bk"), "int32")
    shapes = profile.shapes(GraphSpec("fill", (tokens, block_columns), ()))
    assert shapes["tokens"] == ((2, 64), (2, 384), (2, 1152))
    assert shapes["block_columns"] == ((2, 32),) * 3
    (default,) = parse_profiles((), 512)
    assert default.ranges["N"].high == 512


@pytest.mark.parametrize("text", ["", "B", "B=x", "X=1", "B=1:2", "B=3:2:1", "B=1;N=2", "B=-1"])
def test_malformed_profiles_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_profiles((text,), 4096)


@pytest.mark.parametrize("symbol", ["B", "N", "Bk", "W", "S", "E"])
def test_a_profile_without_rows_or_columns_is_refused(symbol: str) -> None:
    with pytest.raises(InvalidRequestError, match="at least 1"):
        parse_profiles((f"{symbol}=0:1:4",), 4096)
    assert parse_profiles(("R=0",), 4096)[0].ranges["R"].low == 0


def test_a_profile_beyond_the_model_is_refused() -> None:
    with pytest.raises(CapacityError, match="longer"):
        parse_profiles(("N=1:64:8192",), 4096)
