"""CUDA graphs: capturing calls and timing the replays.

PyTorch allows one capture at a time in a process, whatever the stream, so every capture of the
toolkit takes the same lock. Replays and launches of other threads go on meanwhile. Destroying a
graph while another is captured invalidates the capture, so the garbage collector, which may find
the graphs of a closed engine at any time, runs before a capture and not during it.

Events around single launches overstate a short kernel by 15 to 40 microseconds; a graph over many
calls does not. Who times rotates buffers larger than the L2 between the calls.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch

Call = Callable[[], object]
_ONE_AT_A_TIME = threading.Lock()


def capture(calls: Sequence[Call], stream: torch.cuda.Stream, pool: Any = None) -> Any:
    """A `torch.cuda.CUDAGraph` of the calls on a stream.

    The calls run once eagerly before: kernels compile and libraries set themselves up, neither of
    which a capture allows. `pool` is a handle of `torch.cuda.graph_pool_handle`: graphs that share
    one must not run at the same time, and no tensor made in a capture may be needed after it.
    """
    with torch.inference_mode(), _ONE_AT_A_TIME, _no_garbage_collection():
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            for call in calls:
                call()
    return graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def replay_milliseconds(
    graph: Any, stream: torch.cuda.Stream, replays: int, warm_up: int = 2
) -> list[float]:
    """Device milliseconds of each replay; the replays follow each other without a gap."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            graph.replay()
        events[0].record(stream)
        for event in events[1:]:
            graph.replay()
            event.record(stream)
    stream.synchronize()
    return [first.elapsed_time(second) for first, second in pairwise(events)]


def microseconds_per_call(
    calls: Sequence[Call], stream: torch.cuda.Stream, replays: int = 7
) -> float:
    """Median device time of one of the calls, in a graph over all of them."""
    graph = capture(calls, stream)
    return median(replay_milliseconds(graph, stream, replays)) * 1e3 / len(calls)
