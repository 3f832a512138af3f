"""Runs the CUDA engine on the CPU: streams and events do nothing, a graph calls again.

For a process with TRITON_INTERPRET=1, where the kernels run under Triton's interpreter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import interpreter_repair  # noqa: F401
import torch

from lacache_trt.engines.cuda import capture as capture_module
from lacache_trt.engines.cuda import lane as lane_module
from lacache_trt.plugins.sample_block import kernel as sample_kernel

SAMPLE_CHUNK = 128  # the interpreter pays for every element of a chunk, vocabulary or not
CPU = torch.device("cpu")


class Stream:
    """A stream on which everything has already happened."""

    device = CPU

    def synchronize(self) -> None: ...

    def wait_stream(self, other: object) -> None: ...


class Event:
    """An event that has passed."""

    def __init__(self, enable_timing: bool = False) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def elapsed_time(self, other: object) -> float:
        return 1.0


class Replay:
    """A graph that makes its calls again."""

    def __init__(self, calls: Sequence[Any]) -> None:
        self._calls = calls

    def replay(self) -> None:
        with torch.inference_mode():
            for call in self._calls:
                call()


def _capture(calls: Sequence[Any], stream: object, pool: object = None) -> Replay:
    graph = Replay(list(calls))
    graph.replay()
    return graph


def install() -> None:
    """Replace what the engine uses of torch.cuda."""
    capture_module.capture = _capture
    lane_module.capture = _capture
    for name in ("launch", "workspace_size"):
        given = getattr(sample_kernel, name)
        setattr(sample_kernel, name, partial(given, chunk=SAMPLE_CHUNK))
    replacements = {
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: Stream(),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "is_available": lambda: True,
        "get_device_name": lambda: "simulated",
        "get_device_capability": lambda device=None: (9, 0),
        "mem_get_info": lambda: (2**34, 2**34),
        "memory_reserved": lambda: 0,
        "memory_allocated": lambda: 0,
        "graph_pool_handle": lambda: None,
    }
    for name, value in replacements.items():
        setattr(torch.cuda, name, value)


install()
