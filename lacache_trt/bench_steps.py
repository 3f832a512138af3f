"""How long each graph of an engine takes: fill, reuse and plain, median of many single calls.

`bench` decodes whole answers; this times the calls behind them on one random canvas whose middle
block is being denoised. Wall-clock time is what a caller waits; an engine that can also says what
the device needed, and the floor below which a step of this size cannot go with its libraries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Protocol, runtime_checkable

import numpy as np

import lacache_trt
from lacache_trt.batch import Batch
from lacache_trt.bench import WHOLE_ANSWERS, machine_facts, random_prompts, workload_facts
from lacache_trt.bench_report import BenchSettings, GraphTiming, StepReport
from lacache_trt.decoding.registry import build_policy
from lacache_trt.decoding.rows import check_prompt
from lacache_trt.engines.base import Session
from lacache_trt.generation import GenerationConfig
from lacache_trt.progress import Progress, SilentProgress
from lacache_trt.runtime import Runtime

CALLS_PER_REPEAT = 10


@runtime_checkable
class TimedOnDevice(Protocol):
    """A session that can time its graphs with device events."""

    def milliseconds(self, graph: str, replays: int) -> list[float]:
        """Device milliseconds of each replay of a graph that has run."""


@runtime_checkable
class HasFloor(Protocol):
    """An engine that can measure the floor of a step."""

    def floor_milliseconds(self, rows: int, columns: int, block: int, repeats: int) -> float:
        """Milliseconds of the matrix products and the attention alone."""


@dataclass(frozen=True)
class _Walls:
    """Wall-clock milliseconds of single calls."""

    fill: list[float]
    reuse: list[float]
    plain: list[float]

    def graphs(self) -> dict[str, list[float]]:
        """By graph, without those that the engine does not have."""
        return {name: times for name, times in vars(self).items() if times}


def bench_steps(
    directory: Path,
    settings: BenchSettings | None = None,
    config: GenerationConfig | None = None,
    progress: Progress | None = None,
) -> StepReport:
    """Time fill, reuse and, where the engine in `directory` has it, plain."""
    settings, progress = settings or BenchSettings(), progress or SilentProgress()
    config = replace(config or GenerationConfig(), **WHOLE_ANSWERS)  # type: ignore[arg-type]
    calls = CALLS_PER_REPEAT * settings.repeats
    with Runtime.load(directory) as runtime:
        engine = runtime.engine
        prompts = [
            check_prompt(prompt, engine.config, config.gen_length)
            for prompt in random_prompts(engine.config, settings)
        ]
        batch = Batch(prompts, config, engine.config, build_policy(config))
        session = engine.session()
        progress.start("steps", settings.warmup + calls)
        has_plain = "none" in engine.capabilities.caches
        walls = _measure(session, batch, settings.warmup, calls, has_plain, progress)
        device = _device_milliseconds(session, calls, walls.graphs())
        held = session.cache_bytes()
        session.close()
        floor = None
        if isinstance(engine, HasFloor):
            columns = settings.prompt_length + config.gen_length
            floor = engine.floor_milliseconds(settings.batch, columns, config.block_length, calls)
        name, on = engine.name, engine.device
    timings = tuple(
        GraphTiming(
            graph=graph,
            wall_ms=median(times),
            wall_ms_p95=float(np.percentile(times, 95)),
            device_ms=device.get(graph),
            floor_ms=floor if graph == "reuse" else None,
        )
        for graph, times in walls.graphs().items()
    )
    workload = workload_facts(settings, config)
    version = lacache_trt.__version__
    skipped = () if has_plain else ("plain",)
    return StepReport(name, on, version, machine_facts(), workload, held, timings, skipped)


def _measure(
    session: Session, batch: Batch, warmup: int, calls: int, has_plain: bool, progress: Progress
) -> _Walls:
    """A fill may return before the device is done, so it is timed with the step behind it."""
    canvas, columns = batch.regroup()
    tokens, sampling = batch.block_tokens(), batch.sampling()
    walls = _Walls([], [], [])

    def first_step() -> None:
        session.fill(canvas, columns)
        session.reuse(tokens, sampling)

    for call in range(warmup + calls):
        both = _milliseconds(first_step)
        reuse = _milliseconds(lambda: session.reuse(tokens, sampling))
        plain = []
        if has_plain:
            plain = [_milliseconds(lambda: session.plain(canvas, columns, sampling))]
        progress.advance()
        if call >= warmup:
            walls.fill.append(max(0.0, both - reuse))
            walls.reuse.append(reuse)
            walls.plain.extend(plain)
    return walls


def _device_milliseconds(session: Session, calls: int, graphs: Iterable[str]) -> dict[str, float]:
    if not isinstance(session, TimedOnDevice):
        return {}
    return {graph: median(session.milliseconds(graph, calls)) for graph in graphs}


def _milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3
