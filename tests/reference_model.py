"""The independent truth for logits: transformers' Llama and Qwen2 without their causal mask.

Reads a checkpoint directory of the LLaDA or Dream family with its own tensor-name map, shares no
code with the toolkit, and runs eager attention under an explicit 4-D mask. In float64 the three
places where transformers falls back to float32 (norms and the attention's softmax) are replaced;
the rotary cosines stay float32, which is how the checkpoints' own code defines the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

FLOAT64_ATTENTION = "lacache_reference_float64"
_LLADA_LAYER = {
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
_LLADA_TOP = {
    "model.transformer.wte.weight": "model.embed_tokens.weight",
    "model.transformer.ln_f.weight": "model.norm.weight",
    "model.transformer.ff_out.weight": "lm_head.weight",
}
_DREAM_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
)


class Float64Norm(nn.Module):
    """RMS norm that stays in its input's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """x / sqrt(mean x^2 + eps) * weight."""
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * hidden * scale


def float64_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Eager attention with the softmax in the input's dtype; an explicit mask is required."""
    if attention_mask is None:
        raise ValueError("the reference needs an explicit mask")
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling + attention_mask
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(FLOAT64_ATTENTION, float64_attention)


@dataclass(frozen=True)
class ReferenceModel:
    """A loaded network and the facts that decoding needs.

    Attributes:
        network: transformers' model in evaluation mode.
        mask_id: the id of an undecoded position.
        end_ids: ids that end an answer.
        shift: position p is predicted by p - 1 (Dream).
    """

    network: nn.Module
    mask_id: int
    end_ids: tuple[int, ...]
    shift: bool

    def raw_logits(
        self, tokens: NDArray[np.integer], valid_from: NDArray[np.integer] | None = None
    ) -> NDArray[np.float64]:
        """Head outputs of every column, unshifted: int [B, N] -> float64 [B, N, V].

        Columns before `valid_from[b]` are padding: no real column attends to them (they attend
        to themselves, so that nothing is NaN).
        """
        rows, columns = tokens.shape
        starts = torch.zeros(rows, dtype=torch.long)
        if valid_from is not None:
            starts = torch.as_tensor(np.asarray(valid_from), dtype=torch.long)
        column = torch.arange(columns)
        real = column[None, :] >= starts[:, None]
        allowed = real[:, None, None, :] | torch.eye(columns, dtype=torch.bool)
        dtype = next(self.network.parameters()).dtype
        mask = torch.zeros(rows, 1, columns, columns, dtype=dtype)
        mask.masked_fill_(~allowed, torch.finfo(dtype).min)
        with torch.no_grad():
            logits: Tensor = self.network(
                input_ids=torch.as_tensor(np.asarray(tokens), dtype=torch.long),
                attention_mask=mask,
                position_ids=(column[None, :] - starts[:, None]).clamp(min=0),
                use_cache=False,
            ).logits
        return logits.double().numpy()

    def row_logits(self, tokens: list[int]) -> NDArray[np.float64]:
        """Predictions of every position of one unpadded row, shifted if the family shifts.

        float64 [N, V]; with a shift, position 0 is predicted by itself.
        """
        raw = self.raw_logits(np.array([tokens]))[0]
        return np.concatenate([raw[:1], raw[:-1]]) if self.shift else raw


def load_reference(directory: Path, dtype: torch.dtype = torch.float64) -> ReferenceModel:
    """Build the transformers class of the directory's family with the directory's weights."""
    config = json.loads((directory / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(file))
    is_llada = str(config["model_type"]).lower() == "llada"
    network = _llama(config, tensors, dtype) if is_llada else _qwen2(config, tensors, dtype)
    if dtype is torch.float64:
        _replace_norms(network)
    ends = config["eos_token_id"]
    return ReferenceModel(
        network.eval(),
        int(config["mask_token_id"]),
        tuple(ends) if isinstance(ends, list) else (int(ends),),
        shift=not is_llada,
    )


def _attention(dtype: torch.dtype) -> str:
    return FLOAT64_ATTENTION if dtype is torch.float64 else "eager"


def _llama(config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    heads = config["n_heads"]
    settings = LlamaConfig(
        vocab_size=config.get("embedding_size") or config["vocab_size"],
        hidden_size=config["d_model"],
        intermediate_size=config["mlp_hidden_size"],
        num_hidden_layers=config["n_layers"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("n_kv_heads") or heads,
        max_position_embeddings=config["max_sequence_length"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        tie_word_embeddings=config["weight_tying"],
        attention_bias=config.get("include_qkv_bias", False),
    )
    settings._attn_implementation = _attention(dtype)
    renamed = {}
    for name, tensor in tensors.items():
        if name in _LLADA_TOP:
            renamed[_LLADA_TOP[name]] = tensor
            continue
        layer, part, kind = name.removeprefix("model.transformer.blocks.").split(".")
        renamed[f"model.layers.{layer}.{_LLADA_LAYER[part]}.{kind}"] = tensor
    if settings.attention_bias:
        # transformers biases the output projection too; LLaDA's option does not.
        zeros = torch.zeros(config["d_model"])
        for index in range(config["n_layers"]):
            renamed[f"model.layers.{index}.self_attn.o_proj.bias"] = zeros
    return _filled(LlamaForCausalLM(settings), renamed, config["weight_tying"], dtype)


def _qwen2(config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    settings = Qwen2Config(
        **{name: config[name] for name in _DREAM_SETTINGS},
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        use_sliding_window=False,
    )
    settings._attn_implementation = _attention(dtype)
    return _filled(Qwen2ForCausalLM(settings), tensors, config["tie_word_embeddings"], dtype)


def _filled(
    network: nn.Module, tensors: dict[str, Tensor], tied: bool, dtype: torch.dtype
) -> nn.Module:
    if tied:
        tensors = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}
    network = network.to(dtype)
    network.load_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()})
    return network


def _replace_norms(network: nn.Module) -> None:
    for parent in list(network.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (LlamaRMSNorm, Qwen2RMSNorm)):
                norm = Float64Norm(child.weight.detach(), float(child.variance_epsilon))
                setattr(parent, name, norm)
