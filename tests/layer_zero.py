"""Layer 0 in float64, written out from the checkpoint's own tensors; the truth for the caches.

Shares no code with the toolkit. The rotary cosines are float32, as the checkpoints' own code
defines them; everything else is float64.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from safetensors import safe_open

Array = NDArray[np.float64]
_NAMES = {
    "llada": {
        "embed": "model.transformer.wte.weight",
        "norm": "model.transformer.blocks.0.attn_norm.weight",
        "projection": "model.transformer.blocks.0.{}_proj.{}",
    },
    "dream": {
        "embed": "model.embed_tokens.weight",
        "norm": "model.layers.0.input_layernorm.weight",
        "projection": "model.layers.0.self_attn.{}_proj.{}",
    },
}


@dataclass(frozen=True)
class LayerZero:
    """Weights of the embedding and of layer 0's norm and projections, as the checkpoint has them.

    Attributes:
        tensors: float64, by the checkpoint's names.
        config: config.json.
    """

    tensors: dict[str, Array]
    config: dict[str, object]

    @classmethod
    def load(cls, directory: Path) -> LayerZero:
        """Read a checkpoint with one or several shards."""
        tensors: dict[str, Array] = {}
        for file in directory.glob("*.safetensors"):
            with safe_open(file, "np") as stored:
                for name in stored.keys():  # noqa: SIM118
                    tensors[name] = _float64(stored.get_tensor(name))
        return cls(tensors, json.loads((directory / "config.json").read_text()))

    @property
    def _is_llada(self) -> bool:
        return self.config["model_type"] == "llada"

    def _setting(self, llada: str, dream: str) -> float:
        return float(self.config[llada if self._is_llada else dream])  # type: ignore[arg-type]

    def caches(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        valid: tuple[int, int],
        block: NDArray[np.int32],
    ) -> dict[str, Array]:
        """The caches of one row: embed [N, D], q, k, v [H, N, d], fa_* [Hq, N, ...]."""
        names = _NAMES["llada" if self._is_llada else "dream"]
        embed = self.tensors[names["embed"]][tokens]
        eps = self._setting("rms_norm_eps", "rms_norm_eps")
        scale = 1 / np.sqrt((embed**2).mean(-1, keepdims=True) + eps)
        normed = embed * scale * self.tensors[names["norm"]]
        heads = int(self._setting("n_heads", "num_attention_heads"))
        q, k, v = (
            self._heads(normed, names["projection"], kind, embed.shape[1] // heads)
            for kind in "qkv"
        )
        theta = self._setting("rope_theta", "rope_theta")
        q, k = _rotate(q, positions, theta), _rotate(k, positions, theta)
        outside = [column for column in range(*valid) if column not in set(block.tolist())]
        return {"embed": embed, "q": q, "k": k, "v": v, **_state(q, k, v, outside)}

    def _heads(self, normed: Array, pattern: str, kind: str, head_dim: int) -> Array:
        projected = normed @ self.tensors[pattern.format(kind, "weight")].T
        projected = projected + self.tensors.get(pattern.format(kind, "bias"), 0.0)
        heads: Array = projected.reshape(len(normed), -1, head_dim).transpose(1, 0, 2)
        return heads


def _float64(values: NDArray[np.generic]) -> Array:
    if values.dtype == bfloat16:
        values = values.astype(np.float32)
    return values.astype(np.float64)


def _rotate(x: Array, positions: NDArray[np.int32], theta: float) -> Array:
    half = x.shape[-1] // 2
    exponents = np.arange(0, 2 * half, 2, dtype=np.float32) / np.float32(2 * half)
    frequencies = np.float32(1) / np.float32(theta) ** exponents
    angles = positions.astype(np.float32)[:, None] * frequencies
    cos, sin = (part.astype(np.float64) for part in (np.cos(angles), np.sin(angles)))
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _state(q: Array, k: Array, v: Array, outside: list[int]) -> dict[str, Array]:
    group = len(q) // len(k)
    keys, values = (np.repeat(part[:, outside], group, axis=0) for part in (k, v))
    if not outside:
        shape = q.shape[:2]
        return {
            "fa_max": np.full(shape, -np.inf),
            "fa_sum": np.zeros(shape),
            "fa_acc": np.zeros(q.shape),
        }
    scores = q @ keys.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    peak = scores.max(-1)
    weights = np.exp(scores - peak[..., None])
    return {"fa_max": peak, "fa_sum": weights.sum(-1), "fa_acc": weights @ values}
