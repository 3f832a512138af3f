"""One engine, many threads; memory over many generations; closing under load."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lacache_trt.errors import CancelledError, EngineError
from lacache_trt.generation import GenerationConfig
from lacache_trt.runtime import Runtime

THREADS = 8
GROWTH_MIB = 8


def request(index: int) -> tuple[list[list[int]], GenerationConfig]:
    """A batch and its settings; every few indices another kind of request."""
    rng = np.random.default_rng(index)
    batch = [rng.integers(0, 90, rng.integers(1, 20)).tolist() for _ in range(1 + index % 3)]
    block_length = (4, 8, 5)[index % 3]
    chosen: dict[str, Any] = {
        "block_length": block_length,
        "gen_length": 2 * block_length,
        "steps": 2 * block_length,
        "temperature": (0.0, 0.9)[index % 2],
        "seed": index,
        "cache": ("exact", "exact", "none")[index % 3],
        "cfg_scale": (0.0, 0.0, 0.0, 1.0)[index % 4],
    }
    if index % 5 == 4:
        chosen |= {"policy": "entropy", "top_p": 0.9}
    return batch, GenerationConfig(**chosen)


def answers(runtime: Runtime, indices: range) -> list[tuple[tuple[int, ...], ...]]:
    """Tokens of the requests, in order."""
    found = []
    for index in indices:
        batch, config = request(index)
        found.append(tuple(result.tokens for result in runtime.generate(batch, config)))
    return found


def check_threads(runtime: Runtime, generations: int) -> None:
    """Every thread gets what one thread alone gets, whichever way they interleave."""
    alone = answers(runtime, range(generations))
    barrier = threading.Barrier(THREADS)

    def work(thread: int) -> list[tuple[tuple[int, ...], ...]]:
        barrier.wait()
        order = range(generations) if thread % 2 else range(generations - 1, -1, -1)
        found = answers(runtime, order)
        return found if thread % 2 else found[::-1]

    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(work, range(THREADS)):
            assert found == alone


def test_threads_agree(runtimes: Any) -> None:
    check_threads(runtimes("llada"), 6)


@pytest.mark.slow
def test_threads_agree_over_many_generations(runtimes: Any) -> None:
    check_threads(runtimes("llada"), 50)
    check_threads(runtimes("dream"), 50)


def test_interleaved_streams_of_one_thread(runtimes: Any) -> None:
    runtime: Runtime = runtimes("llada")
    config = GenerationConfig(gen_length=16, block_length=8, steps=16, temperature=0.7)
    prompts = [[1, 2, 3], [9] * 12, [40, 2]]
    alone = [list(runtime.stream(prompt, config)) for prompt in prompts]
    streams = [runtime.stream(prompt, config) for prompt in prompts]
    woven: list[list[Any]] = [[] for _ in prompts]
    active = set(range(len(prompts)))
    while active:
        for index in sorted(active):
            event = next(streams[index], None)
            if event is None:
                active.discard(index)
            else:
                woven[index].append(event)
    assert woven == alone


def resident_mib() -> float:
    """VmRSS of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))


def check_memory(runtime: Runtime, generations: int) -> None:
    """After a warm-up of a quarter, resident memory stays where it is; streams dropped half-way
    and failed requests included.
    """
    batch = [[1] * 30, [2] * 11]
    config = GenerationConfig(gen_length=32, block_length=16, steps=8)
    cancelled = threading.Event()
    cancelled.set()
    samples = []
    for index in range(generations):
        runtime.generate(batch, config)
        stream = runtime.stream(batch[0], config)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        with pytest.raises(CancelledError):
            runtime.generate(batch, config, cancel=cancelled)
        if index >= generations // 4:
            samples.append(resident_mib())
    assert max(samples) - samples[0] < GROWTH_MIB, samples[:: max(1, len(samples) // 8)]


def test_memory_is_flat(runtimes: Any) -> None:
    check_memory(runtimes("llada"), 200)


@pytest.mark.slow
def test_memory_is_flat_over_a_thousand_generations(runtimes: Any) -> None:
    check_memory(runtimes("llada"), 1000)


def test_memory_is_flat_over_loads(models: Any) -> None:
    """Opening and closing an engine gives its memory back."""
    samples = []
    for _ in range(12):
        with Runtime.load(models("llada").engine) as runtime:
            runtime.generate([1, 2], GenerationConfig(gen_length=8, block_length=8, steps=2))
        samples.append(resident_mib())
    assert samples[-1] - samples[3] < GROWTH_MIB, samples


def test_closing_under_load(models: Any) -> None:
    """Threads in flight end with CancelledError at their next step; new calls are refused."""
    runtime = Runtime.load(models("llada").engine)
    started = threading.Barrier(5)
    outcomes: list[BaseException] = []

    def work() -> None:
        started.wait()
        try:
            for index in range(10_000):
                runtime.generate([index % 90], GenerationConfig(gen_length=64, steps=64))
        except BaseException as error:
            outcomes.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    threading.Event().wait(0.3)
    runtime.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(outcomes) == 4
    for error in outcomes:
        assert isinstance(error, (CancelledError, EngineError)), error
        assert "closed" in str(error)
