"""The tensor contract of the graphs: names, symbolic shapes and dtypes of inputs and outputs.

Symbols: B rows, N columns, Bk block columns, S and E listed ids, R requested logit columns.
The exporter names its graphs by this table, the manifest carries it, engines check against it.
"""

from __future__ import annotations

from dataclasses import dataclass

from lacache_trt.model.config import ModelConfig

Dim = int | str


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape (integers and symbols) and dtype of one graph input or output."""

    name: str
    shape: tuple[Dim, ...]
    dtype: str


@dataclass(frozen=True)
class GraphSpec:
    """Inputs and outputs of one graph, in order."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def _geometry() -> dict[str, TensorSpec]:
    specs = (
        TensorSpec("tokens", ("B", "N"), "int32"),
        TensorSpec("positions", ("B", "N"), "int32"),
        TensorSpec("valid_from", ("B",), "int32"),
        TensorSpec("valid_to", ("B",), "int32"),
        TensorSpec("block_columns", ("B", "Bk"), "int32"),
    )
    return {spec.name: spec for spec in specs}


SAMPLING = (
    TensorSpec("temperature", ("B",), "float32"),
    TensorSpec("seed", ("B",), "int32"),
    TensorSpec("step", ("B",), "int32"),
    TensorSpec("guide_row", ("B",), "int32"),
    TensorSpec("cfg_scale", ("B",), "float32"),
    TensorSpec("suppress_ids", ("B", "S"), "int32"),
    TensorSpec("confidence_exclude_ids", ("B", "E"), "int32"),
)
LOGIT_COLUMNS = TensorSpec("logit_columns", ("B", "R"), "int32")


def cache_specs(config: ModelConfig, dtype: str) -> tuple[TensorSpec, ...]:
    """Outputs of fill, inputs of reuse: EmbedCache, RoPECache, FACache."""
    query = ("B", config.num_heads, "N", config.head_dim)
    key = ("B", config.num_kv_heads, "N", config.head_dim)
    return (
        TensorSpec("embed", ("B", "N", config.hidden_size), dtype),
        TensorSpec("q", query, dtype),
        TensorSpec("k", key, dtype),
        TensorSpec("v", key, dtype),
        TensorSpec("fa_max", query[:3], "float32"),
        TensorSpec("fa_sum", query[:3], "float32"),
        TensorSpec("fa_acc", query, "float32"),
    )


def step_outputs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Outputs of reuse and plain."""
    return (
        TensorSpec("token", ("B", "Bk"), "int32"),
        TensorSpec("confidence", ("B", "Bk"), "float32"),
        TensorSpec("margin", ("B", "Bk"), "float32"),
        TensorSpec("neg_entropy", ("B", "Bk"), "float32"),
        TensorSpec("logits", ("B", "R", config.vocab_size), "float32"),
    )


def graph_specs(config: ModelConfig, dtype: str) -> dict[str, GraphSpec]:
    """The graphs `fill`, `reuse` and `plain` of a model whose activations are in `dtype`."""
    geometry = _geometry()
    caches = cache_specs(config, dtype)
    block_tokens = TensorSpec("block_tokens", ("B", "Bk"), "int32")
    ranges = (geometry["positions"], geometry["valid_from"], geometry["valid_to"])
    step_inputs = (*SAMPLING, LOGIT_COLUMNS)
    reuse_inputs = (block_tokens, geometry["block_columns"], *ranges, *caches, *step_inputs)
    graphs = (
        GraphSpec("fill", tuple(geometry.values()), caches),
        GraphSpec("reuse", reuse_inputs, step_outputs(config)),
        GraphSpec("plain", (*geometry.values(), *step_inputs), step_outputs(config)),
    )
    return {graph.name: graph for graph in graphs}
