"""Host microseconds of a denoising step: what the processor does while no device works.

    python3 benchmarks/run_from_checkout.py benchmarks/host_time.py

The CUDA engine's sessions, lanes and staging and the runtime's batch and policy are the real ones;
streams, events and graphs do nothing and predictions are drawn once, so no GPU is needed and a
step's whole time is the host's. What the driver takes to launch a graph is not in it.
    engine    `CudaSession.window` or `reuse` alone, on inputs made before
    decode    the whole loop of `Runtime`: batch, engine, policy, events
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from llada_shape import BLOCK, LLADA_8B, block_tokens, greedy, masked_canvas, middle_block
from result_file import write_result
from torch import Tensor

from lacache_trt.engines.cuda import engine as engine_module
from lacache_trt.engines.cuda import lane as lane_module
from lacache_trt.engines.cuda.engine import CudaEngine
from lacache_trt.engines.cuda.gemm import GemmTable
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import parameter_shapes
from lacache_trt.runtime import Runtime

CONFIG = replace(
    LLADA_8B, hidden_size=64, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=64,
    intermediate_size=64, dtype="float32",
)  # fmt: skip
COLUMNS = 1152


class Idle:
    """A stream, an event or a graph that has nothing to do."""

    device = torch.device("cpu")

    def __init__(self, *arguments: object, **settings: object) -> None:
        """Whatever it is made of."""

    def synchronize(self) -> None:
        """Return at once."""

    def wait_stream(self, other: object) -> None:
        """Return at once."""

    def record(self, stream: object = None) -> None:
        """Return at once."""

    def replay(self) -> None:
        """Return at once."""

    def elapsed_time(self, other: object) -> float:
        """Nothing took any time."""
        return 0.0


def _captured(calls: Sequence[Callable[[], object]], *_: object) -> Idle:
    for call in calls:
        call()
    return Idle()


def _predict(lane: Any, key: tuple[str, int]) -> None:
    """Random predictions, as many as the step has block columns."""
    generator = torch.Generator().manual_seed(1)
    shape = (lane.shape.rows, lane.shape.block)
    token = torch.randint(0, 1000, shape, generator=generator, dtype=torch.int32)
    scores = [torch.rand(shape, generator=generator) for _ in range(3)]
    lane._download(key, (token, *scores, torch.zeros(lane.shape.rows, 0, 1)))


def install() -> None:
    """Replace the device's side of the engine."""
    replacements = {
        "Stream": Idle,
        "Event": Idle,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: Idle(),
        "set_stream": lambda stream: None,
        "is_available": lambda: True,
        "get_device_name": lambda: "no device",
        "empty_cache": lambda: None,
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: None,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)
    lane: Any = lane_module.Lane
    lane_module.capture = _captured
    engine_module._free_bytes = lambda: 1 << 40
    lane._run_fill = lambda self: None
    lane._run_reuse = lambda self, name, read: _predict(self, (name, read))
    lane._run_plain = lambda self, read: _predict(self, ("plain", read))
    lane._run_window = lambda self, key: _predict(self, key)


def weights() -> dict[str, Tensor]:
    """Weights that nothing reads."""
    return {name: torch.zeros(shape) for name, shape in parameter_shapes(CONFIG).items()}


def microseconds(
    call: Callable[[], object], repeats: int, of: Callable[[list[float]], float] = median
) -> float:
    """Median of one call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e6)
    return of(times)


def engine_times(engine: CudaEngine, rows: int, repeats: int) -> dict[str, float]:
    """A window of the block, one of block and suffix, and a step over the exact caches."""
    canvas = masked_canvas(CONFIG, rows, COLUMNS)
    block = middle_block(canvas)
    session, sampling = engine.session(), greedy(CONFIG, rows)
    session.fill(canvas, block)
    tokens = block_tokens(canvas, block, CONFIG, 0)
    session.reuse_kv(tokens, sampling)
    wide = np.tile(np.arange(int(block[0, 0]), COLUMNS, dtype=np.int32), (rows, 1))
    held = np.take_along_axis(canvas.tokens, wide, axis=1)
    calls: dict[str, Callable[[], object]] = {
        "window": lambda: session.window(tokens, block, block, sampling),
        "window_suffix": lambda: session.window(held, wide, block, sampling),
        "reuse": lambda: session.reuse(tokens, sampling),
    }
    found = {name: microseconds(call, repeats) for name, call in calls.items()}
    session.close()
    return found


def decode_time(engine: CudaEngine, rows: int, cache: str, repeats: int) -> float:
    """Microseconds of a step of a whole generation that commits one token at every step.

    The fastest of the generations: another process disturbs nearly every one.
    """
    config = GenerationConfig(
        gen_length=256, block_length=BLOCK, steps=256, policy="threshold", threshold=1.5,
        cache=cache, stop_at_eos=True,  # type: ignore[arg-type]
    )  # fmt: skip
    runtime, prompt = Runtime(engine), [list(range(5, 133)) for _ in range(rows)]

    def run() -> None:
        runtime.generate(prompt, config)

    return microseconds(run, repeats, min) / 256


def main() -> int:
    """Measure both, for one row and for eight."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    arguments = parser.parse_args()
    install()
    metrics: dict[str, float] = {}
    engine = CudaEngine(CONFIG, weights(), GemmTable({}))
    for rows in arguments.rows:
        for name, took in engine_times(engine, rows, arguments.repeats).items():
            metrics[f"host.engine_us.{name}.b{rows}"] = took
        for cache in ("dual", "prefix", "exact"):
            took = decode_time(engine, rows, cache, 1 + arguments.repeats // 80)
            metrics[f"host.decode_us.{cache}.b{rows}"] = took
    for name, value in metrics.items():
        print(f"{name} = {value:.1f}")
    write_result("host_time", "cpu", metrics, {"block": BLOCK, "columns": COLUMNS})
    return 0


if __name__ == "__main__":
    sys.exit(main())
