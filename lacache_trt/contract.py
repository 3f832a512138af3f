"""The tensor contract of the graphs: names, symbolic shapes and dtypes of inputs and outputs.

Symbols: B rows, N columns, Bk block columns, W window columns, S and E listed ids, R requested
logit columns.
The exporter names its graphs by this table, the manifest carries it, engines check against it.
`fill`, `reuse` and `plain` are always there; `reuse-kv` and `window` where approximate caches were
asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
WINDOW = (
    TensorSpec("window_tokens", ("B", "W"), "int32"),
    TensorSpec("window_columns", ("B", "W"), "int32"),
)
BASE_GRAPHS = ("fill", "reuse", "plain")
KEY_VALUE_GRAPHS = ("reuse-kv", "window")
_CACHES = {"plain": ("none",), "reuse": ("exact",), "window": ("prefix", "dual")}


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


def key_value_specs(
    config: ModelConfig, dtype: str, columns: str = "N", prefix: str = ""
) -> tuple[TensorSpec, ...]:
    """K (after RoPE) and V of all layers."""
    shape = (config.num_layers, "B", config.num_kv_heads, columns, config.head_dim)
    return tuple(TensorSpec(prefix + name, shape, dtype) for name in ("keys", "values"))


def step_outputs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Outputs of reuse and plain, and the first outputs of reuse-kv and window."""
    return (
        TensorSpec("token", ("B", "Bk"), "int32"),
        TensorSpec("confidence", ("B", "Bk"), "float32"),
        TensorSpec("margin", ("B", "Bk"), "float32"),
        TensorSpec("neg_entropy", ("B", "Bk"), "float32"),
        TensorSpec("logits", ("B", "R", config.vocab_size), "float32"),
    )


def graph_specs(config: ModelConfig, dtype: str) -> dict[str, GraphSpec]:
    """Every graph of a model whose activations are in `dtype`, by name."""
    geometry = _geometry()
    caches = cache_specs(config, dtype)
    kept = key_value_specs(config, dtype)
    block_tokens = TensorSpec("block_tokens", ("B", "Bk"), "int32")
    ranges = (geometry["positions"], geometry["valid_from"], geometry["valid_to"])
    step_inputs = (*SAMPLING, LOGIT_COLUMNS)
    reuse_inputs = (block_tokens, geometry["block_columns"], *ranges, *caches, *step_inputs)
    graphs = (
        GraphSpec("fill", tuple(geometry.values()), caches),
        GraphSpec("reuse", reuse_inputs, step_outputs(config)),
        GraphSpec("plain", (*geometry.values(), *step_inputs), step_outputs(config)),
        GraphSpec("reuse-kv", reuse_inputs, (*step_outputs(config), *kept)),
        GraphSpec(
            "window",
            (*WINDOW, *ranges, geometry["block_columns"], *kept, *step_inputs),
            (*step_outputs(config), *key_value_specs(config, dtype, "W", "window_")),
        ),
    )
    return {graph.name: graph for graph in graphs}


def caches_of(graphs: Collection[str]) -> frozenset[str]:
    """Values of `GenerationConfig.cache` that these graphs serve."""
    return frozenset(cache for graph in graphs for cache in _CACHES.get(graph, ()))


def known_contract(
    contract: Mapping[str, GraphSpec], config: ModelConfig, dtype: str
) -> dict[str, GraphSpec]:
    """The contract that follows from the model's sizes, for the kinds of graphs that are there."""
    wanted = BASE_GRAPHS + (KEY_VALUE_GRAPHS if set(KEY_VALUE_GRAPHS) & set(contract) else ())
    specs = graph_specs(config, dtype)
    return {name: specs[name] for name in wanted}
