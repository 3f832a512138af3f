"""Captures the programs as ONNX graphs whose weights are references into the weights file.

The module is created under `FakeTensorMode`, so no weight is ever allocated: the process stays at
a few hundred MB whatever the model's size.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from lacache_trt.contract import GraphSpec, graph_specs
from lacache_trt.export.passes.attach_functions import AttachFunctions
from lacache_trt.export.passes.drop_metadata import DropMetadata
from lacache_trt.export.passes.external_weights import ExternalWeights, WeightLocation
from lacache_trt.export.passes.fold_shapes import FoldShapes
from lacache_trt.export.weights import read_header
from lacache_trt.model.config import Dtype, Granularity, ModelConfig
from lacache_trt.model.ops import ExportOps
from lacache_trt.model.programs import (
    FillProgram,
    PlainProgram,
    ReuseKVProgram,
    ReuseProgram,
    WindowProgram,
)
from lacache_trt.model.transformer import Transformer

_ONNX_DTYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
    "F8_E4M3": ir.DataType.FLOAT8E4M3FN,
}
PROGRAMS = {
    "fill": FillProgram,
    "reuse": ReuseProgram,
    "plain": PlainProgram,
    "reuse-kv": ReuseKVProgram,
    "window": WindowProgram,
}
# Sizes of the example inputs. All differ and none is 0 or 1, so that no symbol is specialised.
_EXAMPLE_SIZES = {"B": 2, "N": 24, "Bk": 8, "W": 10, "S": 3, "E": 4, "R": 5}


def capture_graph(
    config: ModelConfig,
    name: str,
    dtype: Dtype,
    opset: int,
    weights: Mapping[str, WeightLocation],
    fp8: Collection[str] = (),
    granularity: Granularity = "per-group",
) -> ir.Model:
    """The graph `name` with inputs and outputs as in the contract.

    `weights` locates every parameter in the weights file that lies beside the graph; `fp8` names
    the linears that are FP8 there, and `granularity` who shares their scales.
    """
    spec = graph_specs(config, dtype)[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        kind = getattr(torch, dtype)
        transformer = Transformer(config, ExportOps(), kind, fp8, granularity)
    program = PROGRAMS[name](transformer).eval()
    with _quiet_exporter():
        captured = torch.onnx.export(
            program,
            _example_inputs(spec),
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=opset,
            dynamic_shapes=_dynamic_shapes(spec),
            input_names=[tensor.name for tensor in spec.inputs],
            output_names=[tensor.name for tensor in spec.outputs],
        )
    if captured is None:
        raise RuntimeError("torch.onnx.export returned no program")
    passes = ir.passes.Sequential(
        FoldShapes(), ExternalWeights(weights), AttachFunctions(), DropMetadata(name)
    )
    return passes(captured.model).model


def _example_inputs(spec: GraphSpec) -> tuple[torch.Tensor, ...]:
    def example(shape: tuple[int | str, ...], dtype: str) -> torch.Tensor:
        sizes = [_EXAMPLE_SIZES[dim] if isinstance(dim, str) else dim for dim in shape]
        return torch.zeros(sizes, dtype=getattr(torch, dtype))

    return tuple(example(tensor.shape, tensor.dtype) for tensor in spec.inputs)


def _dynamic_shapes(spec: GraphSpec) -> tuple[dict[int, Dim], ...]:
    return tuple(
        {axis: Dim(dim) for axis, dim in enumerate(tensor.shape) if isinstance(dim, str)}
        for tensor in spec.inputs
    )


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """The exporter warns about packages and symbol names that have no bearing on the result."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def weight_locations(path: Path) -> dict[str, WeightLocation]:
    """Where every tensor of a weights file lies, for graphs beside it."""
    return {
        name: WeightLocation(
            file=path.name,
            offset=tensor.offset,
            nbytes=tensor.nbytes,
            dtype=_ONNX_DTYPES[tensor.dtype],
            shape=tuple(tensor.shape),
        )
        for name, tensor in read_header(path).items()
    }
