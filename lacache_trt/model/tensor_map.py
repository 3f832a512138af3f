"""Which tensors of a checkpoint make which tensor of the weights file, and how.

Linear weights of a checkpoint are [out, in]; the weights file holds them [in, out] with `qkv`
(queries, keys, values; `q` and `kv` in the last layer) and `gate_up` fused along the output. In
the checkpoint's orientation that fusion is a concatenation of rows, so every tensor of the weights
file is: sources stacked along their first dimension, then transposed if it is a linear weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from lacache_trt.model.config import ModelConfig, parameter_shapes, projection_sizes

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SourceTensor:
    """A tensor that the checkpoint must hold."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class TensorRecipe:
    """How one tensor of the weights file is made.

    Attributes:
        sources: stacked along their first dimension, in this order.
        transpose: the stacked [out, in] is stored as [in, out].
        shape: shape in the weights file.
    """

    sources: tuple[SourceTensor, ...]
    transpose: bool
    shape: Shape


@dataclass(frozen=True)
class TensorNames:
    """A family's names. Those of a layer follow `layer`, which contains `{index}`."""

    embedding: str
    layer: str
    attn_norm: str
    qkv: tuple[str, str, str]
    attn_out: str
    ffn_norm: str
    gate: str
    up: str
    down: str
    norm: str
    head: str


# LLaDA has two different `ff_out`: the down projection in each block, the head outside of them;
# `ff_proj` is the gate (its output goes through SiLU).
LLADA_NAMES = TensorNames(
    embedding="model.transformer.wte",
    layer="model.transformer.blocks.{index}.",
    attn_norm="attn_norm",
    qkv=("q_proj", "k_proj", "v_proj"),
    attn_out="attn_out",
    ffn_norm="ff_norm",
    gate="ff_proj",
    up="up_proj",
    down="ff_out",
    norm="model.transformer.ln_f",
    head="model.transformer.ff_out",
)
DREAM_NAMES = TensorNames(
    embedding="model.embed_tokens",
    layer="model.layers.{index}.",
    attn_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    attn_out="self_attn.o_proj",
    ffn_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    norm="model.norm",
    head="lm_head",
)
FAMILY_NAMES = {"llada": LLADA_NAMES, "dream": DREAM_NAMES}


def tensor_recipes(config: ModelConfig) -> dict[str, TensorRecipe]:
    """The recipe of every tensor of `parameter_shapes(config)`, in the same order."""
    names = FAMILY_NAMES[config.family]
    sources = {
        "embed.weight": _weights(config.hidden_size, (names.embedding, config.vocab_size)),
        "norm.weight": (SourceTensor(names.norm + ".weight", (config.hidden_size,)),),
        "head.weight": _weights(
            config.hidden_size,
            (names.embedding if config.tied_head else names.head, config.vocab_size),
        ),
    }
    for index in range(config.num_layers):
        sources.update(_layer_sources(config, names, index))
    return {
        name: TensorRecipe(sources[name], len(shape) == 2 and name != "embed.weight", shape)
        for name, shape in parameter_shapes(config).items()
    }


def _layer_sources(
    config: ModelConfig, names: TensorNames, index: int
) -> dict[str, tuple[SourceTensor, ...]]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    source, target = names.layer.format(index=index), f"layers.{index}."
    widths = (config.query_size, config.kv_size, config.kv_size)
    modules = {
        letter: (source + name, rows)
        for letter, name, rows in zip("qkv", names.qkv, widths, strict=True)
    }
    projections: dict[str, tuple[SourceTensor, ...]] = {}
    for fused in projection_sizes(config, index):
        parts = [modules[letter] for letter in fused]
        projections[f"{target}{fused}.weight"] = _weights(hidden, *parts)
        projections[f"{target}{fused}.bias"] = tuple(
            SourceTensor(name + ".bias", (rows,)) for name, rows in parts
        )
    return {
        target + "attn_norm.weight": (
            SourceTensor(f"{source}{names.attn_norm}.weight", (hidden,)),
        ),
        **projections,
        target + "attn_out.weight": _weights(config.query_size, (source + names.attn_out, hidden)),
        target + "ffn_norm.weight": (SourceTensor(f"{source}{names.ffn_norm}.weight", (hidden,)),),
        target + "gate_up.weight": _weights(
            hidden, (source + names.gate, ffn), (source + names.up, ffn)
        ),
        target + "down.weight": _weights(ffn, (source + names.down, hidden)),
    }


def _weights(columns: int, *modules: tuple[str, int]) -> tuple[SourceTensor, ...]:
    return tuple(SourceTensor(name + ".weight", (rows, columns)) for name, rows in modules)
