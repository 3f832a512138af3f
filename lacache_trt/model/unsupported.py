"""Diffusion language models that look like the supported ones and are not.

Each is refused by name with what running it would take. Sources: the models' published
configurations and modelling code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lacache_trt.errors import UnsupportedModelError

SUPPORTED = (
    "LLaDA (LLaDA-8B-Base, LLaDA-8B-Instruct, LLaDA-1.5: model_type 'llada', LLaDAModelLM) and "
    "Dream (Dream-v0-Base-7B, Dream-v0-Instruct-7B, Dream-Coder, DiffuCoder: model_type 'Dream')"
)
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "expert_intermediate_size")

_LLADA_MOE = (
    "LLaDA-MoE",
    "mixture-of-experts layers (router, top-k of the experts) and per-head query/key norms",
)
_LLADA2 = (
    "LLaDA2.x",
    "block-causal attention, grouped sigmoid routing with a shared expert, query/key norms and "
    "partial rotary embeddings",
)
_SDAR = ("SDAR", "block-causal attention with a key/value cache per block and query/key norms")
_DIFFUSION_GEMMA = (
    "DiffusionGemma",
    "a causal encoder, self-conditioning on the previous logits, Gemma's extra norms and experts; "
    "it has no mask token, so nothing stays the same between the steps of a block",
)
_FAST_DLLM = (
    "Fast-dLLM v2",
    "block-causal attention with a key/value cache per block and logits shifted inside a block",
)
_ILLADA = (
    "iLLaDA",
    "a tensor map with Llama's names and a mask id (5) that neither its config nor its tokenizer "
    "states; the layers themselves are plain",
)
_BY_PREFIX = {
    "lladamoe": _LLADA_MOE,
    "llada_moe": _LLADA_MOE,
    "llada2": _LLADA2,
    "sdar": _SDAR,
    "diffusion_gemma": _DIFFUSION_GEMMA,
    "diffusiongemma": _DIFFUSION_GEMMA,
    "fast_dllm": _FAST_DLLM,
    "illada": _ILLADA,
}


def refuse_lookalikes(raw: Mapping[str, Any]) -> None:
    """`UnsupportedModelError` if config.json is that of a known model that cannot be run."""
    labels = [str(raw.get("model_type", "")), *architectures(raw)]
    for label in labels:
        for prefix, (name, needed) in _BY_PREFIX.items():
            if label.lower().startswith(prefix):
                raise _refusal(name, needed, raw)
    experts = [key for key in _EXPERT_KEYS if raw.get(key)]
    if experts and labels[0].lower() == "llada":
        raise _refusal(*_LLADA_MOE, raw, seen=experts[0])


def unknown_family(raw: Mapping[str, Any]) -> UnsupportedModelError:
    """The error for a model family that nothing is known about."""
    return UnsupportedModelError(
        "unknown model family",
        got=_identity(raw),
        expected=SUPPORTED,
        fix="use a checkpoint of a supported family; another family needs a configuration reader "
        "and a tensor map of its own",
    )


def architectures(raw: Mapping[str, Any]) -> list[str]:
    """The class names in config.json; empty if the key is missing or malformed."""
    value = raw.get("architectures")
    return [str(item) for item in value] if isinstance(value, list) else []


def _refusal(
    name: str, needed: str, raw: Mapping[str, Any], seen: str | None = None
) -> UnsupportedModelError:
    extra = f", {seen}={raw[seen]!r}" if seen else ""
    return UnsupportedModelError(
        f"{name} is not supported",
        got=_identity(raw) + extra,
        expected=SUPPORTED,
        fix=f"{name} needs {needed}",
    )


def _identity(raw: Mapping[str, Any]) -> str:
    return f"model_type={str(raw.get('model_type'))[:80]!r}, architectures={architectures(raw)[:4]}"
