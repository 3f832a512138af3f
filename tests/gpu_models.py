"""Random models on the GPU: the engine, and the module in float64 or in the engine's dtype."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace

import numpy as np
import torch
from canvases import Shape, arrays, block_tokens, greedy
from numpy.typing import NDArray
from torch import Tensor

from lacache_trt.contract import cache_specs
from lacache_trt.engines.base import Canvas, Int, Sampling, StepOutputs
from lacache_trt.engines.cuda.engine import CudaEngine
from lacache_trt.engines.cuda.gemm import GemmTable
from lacache_trt.model.config import ModelConfig, parameter_shapes
from lacache_trt.model.ops import TorchOps
from lacache_trt.model.programs import FillProgram, PlainProgram, ReuseProgram
from lacache_trt.model.transformer import Transformer

DEVICE = "cuda"
GROUPED = ModelConfig(
    family="llada",
    hidden_size=256,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=384,
    vocab_size=1008,
    rope_theta=500000.0,
    norm_eps=1e-5,
    max_length=4096,
    qkv_bias=False,
    tied_head=False,
    logit_shift=False,
    mask_id=1000,
    eos_ids=(1001,),
    dtype="bfloat16",
)
CONFIGS = {
    "grouped": GROUPED,
    "wide_heads": replace(GROUPED, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=128),
    "dream": replace(
        GROUPED, family="dream", num_kv_heads=1, qkv_bias=True, logit_shift=True, vocab_size=1009
    ),
    "one_layer": replace(GROUPED, num_layers=1),
}
SHAPES = {
    "bucket": Shape(128, 32, (64,), (0,), (128,), 1),
    "bucket_minus_one": Shape(127, 32, (95,), (0,), (127,), 2),
    "padded_rows": Shape(200, 32, (168, 100, 60), (0, 7, 51), (200, 200, 190), 3),
    "odd_block": Shape(333, 17, (301, 150), (3, 0), (333, 333), 4),
    "no_prompt": Shape(64, 32, (0,), (0,), (64,), 5),
    "block_of_one": Shape(65, 1, (64,), (64,), (65,), 6),
    "long": Shape(1000, 64, (500, 936), (0, 400), (1000, 1000), 7),
}


def random_weights(
    config: ModelConfig, dtype: torch.dtype, seed: int = 0, head: float = 10.0
) -> dict[str, Tensor]:
    """Unit gain per linear, logits of deviation `head`, scores of deviation about 3."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    found = {}
    for name, shape in parameter_shapes(config).items():
        kind = name.split(".")[-2]
        scale = {"embed": 0.2, "head": head * shape[0] ** -0.5}.get(kind, shape[0] ** -0.5)
        scale = 0.3 if name.endswith(".bias") else scale
        values = torch.randn(shape, generator=generator, device=DEVICE)
        values = 1 + 0.1 * values if len(shape) == 1 and scale != 0.3 else values * scale
        if kind in ("qkv", "q", "kv") and len(shape) == 2:
            sizes = {"qkv": config.query_size + config.kv_size, "q": config.query_size}
            values[:, : sizes.get(kind, config.kv_size)] *= 1.7
        found[name] = values.to(dtype)
    return found


def engine_of(config: ModelConfig, weights: dict[str, Tensor]) -> CudaEngine:
    """The engine over these weights."""
    return CudaEngine(config, weights, GemmTable({}))


class DeviceSession:
    """A `Session` over the module with plain torch operators, on the weights' device."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        with torch.device("meta"):
            self._model = Transformer(config, TorchOps(), dtype)
        for name, value in weights.items():
            parameter = torch.nn.Parameter(value.to(dtype), requires_grad=False)
            self._model.weights[name.replace(".", "/")] = parameter
        self.caches: tuple[Tensor, ...] = ()
        self._geometry: tuple[Tensor, ...] = ()

    def fill(self, canvas: Canvas, block_columns: Int) -> None:
        """Compute the caches."""
        tokens, *ranges, columns = _on_device(*vars(canvas).values(), block_columns)
        with torch.inference_mode():
            self.caches = FillProgram(self._model)(tokens, *ranges, columns)
        self._geometry = (columns, *ranges)

    def reuse(
        self, tokens: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """One step over the caches."""
        inputs = (*_on_device(tokens), *self._geometry, *self.caches)
        return self._step(ReuseProgram(self._model), inputs, sampling, logit_columns)

    def plain(
        self, canvas: Canvas, columns: Int, sampling: Sampling, logit_columns: Int | None = None
    ) -> StepOutputs:
        """One step without caches."""
        inputs = _on_device(*vars(canvas).values(), columns)
        return self._step(PlainProgram(self._model), inputs, sampling, logit_columns)

    def cache_arrays(self) -> dict[str, NDArray[np.float64]]:
        """The caches by name."""
        names = [spec.name for spec in cache_specs(self._model.config, "bfloat16")]
        return {n: c.double().cpu().numpy() for n, c in zip(names, self.caches, strict=True)}

    def _step(
        self,
        program: torch.nn.Module,
        inputs: tuple[Tensor, ...],
        sampling: Sampling,
        logit_columns: Int | None,
    ) -> StepOutputs:
        if logit_columns is None:
            logit_columns = np.zeros((len(sampling.seed), 0), np.int32)
        extra = _on_device(*vars(sampling).values(), logit_columns)
        with torch.inference_mode():
            outputs = program(*inputs, *extra)
        return StepOutputs(*(value.cpu().numpy() for value in outputs))


def step_digest(config: ModelConfig, dtype: torch.dtype, shape: Shape) -> str:
    """SHA-256 of every output of a reuse step of a fresh engine."""
    with engine_of(config, random_weights(config, dtype)) as engine:
        session = engine.session()
        canvas, columns = shape.canvas(config), shape.block_columns
        session.fill(canvas, columns)
        tokens = block_tokens(canvas, columns)
        return outputs_digest(session.reuse(tokens, greedy(shape.rows, config), columns))


def outputs_digest(outputs: StepOutputs) -> str:
    """SHA-256 of all arrays of a step."""
    digest = hashlib.sha256()
    for value in arrays(outputs).values():
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


def _on_device(*values: NDArray[np.generic]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(value)).to(DEVICE) for value in values)


if __name__ == "__main__":
    print(step_digest(CONFIGS[sys.argv[1]], getattr(torch, sys.argv[2]), SHAPES[sys.argv[3]]))
