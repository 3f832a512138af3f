"""What builder and runtime agree on: files of an engine directory, TensorRT's names of dtypes."""

from __future__ import annotations

from collections.abc import Collection

from lacache_trt.contract import KEY_VALUE_GRAPHS, GraphSpec, TensorSpec

GRAPHS = ("fill", "reuse")
WEIGHTS_FILE = "weights.safetensors"
# Names in trt.DataType by the contract's dtypes.
TYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "float8_e4m3fn": "FP8",
    "int32": "INT32",
    "int64": "INT64",
    "bool": "BOOL",
}


def graphs_of(contract: Collection[str]) -> tuple[str, ...]:
    """Graphs of an engine directory that the runtime opens: those of approximate caches, if any."""
    return GRAPHS + (KEY_VALUE_GRAPHS if set(KEY_VALUE_GRAPHS) <= set(contract) else ())


def plan_file(graph: str) -> str:
    """The plan of a graph."""
    return f"{graph}.plan"


def layers_file(graph: str) -> str:
    """What TensorRT's inspector says of a plan; written where a GPU could open it."""
    return f"{graph}.layers.json"


def with_weights(graph: GraphSpec, weights: tuple[TensorSpec, ...]) -> GraphSpec:
    """The contract of a graph whose shared weights are inputs, behind the others."""
    return GraphSpec(graph.name, (*graph.inputs, *weights), graph.outputs)
