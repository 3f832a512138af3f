"""Timing on a GPU: a CUDA graph over rotating buffers, the median of many replays, a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

L2_BYTES = 120 << 20


@dataclass(frozen=True)
class Row:
    """One timed configuration."""

    op: str
    shape: str
    configuration: str
    microseconds: float
    tflops: float
    gbps: float
    over_library: float


def graph_time(calls: list[Callable[[], object]], replays: int = 25) -> float:
    """Median microseconds per call of one CUDA graph that makes all the calls once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which makes the inputs
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return statistics.median(times)


def rotations(bytes_per_set: int) -> int:
    """Buffer sets so that a replay touches more than the L2 and has several calls."""
    return max(2, min(24, -(-2 * L2_BYTES // bytes_per_set)))


class Bench:
    """Times configurations and keeps the rows; a failing one is reported and skipped."""

    def __init__(self, excluded: set[str]) -> None:
        self.rows: list[Row] = []
        self.errors: list[str] = []
        self.excluded = excluded

    def time(
        self, op: str, shape: str, configuration: str, calls: list[Callable[[], object]],
        flops: float, moved: float, library: float = 0.0,
    ) -> float:  # fmt: skip
        """Microseconds per call; 0 if it was excluded or failed."""
        if f"{op} {configuration}" in self.excluded:
            return 0.0
        try:
            took = graph_time(calls)
        except Exception as error:
            self.errors.append(f"{op} {shape} {configuration}: {type(error).__name__} {error}")
            print(self.errors[-1].splitlines()[0][:200], flush=True)
            return 0.0
        row = Row(
            op, shape, configuration, took, flops / took / 1e6, moved / took / 1e3,
            took / library if library else 0.0,
        )  # fmt: skip
        self.rows.append(row)
        print(
            f"{op:16s} {shape:12s} {configuration:22s} {took:9.2f} us {row.tflops:7.1f} TFLOP/s "
            f"{row.gbps:7.0f} GB/s {row.over_library:6.2f} x library",
            flush=True,
        )
        return took

    def best(self, op: str, shape: str) -> Row | None:
        """The fastest row of an op at a shape."""
        found = [r for r in self.rows if (r.op, r.shape) == (op, shape)]
        return min(found, key=lambda r: r.microseconds, default=None)
