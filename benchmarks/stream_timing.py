"""How one answer with simulated acceptance is timed; see `stream_simulated`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from llada_shape import BLOCK
from stream_script import EagerStream, Script, ScriptedEngine, as_engine

from lacache_trt.engines.cuda import lane as lane_module
from lacache_trt.engines.cuda.capture import replay_milliseconds
from lacache_trt.engines.cuda.engine import CudaEngine
from lacache_trt.engines.cuda.lane import window_name
from lacache_trt.engines.windows import window_bucket
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import ModelConfig
from lacache_trt.runtime import Runtime

LABEL = "[simulated acceptance]"


@dataclass(frozen=True)
class Sizes:
    """Prompt, generated lengths and the answer of the long case."""

    prompt: int = 128
    short: int = 256
    long: int = 2048
    answer: int = 106
    rates: tuple[float, ...] = (1.0, 2.0, 3.3, 8.0)
    rate: float = 3.3


TOY = Sizes(prompt=8, short=64, long=160, answer=40, rates=(1.0, 3.3))


@dataclass
class Stream:
    """What the measurements share, and what they find."""

    config: ModelConfig
    sizes: Sizes
    engines: dict[str, CudaEngine]
    eager: EagerStream
    deadline: float
    metrics: dict[str, float] = field(default_factory=dict)
    details: dict[str, object] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def in_time(self, name: str) -> bool:
        """Whether a measurement may still begin; else it is listed."""
        if time.perf_counter() < self.deadline:
            return True
        self.left_out.append(name)
        return False

    def prompt(self) -> list[int]:
        """Random ordinary tokens."""
        ordinary = min(self.config.vocab_size, self.config.mask_id, self.config.eos_ids[0])
        return np.random.default_rng(0).integers(0, ordinary, self.sizes.prompt).tolist()


def settings(gen_length: int, **changed: Any) -> GenerationConfig:
    """Threshold decoding with the dual cache."""
    values: dict[str, Any] = {"policy": "threshold", "cache": "dual", "stop_at_eos": True}
    return GenerationConfig(
        gen_length=gen_length, block_length=BLOCK, steps=gen_length, **(values | changed)
    )


def timed(run: Callable[[], object], repeats: int, *, warm_up: bool = True) -> float:
    """Median seconds, after one run that captures its graphs."""
    if warm_up:
        run()
    times = []
    for _ in range(repeats):
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return median(times)


def device_seconds(engine: ScriptedEngine, runs: int) -> float:
    """Seconds of a run's graphs alone, each replayed without anything between.

    0 where there are none.
    """
    total = 0.0
    for (identity, name), count in engine.calls.items():
        lane: Any = engine.lanes[identity]
        if name.startswith("window-"):
            block = lane.shape.block
            name = window_name(window_bucket(int(name[7:]), block), block)
        graph = lane._graphs[name, 0]
        if isinstance(graph, Uncaptured):
            return 0.0
        total += count / runs * median(replay_milliseconds(graph, lane._stream, 3, 1)) / 1e3
    return total


def measure(
    stream: Stream,
    name: str,
    engine: CudaEngine,
    config: GenerationConfig,
    rate: float,
    answer: int,
    repeats: int = 3,
) -> dict[str, float]:
    """One answer through the real runtime: seconds, tokens a second, milliseconds a step."""
    script = Script(stream.config, rate, answer)
    scripted = ScriptedEngine(engine, script, stream.sizes.prompt)
    runtime, prompt = Runtime(as_engine(scripted)), stream.prompt()
    result: Any = None

    def run() -> None:
        nonlocal result
        result = runtime.generate(prompt, config)

    seconds = timed(run, repeats)
    device = device_seconds(scripted, repeats + 1)
    found = {
        "seconds": seconds,
        "tok_s": min(answer, config.gen_length) / seconds,
        "forwards": float(result.forwards),
        "tokens_per_forward": result.tokens_per_forward,
        "ms_per_forward": 1e3 * seconds / result.forwards,
        "host_share": 1 - device / seconds if device else float("nan"),
    }
    print(
        f"{LABEL} {name}: {found['tok_s']:.1f} tok/s, {1e3 * seconds:.1f} ms for "
        f"{result.forwards} forwards ({result.tokens_per_forward:.2f} tokens each), "
        f"{found['ms_per_forward']:.2f} ms a forward, host {100 * found['host_share']:.1f}%",
        flush=True,
    )
    return found


def measure_eager(
    stream: Stream, name: str, config: GenerationConfig, rate: float, answer: int
) -> dict[str, float]:
    """The same over the plain eager forward."""
    script = Script(stream.config, rate, answer)
    prompt = stream.prompt()
    seconds = timed(lambda: stream.eager.run(prompt, config, script), 1, warm_up=False)
    tok_s = min(answer, config.gen_length) / seconds
    print(
        f"{LABEL} {name}: {tok_s:.1f} tok/s, {1e3 * seconds:.1f} ms for {script.forwards} forwards",
        flush=True,
    )
    return {"seconds": seconds, "tok_s": tok_s, "forwards": float(script.forwards)}


def print_ratios(found: dict[str, float]) -> None:
    """The ratios of a measurement, in a line."""
    ratios = ", ".join(f"{k} {v:.2f} x" for k, v in found.items() if k.startswith("over_"))
    print(f"{LABEL}     {ratios}", flush=True)


class Uncaptured:
    """What a lane takes for a graph: the same launches again, from Python."""

    def __init__(self, calls: Sequence[Callable[[], object]], *_: object) -> None:
        self._calls = calls

    def replay(self) -> None:
        """Launch everything."""
        with torch.inference_mode():
            for call in self._calls:
                call()


@contextmanager
def uncaptured() -> Iterator[None]:
    """Lanes made meanwhile launch their kernels one by one."""
    module: Any = lane_module
    captured, module.capture = module.capture, Uncaptured
    try:
        yield
    finally:
        module.capture = captured
