"""Points every weight at its bytes in the weights file.

1. A parameter of the captured program is renamed to its name in the weights file.
2. Its value becomes external data at the tensor's absolute offset in that file.
3. Dtype and shape must agree with the file.
4. Other initializers (small constants) stay in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from lacache_trt.errors import VerificationError

PARAMETER_PREFIX = "model.weights."


@dataclass(frozen=True)
class WeightLocation:
    """Where a tensor lies: file name, absolute byte offset and length, ONNX dtype and shape."""

    file: str
    offset: int
    nbytes: int
    dtype: ir.DataType
    shape: tuple[int, ...]

    def tensor(self, name: str) -> ir.ExternalTensor:
        """The ONNX tensor of that name whose data lies there."""
        return ir.ExternalTensor(
            self.file,
            self.offset,
            self.nbytes,
            self.dtype,
            shape=ir.Shape(self.shape),
            name=name,
            base_dir="",
        )


def parameter_name(initializer: str) -> str | None:
    """Name in the weights file of an initializer, or None for a constant of the graph."""
    if not initializer.startswith(PARAMETER_PREFIX):
        return None
    return initializer.removeprefix(PARAMETER_PREFIX).replace("/", ".")


class ExternalWeights(ir.passes.InPlacePass):
    """See the rules above."""

    def __init__(self, locations: Mapping[str, WeightLocation]) -> None:
        super().__init__()
        self.locations = locations

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        changed = False
        for initializer, value in list(graph.initializers.items()):
            name = parameter_name(initializer)
            if name is None:
                continue
            graph.initializers.pop(initializer)
            value.name = name
            value.const_value = self._external_tensor(name, value)
            graph.register_initializer(value)
            changed = True
        return ir.passes.PassResult(model, changed)

    def _external_tensor(self, name: str, value: ir.Value) -> ir.ExternalTensor:
        location = self.locations[name]
        shape = tuple(value.shape.numpy()) if value.shape is not None else ()
        if shape != location.shape or value.dtype != location.dtype:
            raise VerificationError(
                f"weight {name!r} of the graph is not what the weights file holds",
                got=f"{location.dtype} {location.shape}",
                expected=f"{value.dtype} {shape}",
                fix="this is a defect of the exporter; please report it",
            )
        return location.tensor(name)
