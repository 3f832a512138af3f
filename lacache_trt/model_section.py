"""The manifest's `model` section: strict types and plausible numbers before anything uses them."""

from __future__ import annotations

import sys

from lacache_trt.errors import ArtifactError
from lacache_trt.model.config import DTYPES, ModelConfig

MAX_SIZE = 2**31 - 1
_SIZES = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_length",
)
_FLAGS = ("qkv_bias", "tied_head", "logit_shift")
_POSITIVE = ("rope_theta", "norm_eps")


def read_model_section(data: object) -> ModelConfig:
    """Read what `ModelConfig.to_json` wrote; `ArtifactError` names the field that is wrong."""
    if not isinstance(data, dict):
        raise ArtifactError("the model section is not an object", got=type(data).__name__)
    wrong = [name for name in data if not _plausible(str(name), data)]
    if wrong:
        got = ", ".join(f"{name} = {data[name]!r}" for name in wrong)
        raise ArtifactError("the model section has invalid values", got=got)
    config = ModelConfig.from_json(data)
    if config.num_heads % config.num_kv_heads:
        raise ArtifactError(
            "the model section contradicts itself",
            got=f"{config.num_heads} query heads, {config.num_kv_heads} key and value heads",
            expected="a multiple",
        )
    if config.mask_id in config.eos_ids:
        raise ArtifactError(
            "the model section contradicts itself",
            got=f"id {config.mask_id} both as the mask and as an end token",
            expected="different ids",
        )
    return config


def _plausible(name: str, data: dict[str, object]) -> bool:
    """Whether the field has the right type; unknown names are left to `ModelConfig.from_json`."""
    value = data[name]
    if name in _SIZES:
        return type(value) is int and 0 < value <= MAX_SIZE
    if name in _FLAGS:
        return isinstance(value, bool)
    if name in _POSITIVE:
        return type(value) in (int, float) and _is_positive(value)
    if name == "mask_id":
        return _is_token(value, data)
    if name == "eos_ids":
        return isinstance(value, list) and all(_is_token(token, data) for token in value)
    if name == "dtype":
        return value in DTYPES
    return name != "family" or (isinstance(value, str) and bool(value))


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 < value <= sys.float_info.max


def _is_token(value: object, data: dict[str, object]) -> bool:
    vocabulary = data.get("vocab_size")
    return type(value) is int and type(vocabulary) is int and 0 <= value < vocabulary
