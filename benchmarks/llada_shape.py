"""LLaDA-8B's shape with random weights made on the device, and random canvases to step over."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lacache_trt.engines.base import Canvas, Int, Sampling
from lacache_trt.model.config import ModelConfig, parameter_shapes

LLADA_8B = ModelConfig(
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
    eos_ids=(126081,),
    dtype="bfloat16",
)
BLOCK = 32
GENERATED = 256


def shallow(layers: int) -> ModelConfig:
    """The shape with fewer layers."""
    return replace(LLADA_8B, num_layers=layers)


def random_weights(
    config: ModelConfig, device: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Normal weights: unit gain per linear, ones in the norms, logits of deviation 10."""
    generator = torch.Generator(device=device).manual_seed(seed)
    branch = (2 * config.num_layers) ** -0.5
    scales = {"attn_out": 2 * branch, "down": 2 * branch, "head": 10.0}
    weights = {}
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape, device=device, dtype=dtype)
            continue
        kind = name.split(".")[-2]
        scale = 0.2 if kind == "embed" else scales.get(kind, 1.0) * shape[0] ** -0.5
        values = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        weights[name] = values.mul_(scale)
    return weights


def generated_part(columns: int) -> int:
    """Masked columns at the end of a canvas: whole blocks, 256 where there is room."""
    return max(BLOCK, min(GENERATED, (columns - BLOCK) // BLOCK * BLOCK))


def masked_canvas(config: ModelConfig, rows: int, columns: int, seed: int = 0) -> Canvas:
    """Random prompts (each row seven columns shorter than the one above) and masked answers."""
    generated = generated_part(columns)
    rng = np.random.default_rng(seed)
    ordinary = min(config.vocab_size, config.mask_id)
    tokens = rng.integers(0, ordinary, (rows, columns)).astype(np.int32)
    tokens[:, columns - generated :] = config.mask_id
    valid_from = (7 * np.arange(rows)).astype(np.int32)
    positions = np.maximum(np.arange(columns)[None, :] - valid_from[:, None], 0)
    valid_to = np.full(rows, columns, np.int32)
    return Canvas(tokens, positions.astype(np.int32), valid_from, valid_to)


def middle_block(canvas: Canvas) -> Int:
    """A block in the middle of the generated part: int32 [B, 32]."""
    rows, columns = canvas.tokens.shape
    generated = generated_part(columns)
    first = columns - generated + generated // (2 * BLOCK) * BLOCK
    return np.tile(np.arange(first, first + BLOCK, dtype=np.int32), (rows, 1))


def greedy(config: ModelConfig, rows: int, step: int = 0) -> Sampling:
    """Sampling inputs of a greedy step."""
    return Sampling(
        temperature=np.zeros(rows, np.float32),
        seed=np.zeros(rows, np.int32),
        step=np.full(rows, step, np.int32),
        guide_row=np.arange(rows, dtype=np.int32),
        cfg_scale=np.zeros(rows, np.float32),
        suppress_ids=np.full((rows, 1), config.mask_id, np.int32),
        confidence_exclude_ids=np.full((rows, 1), -1, np.int32),
    )


def block_tokens(canvas: Canvas, columns: Int, config: ModelConfig, seed: int) -> Int:
    """The block with a random half of its positions committed to random tokens."""
    rng = np.random.default_rng(seed)
    tokens = np.full(columns.shape, config.mask_id, np.int32)
    chosen = rng.random(columns.shape) < 0.5
    drawn = rng.integers(0, min(config.vocab_size, config.mask_id), columns.shape)
    tokens[chosen] = drawn[chosen]
    return tokens
