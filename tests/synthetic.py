"""Synthetic checkpoint directories with the real families' config keys, tensor names and layouts.

The weights are random but sane: the residual stream keeps its scale over the layers, attention is
peaked (scores have a standard deviation of about 3), and `head_scale` is the standard deviation of
the logits, so that the default gives a median top-1 probability above one half.
The files are written byte by byte here, independently of the reader under test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from synthetic_configs import dream_config, llada_config
from synthetic_text import write_dream_tokenizer, write_llada_tokenizer

HEAD_SCALE = 10.0
_SCORE_SCALE = 1.7
# Small, so that what a position attends to outweighs the embedding, which all masks share.
_EMBEDDING_STD = 0.2
_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Tensor:
    """One tensor to write: normal values of this deviation around this mean."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def make_llada(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int | None = 2,
    ffn: int = 96,
    vocab: int = 97,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    tied: bool = False,
    qkv_bias: bool = False,
    head_scale: float = HEAD_SCALE,
    rope_theta: float = 500000.0,
    max_length: int = 4096,
    tokenizer: bool = False,
    config_changes: dict[str, Any] | None = None,
    sparse: bool = False,
) -> Path:
    """A LLaDA checkpoint. The last six ids are the special tokens, the last one is the mask.

    `config_changes` is merged into config.json (a value of `...` removes the key);
    `sparse` writes zeros without using disk space.
    """
    config = {
        **llada_config(),
        "d_model": hidden,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "mlp_hidden_size": ffn,
        "vocab_size": vocab,
        "embedding_size": vocab,
        "weight_tying": tied,
        "include_qkv_bias": qkv_bias,
        "rope_theta": rope_theta,
        "max_sequence_length": max_length,
        "mask_token_id": vocab - 1,
        "eos_token_id": vocab - 2,
        "pad_token_id": vocab - 2,
    }
    sizes = _Sizes(hidden, layers, heads, kv_heads or heads, ffn, vocab, tied, qkv_bias, head_scale)
    return _write(
        path,
        config,
        _llada_tensors(sizes),
        dtype,
        seed,
        shards,
        sparse,
        config_changes,
        (lambda: write_llada_tokenizer(path, vocab)) if tokenizer else None,
    )


def make_dream(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int | None = 2,
    ffn: int = 96,
    vocab: int = 97,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    tied: bool = False,
    head_scale: float = HEAD_SCALE,
    rope_theta: float = 1000000.0,
    max_length: int = 4096,
    tokenizer: bool = False,
    config_changes: dict[str, Any] | None = None,
    sparse: bool = False,
) -> Path:
    """A Dream checkpoint; the last four ids are the special tokens, the last one is the mask."""
    config = {
        **dream_config(),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "rope_theta": rope_theta,
        "max_position_embeddings": max_length,
        "mask_token_id": vocab - 1,
        "eos_token_id": vocab - 2,
        "bos_token_id": vocab - 2,
        "pad_token_id": vocab - 2,
        "torch_dtype": dtype,
    }
    sizes = _Sizes(hidden, layers, heads, kv_heads or heads, ffn, vocab, tied, True, head_scale)
    return _write(
        path,
        config,
        _dream_tensors(sizes),
        dtype,
        seed,
        shards,
        sparse,
        config_changes,
        (lambda: write_dream_tokenizer(path, vocab)) if tokenizer else None,
    )


def make_llada_8b_layout(path: Path) -> Path:
    """Config, index and six shards exactly as LLaDA-8B-Instruct has them; zeros, no disk used."""
    return make_llada(
        path,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=32,
        ffn=12288,
        vocab=126464,
        dtype="bfloat16",
        shards=6,
        sparse=True,
        config_changes={"mask_token_id": 126336, "eos_token_id": 126081, "pad_token_id": 126081},
    )


def make_dream_7b_layout(path: Path) -> Path:
    """Config, index and four shards with the shapes of Dream-v0-Instruct-7B; no disk used."""
    return make_dream(
        path,
        hidden=3584,
        layers=28,
        heads=28,
        kv_heads=4,
        ffn=18944,
        vocab=152064,
        dtype="bfloat16",
        shards=4,
        sparse=True,
        max_length=131072,
        config_changes={
            "mask_token_id": 151666,
            "eos_token_id": 151643,
            "bos_token_id": 151643,
            "pad_token_id": 151643,
        },
    )


@dataclass(frozen=True)
class _Sizes:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool
    head_scale: float

    @property
    def kv_width(self) -> int:
        return self.hidden // self.heads * self.kv_heads


def _llada_tensors(sizes: _Sizes) -> list[Tensor]:
    names = (
        "attn_norm",
        "q_proj",
        "k_proj",
        "v_proj",
        "attn_out",
        "ff_norm",
        "ff_proj",
        "up_proj",
        "ff_out",
    )
    tensors = [_embedding("model.transformer.wte.weight", sizes)]
    for index in range(sizes.layers):
        tensors += _layer(f"model.transformer.blocks.{index}.", names, sizes)
    tensors.append(_final_norm("model.transformer.ln_f.weight", sizes))
    return tensors + _head("model.transformer.ff_out.weight", sizes)


def _dream_tensors(sizes: _Sizes) -> list[Tensor]:
    names = (
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    tensors = [_embedding("model.embed_tokens.weight", sizes)]
    for index in range(sizes.layers):
        tensors += _layer(f"model.layers.{index}.", names, sizes)
    tensors.append(_final_norm("model.norm.weight", sizes))
    return tensors + _head("lm_head.weight", sizes)


def _layer(prefix: str, names: tuple[str, ...], sizes: _Sizes) -> list[Tensor]:
    attn_norm, query, key, value, out, ffn_norm, gate, up, down = (prefix + name for name in names)
    hidden, ffn, kv_width = sizes.hidden, sizes.ffn, sizes.kv_width
    unit = hidden**-0.5
    branch = (2 * sizes.layers) ** -0.5
    tensors = [
        Tensor(attn_norm + ".weight", (hidden,), 0.1, 1.0),
        Tensor(query + ".weight", (hidden, hidden), _SCORE_SCALE * unit),
        Tensor(key + ".weight", (kv_width, hidden), _SCORE_SCALE * unit),
        Tensor(value + ".weight", (kv_width, hidden), unit),
        Tensor(out + ".weight", (hidden, hidden), 2 * branch * unit),
        Tensor(ffn_norm + ".weight", (hidden,), 0.1, 1.0),
        Tensor(gate + ".weight", (ffn, hidden), unit),
        Tensor(up + ".weight", (ffn, hidden), unit),
        Tensor(down + ".weight", (hidden, ffn), 2 * branch * ffn**-0.5),
    ]
    if sizes.qkv_bias:
        widths = ((query, hidden), (key, kv_width), (value, kv_width))
        tensors += [Tensor(name + ".bias", (width,), 0.3) for name, width in widths]
    return tensors


def _embedding(name: str, sizes: _Sizes) -> Tensor:
    return Tensor(name, (sizes.vocab, sizes.hidden), _EMBEDDING_STD)


def _final_norm(name: str, sizes: _Sizes) -> Tensor:
    """With a tied head the norm's weights carry the scale that the head cannot have."""
    unit = sizes.head_scale * sizes.hidden**-0.5 / _EMBEDDING_STD if sizes.tied else 1.0
    return Tensor(name, (sizes.hidden,), 0.1 * unit, unit)


def _head(name: str, sizes: _Sizes) -> list[Tensor]:
    if sizes.tied:
        return []
    return [Tensor(name, (sizes.vocab, sizes.hidden), sizes.head_scale * sizes.hidden**-0.5)]


def _write(
    path: Path,
    config: dict[str, Any],
    tensors: list[Tensor],
    dtype: str,
    seed: int,
    shards: int,
    sparse: bool,
    changes: dict[str, Any] | None,
    write_tokenizer: Callable[[], None] | None,
) -> Path:
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    merged = {**config, **(changes or {})}
    merged = {key: value for key, value in merged.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(merged, indent=2))
    rng = np.random.default_rng(seed)
    groups = _grouped(tensors, shards)
    names = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    )
    for name, group in zip(names, groups, strict=True):
        write_safetensors(path / name, group, dtype, None if sparse else rng)
    if shards > 1:
        total = sum(int(np.prod(t.shape, dtype=np.int64)) for t in tensors) * _BYTES[dtype]
        weight_map = {
            t.name: name for name, group in zip(names, groups, strict=True) for t in group
        }
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    if write_tokenizer:
        write_tokenizer()
    return path


def _grouped(tensors: list[Tensor], shards: int) -> list[list[Tensor]]:
    """Contiguous groups of about equal size, none empty."""
    sizes = np.cumsum([int(np.prod(t.shape, dtype=np.int64)) for t in tensors])
    groups: list[list[Tensor]] = [[] for _ in range(shards)]
    for index, tensor in enumerate(tensors):
        middle = sizes[index] - np.prod(tensor.shape, dtype=np.int64) / 2
        wanted = int(shards * middle / sizes[-1])
        latest = max((i for i, group in enumerate(groups) if group), default=-1)
        remaining = len(tensors) - index
        groups[max(min(wanted, latest + 1, shards - 1), shards - remaining)].append(tensor)
    return groups


def write_safetensors(
    path: Path, tensors: list[Tensor], dtype: str, rng: np.random.Generator | None
) -> None:
    """A safetensors file: random values, or a hole of the right size if `rng` is None."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        size = int(np.prod(tensor.shape, dtype=np.int64)) * _BYTES[dtype]
        entries[tensor.name] = {
            "dtype": _NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if rng is None:
            file.truncate(8 + len(text) + position)
            return
        for tensor in tensors:
            for block in _values(tensor, rng):
                file.write(block.astype(_NUMPY[dtype]).tobytes())


def _values(tensor: Tensor, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Normal values in blocks; a very large tensor repeats its first 4M values."""
    count = int(np.prod(tensor.shape, dtype=np.int64))
    block = rng.standard_normal(min(count, 2**22), dtype=np.float32) * tensor.std + tensor.mean
    for first in range(0, count, block.size):
        yield block[: count - first]
