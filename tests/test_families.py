"""config.json → ModelConfig, refusals by name, and the tensor map."""

from __future__ import annotations

from typing import Any

import pytest
from synthetic_configs import dream_config, llada_config

from lacache_trt.errors import CheckpointError, UnsupportedModelError
from lacache_trt.model.config import ModelConfig, parameter_shapes
from lacache_trt.model.families import TokenizerFacts, model_config
from lacache_trt.model.tensor_map import tensor_recipes


def test_llada_8b() -> None:
    facts = TokenizerFacts({"<|eot_id|>": 126348})
    assert model_config(llada_config(), stored_dtype="bfloat16", tokenizer=facts) == ModelConfig(
        family="llada",
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=126464,
        rope_theta=500000.0,
        norm_eps=1e-5,
        max_length=4096,
        qkv_bias=False,
        tied_head=False,
        logit_shift=False,
        mask_id=126336,
        eos_ids=(126081, 126348),
        dtype="bfloat16",
    )


def test_dream_7b() -> None:
    assert model_config(dream_config()) == ModelConfig(
        family="dream",
        hidden_size=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=18944,
        vocab_size=152064,
        rope_theta=1e6,
        norm_eps=1e-6,
        max_length=131072,
        qkv_bias=True,
        tied_head=False,
        logit_shift=True,
        mask_id=151666,
        eos_ids=(151643,),
        dtype="bfloat16",
    )


@pytest.mark.parametrize(
    ("changes", "attribute", "value"),
    [
        ({"n_kv_heads": None}, "num_kv_heads", 32),
        ({"n_kv_heads": 8}, "num_kv_heads", 8),
        ({"mlp_hidden_size": None, "mlp_ratio": 3}, "intermediate_size", 12288),
        ({"vocab_size": 126349, "embedding_size": 126464}, "vocab_size", 126464),
        ({"embedding_size": None}, "vocab_size", 126464),
        ({"include_qkv_bias": True}, "qkv_bias", True),
        ({"weight_tying": True}, "tied_head", True),
        ({"torch_dtype": "bfloat16"}, "dtype", "bfloat16"),
        ({"torch_dtype": "bfloat16", "dtype": "float16"}, "dtype", "float16"),
        ({"eos_token_id": [126081, 126348]}, "eos_ids", (126081, 126348)),
        ({"eos_token_id": None}, "eos_ids", ()),
        ({"flash_attention": True}, "num_layers", 32),
    ],
)
def test_llada_variants(changes: dict[str, Any], attribute: str, value: object) -> None:
    assert getattr(model_config({**llada_config(), **changes}), attribute) == value


@pytest.mark.parametrize(
    ("changes", "attribute", "value"),
    [
        ({"sliding_window": 4096, "use_sliding_window": False}, "num_layers", 28),
        ({"layer_types": ["full_attention"] * 28}, "num_layers", 28),
        ({"rope_scaling": {"rope_type": "default"}}, "rope_theta", 1e6),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_theta",
            5e5,
        ),
        ({"tie_word_embeddings": True}, "tied_head", True),
        ({"num_key_value_heads": None}, "num_kv_heads", 28),
    ],
)
def test_dream_variants(changes: dict[str, Any], attribute: str, value: object) -> None:
    assert getattr(model_config({**dream_config(), **changes}), attribute) == value


def test_end_tokens_come_from_config_then_generation_config_then_the_chat_format() -> None:
    facts = TokenizerFacts({"<|eot_id|>": 126348})
    generation = {"eos_token_id": [126081, 7]}
    config = model_config(llada_config(), tokenizer=facts, generation=generation)
    assert config.eos_ids == (126081, 7, 126348)


def test_mask_id_comes_from_the_tokenizer_if_the_config_has_none() -> None:
    raw = {**dream_config(), "mask_token_id": None}
    declared = TokenizerFacts({"<M>": 5, "<|mask|>": 6}, mask_token="<M>")
    assert model_config(raw, tokenizer=declared).mask_id == 5
    assert model_config(raw, tokenizer=TokenizerFacts({"<|mask|>": 6})).mask_id == 6
    with pytest.raises(CheckpointError, match="mask token is not known"):
        model_config(raw)


_NOT_IMPLEMENTED_LLADA = {
    "alibi": True,
    "block_type": "sequential",
    "block_group_size": 4,
    "layer_norm_type": "default",
    "layer_norm_with_affine": False,
    "bias_for_layer_norm": True,
    "activation_type": "gelu",
    "input_emb_norm": True,
    "scale_logits": True,
    "rope": False,
    "rope_full_precision": False,
    "attention_layer_norm": True,
    "multi_query_attention": True,
    "include_bias": True,
    "clip_qkv": 8.0,
    "quantization_config": {"quant_method": "gptq"},
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "block_size": 32,
}
_NOT_IMPLEMENTED_DREAM = {
    "hidden_act": "gelu",
    "use_sliding_window": True,
    "use_mrope": True,
    "attention_bias": False,
    "mlp_bias": True,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6},
    "layer_types": ["full_attention", "sliding_attention"],
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
}


@pytest.mark.parametrize(
    ("raw", "key", "value"),
    [(llada_config(), *item) for item in _NOT_IMPLEMENTED_LLADA.items()]
    + [(dream_config(), *item) for item in _NOT_IMPLEMENTED_DREAM.items()],
)
def test_other_arithmetic_is_refused(raw: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        model_config({**raw, key: value})
    message = str(caught.value)
    assert key in message
    assert str(value)[:20] in message
    assert "needs" in message


def test_every_refused_key_is_named_at_once() -> None:
    with pytest.raises(UnsupportedModelError, match=r"alibi=True, scale_logits=True"):
        model_config({**llada_config(), "alibi": True, "scale_logits": True})


@pytest.mark.parametrize("key", ["rope", "layer_norm_type", "block_type"])
def test_absent_keys_mean_what_the_family_defaults_to(key: str) -> None:
    raw = llada_config()
    del raw[key]
    with pytest.raises(UnsupportedModelError, match=key):
        model_config(raw)


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ({**llada_config(), "num_experts": 64}, "LLaDA-MoE"),
        ({"model_type": "llada", "architectures": ["LLaDAMoEModelLM"]}, "LLaDA-MoE"),
        ({"model_type": "llada2_moe", "architectures": ["LLaDA2MoeModelLM"]}, "LLaDA2.x"),
        ({"model_type": "llada21_moe", "architectures": ["LLaDA2MoeModelLM"]}, "LLaDA2.x"),
        ({"model_type": "sdar", "architectures": ["SDARForCausalLM"]}, "SDAR"),
        ({"model_type": "sdar_moe"}, "SDAR"),
        ({"model_type": "diffusion_gemma_text"}, "DiffusionGemma"),
        ({"architectures": ["DiffusionGemmaForBlockDiffusion"]}, "DiffusionGemma"),
        ({"architectures": ["Fast_dLLM_QwenForCausalLM"]}, "Fast-dLLM v2"),
        ({"architectures": ["ILLaDAForCausalLM"], "model_type": "illada"}, "iLLaDA"),
    ],
)
def test_lookalikes_are_refused_by_name(raw: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name} is not supported") as caught:
        model_config(raw)
    assert "needs" in str(caught.value)
    assert "LLaDA-8B-Instruct" in str(caught.value)


@pytest.mark.parametrize("raw", [{}, {"model_type": "llama"}, {"model_type": 7}])
def test_unknown_families_list_the_supported_ones(raw: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="Dream-v0-Instruct-7B"):
        model_config(raw)


@pytest.mark.parametrize("value", [0, -1, 2**40, "64", 1.5, True, [64], float("nan")])
@pytest.mark.parametrize("key", ["d_model", "n_layers", "n_heads", "vocab_size", "mlp_hidden_size"])
def test_absurd_sizes_are_refused(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=key):
        model_config({**llada_config(), key: value})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"n_heads": 30, "n_kv_heads": 30}, "do not fit together"),
        ({"d_model": 96, "n_heads": 32}, "do not fit together"),
        ({"head_dim": 64}, "do not fit together"),
        ({"n_kv_heads": 5}, "does not divide"),
        ({"n_kv_heads": 64}, "n_kv_heads"),
        ({"embedding_size": 100}, "embedding_size"),
        ({"mask_token_id": 126464}, "mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"eos_token_id": 2**31}, "eos_token_id"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"weight_tying": "yes"}, "weight_tying"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        model_config({**llada_config(), **changes})


@pytest.mark.parametrize("key", ["d_model", "n_layers", "n_heads", "vocab_size"])
def test_missing_sizes_are_named(key: str) -> None:
    raw = llada_config()
    del raw[key]
    with pytest.raises(CheckpointError, match=f"no '{key}'"):
        model_config(raw)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_recipes_make_every_parameter(family: str, tied: bool) -> None:
    raw = (
        {**llada_config(), "weight_tying": tied, "n_layers": 3}
        if family == "llada"
        else {**dream_config(), "tie_word_embeddings": tied, "num_hidden_layers": 3}
    )
    config = model_config(raw)
    recipes = tensor_recipes(config)
    assert list(recipes) == list(parameter_shapes(config))
    used = [source.name for recipe in recipes.values() for source in recipe.sources]
    per_layer = 12 if family == "dream" else 9
    assert len(set(used)) == 3 * per_layer + (2 if tied else 3)
    assert len(used) == 3 * per_layer + 3
    for name, recipe in recipes.items():
        rows = sum(source.shape[0] for source in recipe.sources)
        stacked = (rows, *recipe.sources[0].shape[1:])
        assert recipe.shape == parameter_shapes(config)[name]
        assert recipe.shape == (stacked[::-1] if recipe.transpose else stacked)


def test_llada_has_two_different_ff_out() -> None:
    recipes = tensor_recipes(model_config({**llada_config(), "n_layers": 2}))
    assert recipes["layers.0.down.weight"].sources[0].name == (
        "model.transformer.blocks.0.ff_out.weight"
    )
    assert recipes["head.weight"].sources[0].name == "model.transformer.ff_out.weight"
    gate, up = recipes["layers.0.gate_up.weight"].sources
    assert gate.name.endswith("ff_proj.weight")
    assert up.name.endswith("up_proj.weight")


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e400, 0])
@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
def test_numbers_that_float64_cannot_hold(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=key):
        model_config({**llada_config(), key: value})


def test_the_mask_is_no_end_token() -> None:
    raw = llada_config()
    with pytest.raises(CheckpointError, match="also an end token"):
        model_config({**raw, "eos_token_id": raw["mask_token_id"]})
