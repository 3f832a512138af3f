"""From a checkpoint's config.json to a `ModelConfig`, for the LLaDA and Dream families.

Absent keys mean what the family's own configuration class makes of them. Everything in the file
that would change the arithmetic and is not implemented is refused by key and value: a model that
runs is the model that was published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lacache_trt.errors import CheckpointError, UnsupportedModelError
from lacache_trt.model.config import Dtype, ModelConfig
from lacache_trt.model.config_values import ConfigValues, Requirement
from lacache_trt.model.unsupported import refuse_lookalikes, unknown_family

MAX_HIDDEN = 2**17
MAX_FFN = 2**20
MAX_VOCAB = 2**24
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_LENGTH = 2**24

_COMMON = (
    Requirement("quantization_config", (None,), None, "dequantised weights"),
    Requirement("clip_qkv", (None,), None, "clamped projections"),
    Requirement("partial_rotary_factor", (None, 1, 1.0), None, "rotary over a part of each head"),
    Requirement("final_logit_softcapping", (None,), None, "capped logits"),
    Requirement("attn_logit_softcapping", (None,), None, "capped attention scores"),
    Requirement("qk_layernorm", (None, False), None, "norms of queries and keys"),
    Requirement("use_qk_norm", (None, False), None, "norms of queries and keys"),
    Requirement("block_size", (None,), None, "block-causal attention"),
    Requirement("bd_size", (None,), None, "block-causal attention"),
)
_LLADA = (
    Requirement("block_type", ("llama",), "sequential", "the sequential or parallel block"),
    Requirement("block_group_size", (1, None), 1, "the tensor names of grouped blocks"),
    Requirement("layer_norm_type", ("rms",), "default", "another normalisation"),
    Requirement("layer_norm_with_affine", (True,), True, "norms without weights"),
    Requirement("bias_for_layer_norm", (False, None), None, "norms with a bias"),
    Requirement("activation_type", ("silu", "swiglu"), "swiglu", "another activation"),
    Requirement("rope", (True,), False, "learned or ALiBi positions"),
    Requirement("rope_full_precision", (True,), True, "rotary in the dtype of the activations"),
    Requirement("alibi", (False,), False, "ALiBi biases in every attention"),
    Requirement("input_emb_norm", (False,), False, "embeddings scaled by sqrt(d_model)"),
    Requirement("attention_layer_norm", (False,), False, "norms of queries and keys"),
    Requirement("multi_query_attention", (None, False), None, "n_kv_heads=1 written out"),
    Requirement("include_bias", (False,), False, "biases of the output and FFN projections"),
    Requirement("scale_logits", (False,), False, "logits divided by sqrt(d_model)"),
)
_DREAM = (
    Requirement("hidden_act", ("silu",), "silu", "another activation"),
    Requirement("use_sliding_window", (False, None), False, "a sliding attention window"),
    Requirement("use_mrope", (False, None), False, "multimodal rotary positions"),
    Requirement("attention_bias", (True, None), None, "query, key and value without biases"),
    Requirement("mlp_bias", (False, None), None, "biases in the FFN"),
)


@dataclass(frozen=True)
class TokenizerFacts:
    """What the tokenizer files add to config.json.

    Attributes:
        ids: id of each special token by its text.
        mask_token: text of the tokenizer's mask token, if it declares one.
    """

    ids: Mapping[str, int] = field(default_factory=dict)
    mask_token: str | None = None


def family_of(raw: Mapping[str, Any]) -> str:
    """`llada` or `dream`; `UnsupportedModelError` for look-alikes and unknown families."""
    refuse_lookalikes(raw)
    model_type = str(raw.get("model_type", "")).lower()
    if model_type not in ("llada", "dream"):
        raise unknown_family(raw)
    return model_type


def model_config(
    raw: Mapping[str, Any],
    *,
    stored_dtype: Dtype = "float32",
    tokenizer: TokenizerFacts | None = None,
    generation: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """The architecture that config.json describes.

    Args:
        raw: parsed config.json.
        stored_dtype: dtype if config.json names none (LLaDA's does not).
        tokenizer: for the end-of-turn token and an undeclared mask id.
        generation: parsed generation_config.json, whose end tokens come after the config's own.

    Errors: `UnsupportedModelError` for what is not implemented, `CheckpointError` for missing or
    invalid values.
    """
    tokenizer = tokenizer or TokenizerFacts()
    read = {"llada": _llada_config, "dream": _dream_config}[family_of(raw)]
    config = read(raw, stored_dtype, tokenizer, generation or {})
    if config.mask_id in config.eos_ids:
        raise CheckpointError(
            "the mask token is also an end token",
            got=f"mask id {config.mask_id}, end ids {config.eos_ids}",
            expected="different ids",
            fix="correct mask_token_id or eos_token_id in config.json and generation_config.json",
        )
    return config


def _llada_config(
    raw: Mapping[str, Any],
    stored_dtype: Dtype,
    tokenizer: TokenizerFacts,
    generation: Mapping[str, Any],
) -> ModelConfig:
    """Keys of LLaDA's configuration class; `embedding_size` counts the rows really stored."""
    values = ConfigValues(raw, "LLaDA")
    values.require((*_COMMON, *_LLADA))
    hidden = values.integer("d_model", maximum=MAX_HIDDEN)
    heads = values.integer("n_heads", maximum=MAX_HEADS)
    vocab = values.integer("vocab_size", maximum=MAX_VOCAB)
    rows = values.integer("embedding_size", minimum=vocab, maximum=MAX_VOCAB, default=vocab)
    ratio_width = values.integer("mlp_ratio", maximum=64, default=4) * hidden
    return ModelConfig(
        family="llada",
        hidden_size=hidden,
        num_layers=values.integer("n_layers", maximum=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=_kv_heads(values, "n_kv_heads", heads),
        head_dim=_head_dim(hidden, heads, raw.get("head_dim")),
        intermediate_size=values.integer("mlp_hidden_size", maximum=MAX_FFN, default=ratio_width),
        vocab_size=rows,
        rope_theta=_rope_theta(values, default=10000.0),
        norm_eps=values.number("rms_norm_eps", default=1e-5),
        max_length=values.integer("max_sequence_length", maximum=MAX_LENGTH, default=1024),
        qkv_bias=values.flag("include_qkv_bias", default=False),
        tied_head=values.flag("weight_tying", default=True),
        logit_shift=False,
        mask_id=_mask_id(values, tokenizer, rows, "<|mdm_mask|>"),
        eos_ids=_eos_ids(values, tokenizer, generation, rows, "<|eot_id|>"),
        dtype=values.dtype() or stored_dtype,
    )


def _dream_config(
    raw: Mapping[str, Any],
    stored_dtype: Dtype,
    tokenizer: TokenizerFacts,
    generation: Mapping[str, Any],
) -> ModelConfig:
    """Qwen2's keys. `sliding_window` and `max_window_layers` mean nothing while it is off."""
    values = ConfigValues(raw, "Dream")
    values.require((*_COMMON, *_DREAM))
    _refuse_window_layers(raw.get("layer_types"))
    hidden = values.integer("hidden_size", maximum=MAX_HIDDEN)
    heads = values.integer("num_attention_heads", maximum=MAX_HEADS)
    vocab = values.integer("vocab_size", maximum=MAX_VOCAB)
    return ModelConfig(
        family="dream",
        hidden_size=hidden,
        num_layers=values.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=_kv_heads(values, "num_key_value_heads", heads),
        head_dim=_head_dim(hidden, heads, raw.get("head_dim")),
        intermediate_size=values.integer("intermediate_size", maximum=MAX_FFN),
        vocab_size=vocab,
        rope_theta=_rope_theta(values, default=10000.0),
        norm_eps=values.number("rms_norm_eps", default=1e-6),
        max_length=values.integer("max_position_embeddings", maximum=MAX_LENGTH, default=32768),
        qkv_bias=True,
        tied_head=values.flag("tie_word_embeddings", default=False),
        logit_shift=True,
        mask_id=_mask_id(values, tokenizer, vocab, "<|mask|>"),
        eos_ids=_eos_ids(values, tokenizer, generation, vocab, "<|im_end|>"),
        dtype=values.dtype() or stored_dtype,
    )


def _kv_heads(values: ConfigValues, key: str, heads: int) -> int:
    kv_heads = values.integer(key, maximum=heads, default=heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"{key} does not divide the number of query heads",
            got=f"{key}={kv_heads}, query heads {heads}",
            expected="a divisor",
            fix="use the config.json that was published with the weights",
        )
    return kv_heads


def _head_dim(hidden: int, heads: int, stated: object) -> int:
    head_dim, remainder = divmod(hidden, heads)
    if remainder or head_dim % 2 or stated not in (None, head_dim):
        raise CheckpointError(
            "width, heads and head size do not fit together",
            got=f"width {hidden}, {heads} heads, head_dim {stated}",
            expected="width = heads x head_dim with an even head_dim",
            fix="use the config.json that was published with the weights",
        )
    return head_dim


def _rope_theta(values: ConfigValues, default: float) -> float:
    """Base of plain rotary embeddings, from the flat keys or transformers 5's rope_parameters."""
    for key in ("rope_scaling", "rope_parameters"):
        section = values.raw.get(key)
        if section is None:
            continue
        kind = section.get("rope_type", section.get("type")) if isinstance(section, dict) else None
        if kind != "default":
            raise UnsupportedModelError(
                "scaled rotary embeddings are not implemented",
                got=f"{key}={str(section)[:120]}",
                expected=f"{key}=None or rope_type='default'",
                fix=f"{key} needs the scaled frequencies in the RoPE op",
            )
        if "rope_theta" in section:
            return ConfigValues(section, values.family).number("rope_theta")
    return values.number("rope_theta", default=default)


def _refuse_window_layers(layer_types: object) -> None:
    if layer_types is None:
        return
    if not isinstance(layer_types, list) or set(map(str, layer_types)) != {"full_attention"}:
        raise UnsupportedModelError(
            "some layers do not attend to everything",
            got=f"layer_types={str(layer_types)[:120]}",
            expected="full_attention in every layer",
            fix="layer_types needs a sliding attention window",
        )


def _mask_id(values: ConfigValues, tokenizer: TokenizerFacts, vocab_size: int, usual: str) -> int:
    """From config.json, else the tokenizer's declared mask token, else the family's own."""
    declared = values.token_ids("mask_token_id", vocab_size=vocab_size)
    known = [tokenizer.ids.get(text) for text in (tokenizer.mask_token, usual) if text]
    candidates = [*declared, *(token for token in known if token is not None)]
    if not candidates or not 0 <= candidates[0] < vocab_size:
        raise CheckpointError(
            "the mask token is not known",
            got=f"mask_token_id={values.raw.get('mask_token_id')!r}, tokenizer {known}",
            expected=f"mask_token_id below {vocab_size} in config.json",
            fix=f"add the id of {usual} to config.json as mask_token_id",
        )
    return candidates[0]


def _eos_ids(
    values: ConfigValues,
    tokenizer: TokenizerFacts,
    generation: Mapping[str, Any],
    vocab_size: int,
    turn_end: str,
) -> tuple[int, ...]:
    """The config's end tokens, then generation_config's, then the chat format's end of turn."""
    more = ConfigValues(generation, values.family)
    ids: Iterable[int | None] = (
        *values.token_ids("eos_token_id", vocab_size=vocab_size),
        *more.token_ids("eos_token_id", vocab_size=vocab_size),
        tokenizer.ids.get(turn_end),
    )
    return tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < vocab_size))
