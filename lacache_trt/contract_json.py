"""The manifest's `contract` section: `lacache_trt.contract` as JSON, read back strictly.

    {"fill": {"inputs": [{"name": "tokens", "shape": ["B", "N"], "dtype": "int32"}, ...],
              "outputs": [...]}, ...}

A dimension is a positive integer or the name of a symbolic one.
"""

from __future__ import annotations

from collections.abc import Mapping

from lacache_trt.contract import GraphSpec, TensorSpec
from lacache_trt.errors import ArtifactError

TENSOR_DTYPES = frozenset(
    {"bool", "int32", "int64", "float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", "int8"}
)


def contract_to_json(contract: Mapping[str, GraphSpec]) -> dict[str, object]:
    """The manifest's `contract` section."""
    return {
        name: {
            "inputs": [_tensor_to_json(spec) for spec in graph.inputs],
            "outputs": [_tensor_to_json(spec) for spec in graph.outputs],
        }
        for name, graph in contract.items()
    }


def contract_from_json(data: object) -> dict[str, GraphSpec]:
    """Read the manifest's `contract` section; `ArtifactError` says which part is malformed."""
    if not isinstance(data, dict):
        raise ArtifactError("the contract is not an object", got=type(data).__name__)
    return {str(name): _graph_from_json(str(name), graph) for name, graph in data.items()}


def _tensor_to_json(spec: TensorSpec) -> dict[str, object]:
    return {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype}


def _graph_from_json(name: str, data: object) -> GraphSpec:
    fields = _fields(data, {"inputs", "outputs"}, f"graph {name!r}")
    sides = []
    for side in ("inputs", "outputs"):
        tensors = fields[side]
        if not isinstance(tensors, list):
            raise ArtifactError(f"the {side} of graph {name!r} are not a list", got=tensors)
        sides.append(tuple(_tensor_from_json(name, tensor) for tensor in tensors))
    return GraphSpec(name, sides[0], sides[1])


def _tensor_from_json(graph: str, data: object) -> TensorSpec:
    fields = _fields(data, {"name", "shape", "dtype"}, f"tensor of graph {graph!r}")
    name, shape, dtype = fields["name"], fields["shape"], fields["dtype"]
    if not isinstance(name, str) or not name:
        raise ArtifactError(f"a tensor of graph {graph!r} has no name", got=repr(name))
    if not isinstance(shape, list) or not all(_is_dimension(size) for size in shape):
        raise ArtifactError(
            f"tensor {name!r} of graph {graph!r} has an invalid shape",
            got=repr(shape),
            expected="a list of names and positive integers",
        )
    if not isinstance(dtype, str) or dtype not in TENSOR_DTYPES:
        raise ArtifactError(
            f"tensor {name!r} of graph {graph!r} has an unknown dtype",
            got=repr(dtype),
            expected=", ".join(sorted(TENSOR_DTYPES)),
        )
    return TensorSpec(name, tuple(shape), dtype)


def _fields(data: object, names: set[str], what: str) -> dict[str, object]:
    if not isinstance(data, dict) or set(data) != names:
        got = sorted(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise ArtifactError(f"{what} has the wrong fields", got=got, expected=sorted(names))
    return data


def _is_dimension(size: object) -> bool:
    if isinstance(size, str):
        return bool(size)
    return type(size) is int and size > 0
