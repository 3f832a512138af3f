"""LLaDA's checkpoint format for a small model, and the same weights as transformers' Llama.

LLaDA (https://arxiv.org/abs/2502.09992, https://huggingface.co/GSAI-ML/LLaDA-8B-Instruct) is a
Llama decoder without the causal mask: the tensors map one to one. Note the two ``ff_out``: inside a
block it is the down projection, at the top level it is the LM head.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tiny.vocabulary import BOS, EOS, MASK, UNKNOWN, build_tokenizer

_BLOCK = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
_TOP = {
    "wte": "model.embed_tokens",
    "ln_f": "model.norm",
    "ff_out": "lm_head",
}


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; heads are 64 wide, and all widths are multiples of 128."""

    d_model: int = 256
    n_layers: int = 6
    mlp_hidden_size: int = 768
    vocab_size: int = 128
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    max_sequence_length: int = 256

    @property
    def n_heads(self) -> int:
        """Heads of width 64."""
        return self.d_model // 64


def tensor_names(n_layers: int) -> dict[str, str]:
    """LLaDA's tensor names → transformers' Llama names."""
    names = {
        f"model.transformer.{ours}.weight": f"{theirs}.weight" for ours, theirs in _TOP.items()
    }
    for layer in range(n_layers):
        for ours, theirs in _BLOCK.items():
            name = f"model.transformer.blocks.{layer}.{ours}.weight"
            names[name] = f"model.layers.{layer}.{theirs}.weight"
    return names


def build_llama(shape: Shape) -> LlamaForCausalLM:
    """transformers' Llama with these sizes; callers pass a full mask, so nothing is causal."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.d_model,
        intermediate_size=shape.mlp_hidden_size,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_heads,
        hidden_act="silu",
        max_position_embeddings=shape.max_sequence_length,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def llada_config(shape: Shape) -> dict[str, object]:
    """``config.json`` with the keys of LLaDA-8B's own."""
    ids = build_tokenizer().get_vocab()
    return {
        "activation_type": "silu",
        "alibi": False,
        "alibi_bias_max": 8.0,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": shape.d_model,
        "embedding_dropout": 0.0,
        "embedding_size": shape.vocab_size,
        "eos_token_id": ids[EOS],
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_cutoff_factor": None,
        "init_device": "meta",
        "init_fn": "normal",
        "init_std": 0.02,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": ids[MASK],
        "max_sequence_length": shape.max_sequence_length,
        "mlp_hidden_size": shape.mlp_hidden_size,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": shape.n_heads,
        "n_kv_heads": shape.n_heads,
        "n_layers": shape.n_layers,
        "pad_token_id": ids[EOS],
        "precision": "amp_bf16",
        "residual_dropout": 0.0,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": shape.rope_theta,
        "scale_logits": False,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "vocab_size": shape.vocab_size,
        "weight_tying": False,
    }


def save_static(directory: Path, shape: Shape, generation: Mapping[str, object]) -> None:
    """Write what training does not change: both configs and the tokenizer's three files."""
    tokenizer = build_tokenizer()
    ids = tokenizer.get_vocab()
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": EOS, "unk_token": UNKNOWN}
    special["mask_token"] = MASK
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_sequence_length,
        "padding_side": "left",
        **special,
    }
    defaults = {
        "bos_token_id": ids[BOS],
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[EOS],
        "mask_token_id": ids[MASK],
        **generation,
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", llada_config(shape))
    write_json(directory / "tokenizer_config.json", settings)
    write_json(directory / "special_tokens_map.json", special)
    write_json(directory / "generation_config.json", defaults)
    write_bytes(directory / "tokenizer.json", tokenizer.to_str(pretty=True).encode())


def save_weights(directory: Path, weights: Mapping[str, Tensor], shape: Shape) -> None:
    """Write ``model.safetensors`` in bf16 under LLaDA's names, from Llama's state dict."""
    tensors = {
        ours: weights[theirs].detach().to("cpu", torch.bfloat16).contiguous()
        for ours, theirs in tensor_names(shape.n_layers).items()
    }
    write_bytes(directory / "model.safetensors", save(tensors, metadata={"format": "pt"}))


def load_llama(directory: Path, shape: Shape, device: torch.device) -> LlamaForCausalLM:
    """The saved (bf16-rounded) weights in a float32 Llama."""
    tensors = load_file(directory / "model.safetensors")
    names = tensor_names(shape.n_layers)
    model = build_llama(shape)
    model.load_state_dict({names[name]: tensor.float() for name, tensor in tensors.items()})
    return model.to(device).train(False)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write one JSON file atomically."""
    write_bytes(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write one file so that it is whole or absent: temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
