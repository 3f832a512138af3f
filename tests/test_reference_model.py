"""The truth is checked too: it is not causal, padding does not matter, a plain formula agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from reference_model import ReferenceModel, load_reference
from safetensors.torch import load_file
from synthetic import make_dream, make_llada

Array = NDArray[np.float64]
SIZES: dict[str, dict[str, Any]] = {
    "llada": {},
    "llada-bias-tied": {"qkv_bias": True, "tied": True, "kv_heads": 4},
    "dream": {"kv_heads": 1},
    "dream-tied-shards": {"tied": True, "shards": 2},
}


@pytest.fixture(scope="module", params=SIZES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family and layout."""
    make = make_llada if request.param.startswith("llada") else make_dream
    return make(tmp_path_factory.mktemp(request.param), layers=2, **SIZES[request.param])


def _rms(x: Array, weight: Array, eps: float) -> Array:
    normed: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight
    return normed


def _rotate(x: Array, theta: float) -> Array:
    """Rotate-half RoPE of [heads, N, d] at positions 0 to N - 1, angles in float32."""
    half = x.shape[-1] // 2
    exponent = torch.arange(0, 2 * half, 2, dtype=torch.float) / (2 * half)
    angles = torch.arange(x.shape[1]).float()[:, None] * (1 / theta**exponent)
    cos, sin = (part.repeat(1, 2).double().numpy() for part in (angles.cos(), angles.sin()))
    turned = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    result: Array = x * cos + turned * sin
    return result


def _by_hand(weights: dict[str, Array], tokens: list[int], theta: float, eps: float) -> Array:
    """The two layers written out with the names of transformers' state dict."""
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(2):
        get = {k.split(".", 3)[3]: v for k, v in weights.items() if f"layers.{layer}." in k}
        normed = _rms(x, get["input_layernorm.weight"], eps)
        q, k, v = (
            (normed @ get[f"self_attn.{n}_proj.weight"].T + get.get(f"self_attn.{n}_proj.bias", 0))
            .reshape(len(tokens), -1, 16)
            .transpose(1, 0, 2)
            for n in "qkv"
        )
        k, v = (np.repeat(part, len(q) // len(part), axis=0) for part in (k, v))
        scores = _rotate(q, theta) @ _rotate(k, theta).transpose(0, 2, 1) / 4
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (weight / weight.sum(-1, keepdims=True) @ v).transpose(1, 0, 2)
        x = x + mixed.reshape(len(tokens), -1) @ get["self_attn.o_proj.weight"].T
        normed = _rms(x, get["post_attention_layernorm.weight"], eps)
        gate = normed @ get["mlp.gate_proj.weight"].T
        up = normed @ get["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ get["mlp.down_proj.weight"].T
    logits: Array = _rms(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T
    return logits


def test_equals_the_formula_written_out(directory: Path) -> None:
    reference = load_reference(directory)
    network: Any = reference.network
    weights = {name: value.numpy() for name, value in network.state_dict().items()}
    theta = network.config.rope_parameters["rope_theta"]
    tokens = [5, 1, 96, 40, 40, 7, 96]
    expected = _by_hand(weights, tokens, theta, network.config.rms_norm_eps)
    found = reference.raw_logits(np.array([tokens]))[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11)


def test_float32_is_transformers_own_eager_model(directory: Path) -> None:
    tokens = np.arange(20)[None, :] % 97
    exact = load_reference(directory).raw_logits(tokens)
    single = load_reference(directory, torch.float32).raw_logits(tokens)
    assert np.abs(single - exact).max() / np.abs(exact).max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_is_not_causal(directory: Path, dtype: torch.dtype) -> None:
    reference = load_reference(directory, dtype)
    tokens = np.array([[3, 4, 5, 6, 7], [3, 4, 5, 6, 8]])
    logits = reference.raw_logits(tokens)
    assert np.abs(logits[0, 0] - logits[1, 0]).max() > 1e-2


def test_left_padding_changes_nothing(directory: Path) -> None:
    reference = load_reference(directory)
    row = [9, 8, 7, 96, 96]
    padded = np.array([[50, 60, *row], [1, 2, 3, 4, 5, 96, 96]])
    found = reference.raw_logits(padded, np.array([2, 0]))
    alone = reference.raw_logits(np.array([row]))
    np.testing.assert_allclose(found[0, 2:], alone[0], rtol=0, atol=1e-11)
    assert np.isfinite(found).all()


def test_dream_predicts_from_the_left_neighbour(directory: Path) -> None:
    reference: ReferenceModel = load_reference(directory)
    raw = reference.raw_logits(np.array([[3, 4, 5]]))[0]
    rows = reference.row_logits([3, 4, 5])
    expected = [0, 0, 1] if "dream" in directory.name else [0, 1, 2]
    np.testing.assert_array_equal(rows, raw[expected])


def test_every_tensor_of_the_files_is_used(directory: Path) -> None:
    stored = sum(len(load_file(file)) for file in directory.glob("*.safetensors"))
    network: Any = load_reference(directory).network
    names = [n for n in network.state_dict() if not n.endswith("o_proj.bias")]
    tied = "tied" in directory.name
    assert stored == len(names) - tied
