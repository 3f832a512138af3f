"""Every FP8 op in one small graph, built for SM89 by the real TensorRT-RTX in both dtypes.

The quantised linears of an attention's projections and of an FFN, as scope `linears` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from lacache_trt.contract import GraphSpec, TensorSpec
from lacache_trt.engines.tensorrt import bindings
from lacache_trt.engines.tensorrt.plan import Target, build_plan
from lacache_trt.engines.tensorrt.profiles import Profile, Range
from lacache_trt.model.ops import TorchOps
from lacache_trt.plugins import fp8
from lacache_trt.plugins.functions import OPSET_VERSION, all_functions
from lacache_trt.plugins.library import build_library
from lacache_trt.plugins.programs import packed_program
from lacache_trt.plugins.spec import DOMAIN, NODE_ATTRIBUTES, VERSION
from lacache_trt.progress import SilentProgress

pytestmark = pytest.mark.skipif(
    find_spec("tensorrt_rtx_bindings") is None, reason="TensorRT-RTX is not installed"
)
WIDTH, FFN = 256, 384
KINDS = {torch.float16: ir.DataType.FLOAT16, torch.bfloat16: ir.DataType.BFLOAT16}
OPS = ("GroupQuant", "RMSNormQuant", "SwiGLUQuant", "GroupLinear")
PROFILE = Profile({"B": Range(1, 1, 3), "N": Range(1, 384, 2048)})


class Block:
    """The nodes and initializers of the graph."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.kind = dtype, KINDS[dtype]
        self.nodes: list[ir.Node] = []
        self.constants: list[ir.Value] = []
        self.linears: list[tuple[Tensor, Tensor]] = []
        self._random = torch.Generator().manual_seed(5)
        self._like = self.constant("like", torch.zeros(1, dtype=dtype))

    def constant(self, name: str, tensor: Tensor) -> ir.Value:
        """An initializer."""
        if tensor.dtype == fp8.E4M3:
            array = tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        elif tensor.dtype == torch.bfloat16:
            array = tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        else:
            array = tensor.numpy()
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.shape, value.type = ir.Shape(array.shape), ir.TensorType(value.const_value.dtype)
        self.constants.append(value)
        return value

    def op(self, name: str, inputs: Sequence[ir.Value], width: int) -> list[ir.Value]:
        """A node of the domain whose outputs have `width` values per row."""
        outputs = [(self.kind, width)]
        if name != "GroupLinear":
            outputs = [(ir.DataType.FLOAT8E4M3FN, width), (ir.DataType.FLOAT, width // 128)]
        values = [self.rows(f"v{len(self.nodes)}.{i}", *each) for i, each in enumerate(outputs)]
        self.nodes.append(ir.node(name, inputs, NODE_ATTRIBUTES, domain=DOMAIN, outputs=values))
        return values

    def linear(self, quantised: Sequence[ir.Value], columns: int, width: int) -> ir.Value:
        """GroupLinear of a random weight."""
        made = torch.randn(columns, width, generator=self._random)
        weight, scale = fp8.quantise_blocks(made)
        self.linears.append((weight, scale))
        name = f"w{len(self.nodes)}"
        constants = [self.constant(name, weight), self.constant(f"{name}.scale", scale)]
        return self.op("GroupLinear", [*quantised, *constants, self._like], columns)[0]

    def add(self, left: ir.Value, right: ir.Value, name: str) -> ir.Value:
        """The residual."""
        self.nodes.append(
            ir.node("Add", [left, right], outputs=[self.rows(name, self.kind, WIDTH)])
        )
        return self.nodes[-1].outputs[0]

    def rows(self, name: str, kind: ir.DataType, width: int) -> ir.Value:
        """A tensor [B, N, width]."""
        return ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(["B", "N", width]))


def write_graph(path: Path, dtype: torch.dtype) -> Block:
    """hidden + a projection of it, then the FFN with its residual."""
    block = Block(dtype)
    hidden = block.rows("hidden", block.kind, WIDTH)
    projected = block.linear(block.op("GroupQuant", [hidden], WIDTH), WIDTH, WIDTH)
    middle = block.add(hidden, projected, "middle")
    weight = block.constant("norm", torch.ones(WIDTH, dtype=dtype))
    eps = block.constant("eps", torch.tensor([1e-5]))
    normed = block.op("RMSNormQuant", [middle, weight, eps], WIDTH)
    activated = block.op("SwiGLUQuant", [block.linear(normed, 2 * FFN, WIDTH)], FFN)
    out = block.add(middle, block.linear(activated, WIDTH, FFN), "out")
    versions = {"": OPSET_VERSION, DOMAIN: VERSION}
    graph = ir.Graph(
        [hidden], [out], nodes=block.nodes, initializers=block.constants, opset_imports=versions,
        name="block",
    )  # fmt: skip
    functions = all_functions()
    ir.save(ir.Model(graph, ir_version=10, functions=[functions[name] for name in OPS]), path)
    return block


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_a_graph_of_every_fp8_op_builds(tmp_path: Path, dtype: torch.dtype) -> None:
    path, name = tmp_path / "block.onnx", str(dtype).removeprefix("torch.")
    block = write_graph(path, dtype)
    ends = [(TensorSpec(end, ("B", "N", WIDTH), name),) for end in ("hidden", "out")]
    trt = bindings.import_tensorrt("tensorrt-rtx")
    target = Target(trt, "tensorrt-rtx", 89, build_library())
    plan = bytes(build_plan(target, path, GraphSpec("block", *ends), [PROFILE], SilentProgress()))
    widths = {"SwiGLUQuant": 2 * FFN}
    for op in OPS:
        program = packed_program(op, dtype, widths.get(op, WIDTH), 89)
        assert b"\x7fELF" in program
        assert program in plan
    # The weights stay E4M3: a byte per value, as they were given.
    assert len(block.linears) == 3
    for weight, _ in block.linears:
        assert weight.view(torch.uint8).numpy().tobytes() in plan


def test_the_graph_computes_what_torch_computes(tmp_path: Path) -> None:
    """The graph that is built is a sound one.

    A relative difference d before a quantiser moves d / step of the values by a step, which is
    sqrt(d step) of their size: from float16's 2^-11 to 1% after one quantiser and 3% after two.
    """
    import onnxruntime as ort

    path = tmp_path / "block.onnx"
    block = write_graph(path, torch.float16)
    hidden = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)).half()
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {"hidden": hidden.numpy()})

    first, second, third = block.linears
    ops = TorchOps()
    like = hidden[0, 0, :1]
    middle = hidden + ops.group_linear(*ops.group_quant(hidden), *first, like)
    normed = ops.norm_quant(middle, torch.ones(WIDTH).half(), 1e-5)
    activated = ops.swiglu_quant(ops.group_linear(*normed, *second, like))
    expected = (middle + ops.group_linear(*activated, *third, like)).float().numpy()
    error = out.astype(np.float32) - expected
    assert np.square(error).mean() <= 0.03**2 * np.square(expected).mean()
