"""One description per op, from which its torch operator and its ONNX node are made.

The torch operator `torch.ops.lacache.NAME` runs the reference on any device that has no kernel of
its own, and is opaque to `torch.export`. The ONNX node lives in domain `lacache`, version 1, and
carries `plugin_namespace` and `plugin_version`, by which TensorRT's parser finds the plugin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DOMAIN = "lacache"
VERSION = 1
NODE_ATTRIBUTES = {"plugin_namespace": DOMAIN, "plugin_version": str(VERSION)}

OutputSpecs = Callable[..., Sequence[tuple[torch.dtype, Sequence[int]]]]


@dataclass(frozen=True)
class OpSpec:
    """An op of the domain.

    Attributes:
        name: ONNX operator type, for example `AttentionFill`.
        inputs: tensor input names in order.
        outputs: tensor output names in order.
        output_specs: from the input tensors, (dtype, shape) of each output.
        reference: from the input tensors, the outputs; the definition of the op. It computes in
            float32, or in float64 if the inputs are float64.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_specs: OutputSpecs
    reference: Callable[..., tuple[Tensor, ...]]

    @property
    def torch_name(self) -> str:
        """Snake-case name of the torch operator."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.name).lower()

    def call(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the registered torch operator."""
        result = getattr(torch.ops.lacache, self.torch_name)(*tensors)
        return result if isinstance(result, tuple) else (result,)

    def symbolic(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Record the ONNX node while a program is being exported."""
        specs = self.output_specs(*tensors)
        return tuple(
            torch.onnx.ops.symbolic_multi_out(
                f"{DOMAIN}::{self.name}",
                tensors,
                dict(NODE_ATTRIBUTES),
                dtypes=[dtype for dtype, _ in specs],
                shapes=[tuple(shape) for _, shape in specs],
                version=VERSION,
            )
        )


_LIBRARY = torch.library.Library(DOMAIN, "DEF")


def register(spec: OpSpec) -> OpSpec:
    """Define `torch.ops.lacache.NAME` with the reference as implementation and shapes as fake."""
    arguments = ", ".join(f"Tensor {name}" for name in spec.inputs)
    outputs = ", ".join("Tensor" for _ in spec.outputs)
    returns = f"({outputs})" if len(spec.outputs) > 1 else outputs
    _LIBRARY.define(f"{spec.torch_name}({arguments}) -> {returns}")

    def run(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = spec.reference(*tensors)
        return outputs if len(outputs) > 1 else outputs[0]

    def fake(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        device = tensors[0].device
        outputs = tuple(
            torch.empty(shape, dtype=dtype, device=device)
            for dtype, shape in spec.output_specs(*tensors)
        )
        return outputs if len(outputs) > 1 else outputs[0]

    _LIBRARY.impl(spec.torch_name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{DOMAIN}::{spec.torch_name}", fake, lib=_LIBRARY)
    return spec
