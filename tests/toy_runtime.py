"""A model in twelve lines and the shortest runtime that can drive the policies with it.

The toy engine computes its outputs in float32 from float64 logits, row by row, so that policies
and row bookkeeping can be compared with `reference_decoding` without any graph.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lacache_trt.decoding import rows
from lacache_trt.decoding.draws import gumbel
from lacache_trt.decoding.policy import StepView
from lacache_trt.decoding.registry import build_policy
from lacache_trt.decoding.selection import require_finite
from lacache_trt.engines.base import Canvas, StepOutputs
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import ModelConfig
from lacache_trt.plugins.sample_block.noise import gumbel_bits

VOCAB = 23
MODEL = ModelConfig(
    family="llada",
    hidden_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=8,
    vocab_size=VOCAB,
    rope_theta=1e4,
    norm_eps=1e-5,
    max_length=256,
    qkv_bias=False,
    tied_head=False,
    logit_shift=False,
    mask_id=VOCAB - 1,
    eos_ids=(VOCAB - 2, VOCAB - 3),
    dtype="float32",
)


class ToyModel:
    """Logits that depend on every token and on the position; no two are alike."""

    def __init__(self, seed: int, scale: float = 6.0) -> None:
        rng = np.random.default_rng(seed)
        self._embed = rng.standard_normal((VOCAB, 8))
        self._places = rng.standard_normal((256, 8))
        self._head = rng.standard_normal((8, VOCAB)) * scale / 3

    def predict(self, tokens: list[int]) -> NDArray[np.float64]:
        """Unshifted logits of one unpadded row: float64 [N, V]."""
        x = self._embed[tokens] + self._places[: len(tokens)]
        around = np.tanh(x).mean(axis=0) * 4
        logits: NDArray[np.float64] = np.tanh(x + around) @ self._head
        return logits

    def predict_shifted(self, tokens: list[int]) -> NDArray[np.float64]:
        """The same, each position predicted by its left neighbour (Dream)."""
        raw = self.predict(tokens)
        return np.concatenate([raw[:1], raw[:-1]])


def block_logits(
    toy: ToyModel, canvas: Canvas, columns: NDArray[np.int32], shift: bool
) -> NDArray[np.float32]:
    """Logits float32 [B, R, V] that predict the canvas columns [B, R]."""
    predict = toy.predict_shifted if shift else toy.predict
    found = []
    for tokens, start, wanted in zip(canvas.tokens, canvas.valid_from, columns, strict=True):
        found.append(predict(tokens[start:].tolist())[wanted - start])
    return np.array(found, np.float32)


def sample(
    logits: NDArray[np.float32],
    positions: NDArray[np.int32],
    seed: NDArray[np.int64],
    step: NDArray[np.int32],
    config: GenerationConfig,
) -> StepOutputs:
    """What an engine's sampler returns, in float32."""
    scores = logits.copy()
    scores[..., list(rows.suppressed_ids(config, MODEL))] = -np.inf
    ids = np.arange(VOCAB)
    bits = gumbel_bits(seed[:, None, None], step[:, None, None], positions[:, :, None], ids)
    noise = gumbel(bits).astype(np.float32)
    token = (scores + np.float32(config.temperature) * noise).argmax(-1).astype(np.int32)
    scores[..., list(rows.confidence_excluded_ids(config, MODEL))] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    best = np.sort(p, axis=-1)
    log_p = np.log(np.where(p > 0, p, 1))
    confidence = np.take_along_axis(p, token[..., None], -1)[..., 0]
    return StepOutputs(
        token, confidence, best[..., -1] - best[..., -2], (p * log_p).sum(-1), logits
    )


def _view(
    outputs: StepOutputs,
    masked: NDArray[np.bool_],
    positions: NDArray[np.int32],
    counters: tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]],
    config: GenerationConfig,
) -> StepView:
    """A step as the policy sees it; the counters are seed, step and step in block."""
    seed, step, in_block = counters
    return StepView(
        masked=masked,
        token=outputs.token,
        confidence=outputs.confidence,
        margin=outputs.margin,
        neg_entropy=outputs.neg_entropy,
        logits=outputs.logits,
        positions=positions,
        seed=seed,
        step=step,
        step_in_block=in_block,
        masked_at_start=np.full(len(seed), config.block_length, np.int32),
        steps_per_block=config.steps_per_block,
        suppress_ids=rows.suppressed_ids(config, MODEL),
    )


def generate(
    toy: ToyModel, prompts: list[list[int]], config: GenerationConfig, *, shift: bool = False
) -> list[list[int]]:
    """Decode a batch; rows move on to their next block as soon as their own block is done."""
    batch = len(prompts)
    canvas = rows.pad_left([tuple(prompt) for prompt in prompts], config.gen_length, MODEL)
    policy = build_policy(config)
    seed = np.array(config.row_seeds(batch), np.int64)
    step, block, in_block = (np.zeros(batch, np.int32) for _ in range(3))
    done = np.zeros(batch, np.bool_)
    while not done.all():
        columns = rows.columns_of_blocks(block, canvas.tokens.shape[1], config)
        twice, guide_row = rows.add_guidance_rows(canvas, config.gen_length, MODEL.mask_id)
        logits = block_logits(toy, twice, np.tile(columns, (2, 1)), shift)
        scale = np.full(2 * batch, config.cfg_scale, np.float32)
        if config.cfg_scale:
            logits = rows.mix_guidance(logits, guide_row, scale)
        logits = logits[:batch]
        positions = np.take_along_axis(canvas.positions, columns, axis=1)
        outputs = sample(logits, positions, seed, step, config)
        require_finite(outputs, ~done)
        inside = np.take_along_axis(canvas.tokens, columns, axis=1) == MODEL.mask_id
        view = _view(outputs, inside & ~done[:, None], positions, (seed, step, in_block), config)
        if not policy.needs_logits:
            view = replace(view, logits=None)
        commit = policy(view)
        tokens = canvas.tokens.copy()
        for row, place in np.argwhere(commit.selected):
            tokens[row, columns[row, place]] = commit.token[row, place]
        canvas = replace(canvas, tokens=tokens)
        step, in_block = step + 1, in_block + 1  # new arrays: the view keeps the old ones
        for row in np.flatnonzero(~done):
            decoded = tokens[row, columns[row]]
            if (decoded == MODEL.mask_id).any():
                continue
            block[row], in_block[row] = block[row] + 1, 0
            if config.stop_at_eos and np.isin(decoded, MODEL.eos_ids).any():
                tokens[row, columns[row, -1] + 1 :] = MODEL.eos_ids[0]
                block[row] = config.num_blocks
            if block[row] == config.num_blocks:
                done[row], block[row] = True, 0
    return [row.tolist() for row in canvas.tokens[:, -config.gen_length :]]
