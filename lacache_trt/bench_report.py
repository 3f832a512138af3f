"""The workload of a benchmark and its result. Imports nothing heavy: the flags come from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from lacache_trt.errors import InvalidRequestError
from lacache_trt.generation import Cache
from lacache_trt.validation import Interval, check_choice, check_integer


@dataclass(frozen=True)
class BenchSettings:
    """The workload.

    Attributes:
        caches: caches to compare, for example `none,exact`.
        batch: rows decoded together.
        prompt_length: tokens of each prompt.
        repeats: timed runs of each cache.
        warmup: runs before them.
    """

    caches: str = "none,exact"
    batch: int = 1
    prompt_length: int = 128
    repeats: int = 3
    warmup: int = 1

    def __post_init__(self) -> None:
        check_integer("batch", self.batch, Interval(1, 4096))
        check_integer("prompt_length", self.prompt_length, Interval(1, 131_072))
        check_integer("repeats", self.repeats, Interval(1, 10_000))
        check_integer("warmup", self.warmup, Interval(0, 1000))
        if not self.cache_names:
            raise InvalidRequestError("no cache to measure", expected="for example none,exact")
        for name in self.cache_names:
            check_choice("cache", name, get_args(Cache))

    @property
    def cache_names(self) -> tuple[str, ...]:
        """The caches, one by one."""
        return tuple(name.strip() for name in self.caches.split(",") if name.strip())


@dataclass(frozen=True)
class CacheTiming:
    """One cache.

    Attributes:
        cache: its name.
        ms_per_step: mean milliseconds of a step, cache fills counted.
        ms_per_reuse: the same without the fills.
        ms_per_fill: mean milliseconds of a fill; one per block.
        block_ms_median: median milliseconds of a block.
        first_block_ms: median milliseconds until the first block is complete.
        tokens_per_second: generated tokens of all rows.
        tokens_per_forward: committed tokens of one row per step.
        cache_bytes: bytes of the caches, by the model's formula.
        speedup: ms_per_step of the first cache of the report, divided by this one's.
    """

    cache: str
    ms_per_step: float
    ms_per_reuse: float
    ms_per_fill: float
    block_ms_median: float
    first_block_ms: float
    tokens_per_second: float
    tokens_per_forward: float
    cache_bytes: int
    speedup: float


@dataclass(frozen=True)
class BenchReport:
    """What was measured, on what; `skipped` are the caches that the engine does not have."""

    engine: str
    device: str
    toolkit_version: str
    machine: dict[str, object]
    workload: dict[str, object]
    timings: tuple[CacheTiming, ...]
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraphTiming:
    """One graph of an engine.

    Attributes:
        graph: fill, reuse or plain.
        wall_ms: median milliseconds that a caller waits.
        wall_ms_p95: 95th percentile of the same.
        device_ms: median milliseconds on the device, where the engine can tell.
        floor_ms: the matrix products and the attention alone, where the engine can tell.
    """

    graph: str
    wall_ms: float
    wall_ms_p95: float
    device_ms: float | None
    floor_ms: float | None


@dataclass(frozen=True)
class StepReport:
    """What single calls take, on what; `skipped` are the graphs that the engine does not have."""

    engine: str
    device: str
    toolkit_version: str
    machine: dict[str, object]
    workload: dict[str, object]
    cache_bytes: int
    timings: tuple[GraphTiming, ...]
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class KernelTiming:
    """One kernel or library call at one shape.

    Attributes:
        kernel: name and shape.
        microseconds: median device time, cold weights.
        tflops: rate of the multiplications and additions, in TFLOP/s.
        gbps: bytes that have to move at least, per second, in GB/s.
    """

    kernel: str
    microseconds: float
    tflops: float
    gbps: float


@dataclass(frozen=True)
class KernelReport:
    """What the kernels of an engine take, on what."""

    engine: str
    device: str
    toolkit_version: str
    machine: dict[str, object]
    workload: dict[str, object]
    timings: tuple[KernelTiming, ...]
