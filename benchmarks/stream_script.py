"""Simulated acceptance: who decides what a step commits when the weights are random.

Random weights are never confident and never end an answer. `Script` says instead how many positions
each step commits and where the answer ends; the forwards themselves are run in full.
`ScriptedEngine` puts it between any engine and the runtime: tokens and confidences of a step are
replaced after the device has computed them, everything else of the decoding loop is the real one.
`EagerStream` drives transformers' Llama by the same script, with the same accelerators written out
plainly: a full forward when a block begins that keeps K and V of every layer, then forwards of the
block's rows alone over them (Fast-dLLM's dual cache), suffix columns left out with true positions
(DPad), a stop behind the block that holds an end token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from lacache_trt.decoding.suffix import kept_distances
from lacache_trt.engines.base import Canvas, Engine, Int, Sampling, StepOutputs
from lacache_trt.engines.cuda.engine import CudaEngine
from lacache_trt.engines.cuda.session import CudaSession
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import ModelConfig

SURE, UNSURE = 0.99, 0.01


@dataclass
class Script:
    """How fast an answer is accepted, and how long it is.

    Attributes:
        per_forward: tokens that a forward commits on average, as far as its block has masks.
        answer: tokens before the first end token; the answer's end is never seen beyond.
    """

    config: ModelConfig
    per_forward: float
    answer: int
    forwards: int = 0
    committed: int = 0

    def begin(self) -> None:
        """A new answer."""
        self.forwards = self.committed = 0

    def choose(self, tokens: Int, places: Int) -> tuple[Int, Int]:
        """Indices of the masks [K] to commit from a block [Bk], and the predictions [Bk].

        `places` [Bk] are positions in the answer.
        """
        self.forwards += 1
        owed = int(self.per_forward * self.forwards + 1e-9) - self.committed
        chosen = np.flatnonzero(tokens == self.config.mask_id)[: max(1, owed)]
        self.committed += len(chosen)
        ordinary = min(self.config.vocab_size, self.config.mask_id, self.config.eos_ids[0])
        predicted = np.where(places < self.answer, places % ordinary, self.config.eos_ids[0])
        return chosen, predicted.astype(np.int32)


@dataclass
class ScriptedEngine:
    """An engine for one row whose predictions follow a script; it counts what it runs."""

    inner: CudaEngine
    script: Script
    prompt: int
    calls: Counter[tuple[int, str]] = field(default_factory=Counter)
    lanes: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name, self.device = self.inner.name, self.inner.device
        self.config, self.capabilities = self.inner.config, self.inner.capabilities

    def session(self) -> ScriptedSession:
        """A session; the script begins anew."""
        self.script.begin()
        return ScriptedSession(self, self.inner.session())

    def close(self) -> None:
        """The real engine belongs to whoever opened it."""

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ScriptedSession:
    """See `ScriptedEngine`."""

    def __init__(self, engine: ScriptedEngine, inner: CudaSession) -> None:
        self._engine, self._inner = engine, inner
        self._block: Int = np.zeros((1, 0), np.int32)

    def fill(self, canvas: Canvas, block_columns: Int) -> None:
        """Run it and remember the block."""
        self._block = block_columns
        self._inner.fill(canvas, block_columns)
        self._count("fill")

    def reuse(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """One step over the caches."""
        outputs = self._inner.reuse(block_tokens, sampling, logit_columns)
        return self._follow("reuse", outputs, block_tokens, self._block)

    def reuse_kv(
        self, block_tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """One step that keeps K and V."""
        outputs = self._inner.reuse_kv(block_tokens, sampling, logit_columns)
        return self._follow("reuse_kv", outputs, block_tokens, self._block)

    def window(
        self,
        window_tokens: Int,
        window_columns: Int,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """One step of a window."""
        given = (window_tokens, window_columns, block_columns, sampling, logit_columns)
        outputs = self._inner.window(*given)
        tokens = np.take_along_axis(window_tokens, block_columns - window_columns[:, :1], axis=1)
        return self._follow(f"window-{window_columns.shape[1]}", outputs, tokens, block_columns)

    def plain(
        self,
        canvas: Canvas,
        block_columns: Int,
        sampling: Sampling,
        logit_columns: Int | None = None,
    ) -> StepOutputs:
        """One step without caches."""
        outputs = self._inner.plain(canvas, block_columns, sampling, logit_columns)
        tokens = np.take_along_axis(canvas.tokens, block_columns, axis=1)
        return self._follow("plain", outputs, tokens, block_columns)

    def cache_bytes(self) -> int:
        """Bytes of the real session."""
        return self._inner.cache_bytes()

    def close(self) -> None:
        """Close the real session."""
        self._inner.close()

    def _follow(self, graph: str, outputs: StepOutputs, tokens: Int, columns: Int) -> StepOutputs:
        self._count(graph)
        chosen, predicted = self._engine.script.choose(tokens[0], columns[0] - self._engine.prompt)
        confidence = np.full(tokens.shape, UNSURE, np.float32)
        confidence[0, chosen] = SURE
        return replace(outputs, token=predicted[None], confidence=confidence)

    def _count(self, graph: str) -> None:
        lane = self._inner._lane
        self._engine.lanes[id(lane)] = lane
        self._engine.calls[id(lane), graph] += 1


class EagerStream:
    """The accelerators over transformers' Llama in eager PyTorch, for one row."""

    def __init__(self, network: nn.Module, config: ModelConfig) -> None:
        self._network: Any = network
        self._config = config
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._device = next(network.parameters()).device

    @torch.no_grad()
    def run(self, prompt: list[int], settings: GenerationConfig, script: Script) -> int:
        """Decode an answer; returns its forwards."""
        script.begin()
        start, size = len(prompt), settings.block_length
        tokens = prompt + [self._config.mask_id] * settings.gen_length
        x = torch.tensor([tokens], device=self._device)
        for block in range(settings.num_blocks):
            first = start + block * size
            columns = torch.from_numpy(self._columns(settings, block, first + size))
            self._block(x, columns.to(self._device), first, size, start, script)
            if settings.stop_at_eos and bool((x[0, first : first + size] == self._eos()).any()):
                break
        return script.forwards

    def _eos(self) -> int:
        return self._config.eos_ids[0]

    def _columns(self, settings: GenerationConfig, block: int, end: int) -> np.ndarray:
        return np.concatenate([np.arange(end), end + kept_distances(settings, block)])

    def _block(
        self, x: Tensor, columns: Tensor, first: int, size: int, start: int, script: Script
    ) -> None:
        """Denoise one block in place: a full forward, then forwards of its rows."""
        own = torch.arange(first, first + size, device=self._device)
        whole = True
        while True:
            held = x[0, first : first + size].cpu().numpy()
            if not (held == self._config.mask_id).any():
                return
            run = columns if whole else own
            self._sample(self._forward(x[:, run], run[None], None if whole else first))
            chosen, predicted = script.choose(held, np.arange(first - start, first - start + size))
            at = torch.from_numpy(chosen + first).to(self._device)
            x[0, at] = torch.from_numpy(predicted[chosen].astype(np.int64)).to(self._device)
            whole = False

    def _sample(self, logits: Tensor) -> None:
        """What the reference samplers compute of every row that ran."""
        x0 = torch.argmax(logits, dim=-1)
        p = torch.softmax(logits.to(torch.float64), dim=-1)
        torch.gather(p, dim=-1, index=x0[..., None])

    def _forward(self, tokens: Tensor, positions: Tensor, first: int | None) -> Tensor:
        """Logits [1, M, V]; rows from column `first` on over the kept K and V, or all rows."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        model = self._network.model
        hidden = model.embed_tokens(tokens)
        cos, sin = model.rotary_emb(hidden, positions)
        kept = []
        for index, layer in enumerate(model.layers):
            attention, x = layer.self_attn, layer.input_layernorm(hidden)
            shape = (1, x.shape[1], -1, self._config.head_dim)
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            q, k, v = (each(x).view(shape).transpose(1, 2) for each in projections)
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            if first is not None:
                keys, values = self._kept[index]
                keys[:, :, first : first + k.shape[2]] = k
                values[:, :, first : first + k.shape[2]] = v
                k, v = keys, values
            kept.append((k, v))
            mixed = scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
            hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self._kept = kept
        logits: Tensor = self._network.lm_head(model.norm(hidden))
        return logits


def as_engine(engine: ScriptedEngine) -> Engine:
    """For the runtime, which asks for the protocol."""
    return engine  # type: ignore[return-value]
