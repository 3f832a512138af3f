"""Maps a graph's types to those of TensorRT 8.5: float32, float16, int32 and bool.

1. int64 is left to constants, which the parser narrows to int32; a bound of a Slice beyond int32
   becomes int32's.
2. FP8 tensors between plugins are carried as int32, four values to a word. (int8 is no carrier: 8.5
   takes it for a quantised type, wants a scale of every such tensor and has no int8 constants.)
3. Any other computed type, and an int64 constant that does not fit, is refused.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from lacache_trt.errors import VerificationError
from lacache_trt.plugins.packing import WORD_BYTES
from lacache_trt.plugins.spec import DOMAIN

_LIMITS = np.iinfo(np.int32)
_CARRIED = ir.DataType.FLOAT8E4M3FN
NAMES = {
    ir.DataType.FLOAT: "float32",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.INT32: "int32",
    ir.DataType.BOOL: "bool",
}


class LegacyTypes(ir.passes.InPlacePass):
    """See the rules above. The sizes must be fixed before."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype == _CARRIED:
                _check_users(value)
                _carry(value, value.const_value)
            elif value.dtype == ir.DataType.INT64:
                _narrow(value)
        for node in graph:
            for value in node.outputs:
                if value.dtype == _CARRIED:
                    _check_users(value)
                    value.shape = _in_words(value)
                    value.dtype = ir.DataType.INT32
                if value.dtype not in NAMES:
                    raise _unknown(node, value)
        return ir.passes.PassResult(model, True)


def value_types(model: ir.Model) -> dict[str, str]:
    """The type of every computed value and input by name, as TensorRT 8.5 has to know them."""
    computed = (value for node in model.graph for value in node.outputs)
    return {
        str(value.name): NAMES[value.dtype]
        for value in (*model.graph.inputs, *computed)
        if value.dtype in NAMES
    }


def _narrow(value: ir.Value) -> None:
    if value.const_value is None:
        return
    array = value.const_value.numpy()
    clipped = array.clip(_LIMITS.min, _LIMITS.max)
    users = {user.op_type for user, _ in value.uses()}
    if not np.array_equal(array, clipped) and users != {"Slice"}:
        raise VerificationError(
            f"the constant {value.name!r} does not fit int32, TensorRT 8.5's only wide integer",
            got=array.tolist(),
            expected=f"{_LIMITS.min} to {_LIMITS.max}",
        )
    value.const_value = ir.tensor(clipped, name=value.name)


def _carry(value: ir.Value, tensor: ir.TensorProtocol) -> None:
    value.shape = _in_words(value)
    if isinstance(tensor, ir.ExternalTensor):
        value.const_value = ir.ExternalTensor(
            tensor.location,
            tensor.offset,
            tensor.length,
            ir.DataType.INT32,
            shape=value.shape,
            name=tensor.name,
            base_dir=tensor.base_dir,
        )
    else:
        words = np.frombuffer(tensor.tobytes(), np.int32).reshape(value.shape.numpy())
        value.const_value = ir.tensor(words, name=value.name)
    value.dtype = ir.DataType.INT32


def _in_words(value: ir.Value) -> ir.Shape:
    """The shape in words."""
    dims = [] if value.shape is None else list(value.shape)
    if not dims or not isinstance(dims[-1], int) or dims[-1] % WORD_BYTES:
        raise VerificationError(
            f"the FP8 tensor {value.name!r} does not fill whole int32 words",
            got=dims,
            expected=f"a last dimension that is a multiple of {WORD_BYTES}",
        )
    return ir.Shape([*dims[:-1], dims[-1] // WORD_BYTES])


def _check_users(value: ir.Value) -> None:
    """Only plugins know what the words hold."""
    producer = value.producer()
    for node in [
        *([producer] if producer is not None else []),
        *(user for user, _ in value.uses()),
    ]:
        if node.domain != DOMAIN:
            raise _unknown(node, value)


def _unknown(node: ir.Node, value: ir.Value) -> VerificationError:
    return VerificationError(
        f"TensorRT 8.5 has no type for {value.name!r} of {node.op_type} {node.name!r}",
        got=str(value.dtype),
        expected=", ".join(NAMES.values()),
        fix="export the bundle again with --dtype float16 or --dtype float32",
    )
