"""Milliseconds of a window step on the CUDA engine at LLaDA-8B's shape, and where they go.

    python3 benchmarks/run_from_checkout.py benchmarks/window_step.py

Random weights made on the device, bf16 or with `--fp8` FP8 FFNs; no files. In one process:
    checks       AttentionWindow and the cache write against float64, over seeds
    steps        reuse, reuse_kv and window steps (the block alone, and block and suffix) through
                 the engine's interface: device time of the captured graphs, wall-clock time around
                 each call; a window of unchanged tokens against reuse
    kernel       AttentionWindow and the cache write alone, over cold caches, for several tiles
    floor        the linears of a window step alone, in one graph; and their bytes
    profile      one window step by kernel
`steps` reports the ratio to the floor of the same run. About three minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import numpy as np
import torch
from fp8_step import quantise_weights
from kernel_jobs import Ledger
from llada_shape import (
    BLOCK,
    block_tokens,
    greedy,
    masked_canvas,
    middle_block,
    random_weights,
    shallow,
)
from result_file import write_result
from torch import Tensor
from window_checks import check_windows
from window_kernel import (
    bench_kernels,
    default_times,
    launch_microseconds,
    linears_milliseconds,
)

from lacache_trt.engines.base import Canvas, Int, Sampling, StepOutputs
from lacache_trt.engines.cuda.engine import CudaEngine
from lacache_trt.engines.cuda.fp8 import Fp8Table, measure_fp8_table
from lacache_trt.engines.cuda.gemm import GemmTable, measure_table
from lacache_trt.engines.cuda.lane import window_name
from lacache_trt.engines.cuda.session import CudaSession
from lacache_trt.engines.windows import window_bucket
from lacache_trt.model.config import ModelConfig
from lacache_trt.model.fp8 import Fp8Recipe, select_linears

LENGTHS = (384, 1152, 2048)
WINDOWS = (BLOCK, 128, 256)
PARTS = ("checks", "floor", "kernel", "steps", "profile")
BANDWIDTH = 4.3e12  # bytes a second of a copy


@dataclass
class Run:
    """What the parts share, and what they find."""

    config: ModelConfig
    weights: dict[str, Tensor]
    gemms: GemmTable
    fp8_gemms: Fp8Table
    precision: str
    repeats: int
    metrics: dict[str, float] = field(default_factory=dict)
    details: dict[str, object] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def attempt(self, label: str, part: Callable[[], object]) -> None:
        """Run a part; keep its result, or its failure."""
        started = time.perf_counter()
        try:
            self.details[label] = part()
        except Exception as error:
            traceback.print_exc()
            first = (str(error).splitlines() or [""])[0]
            self.failures.append(f"{label}: {type(error).__name__}: {first}")
        print(f"-- {label}: {time.perf_counter() - started:.1f} s", flush=True)


def checks(run: Run, seeds: int) -> dict[str, object]:
    """Comparisons with float64."""
    ledger = Ledger()
    for dtype in (torch.bfloat16, torch.float16):
        check_windows(ledger, dtype, seeds)
    run.failures += ledger.failures[:20]
    run.metrics["h200.window_checks.cases"] = ledger.cases
    run.metrics["h200.window_checks.worst_error_over_bound"] = ledger.worst
    found = f"{ledger.cases} comparisons, {len(ledger.failures)} failed"
    print(f"AttentionWindow: {found}, worst error {ledger.worst:.2f} of the bound", flush=True)
    return {"cases": ledger.cases, "failures": ledger.failures[:20]}


def floor(run: Run) -> dict[str, float]:
    """The linears of a step of BLOCK rows in one graph, and the bytes of their weights."""
    milliseconds, read = linears_milliseconds(
        run.config, run.weights, run.gemms, run.fp8_gemms, BLOCK, run.repeats
    )
    copied, rate = 1e3 * read / BANDWIDTH, read / milliseconds / 1e9
    run.metrics |= {
        f"h200.window_floor_ms.{run.precision}": milliseconds,
        f"h200.window_floor_gb.{run.precision}": read / 1e9,
        f"h200.window_floor_tbps.{run.precision}": rate,
    }
    print(
        f"floor: the linears of {BLOCK} rows {milliseconds:.3f} ms, {read / 1e9:.2f} GB "
        f"at {rate:.2f} TB/s; at the copy's 4.3 TB/s {copied:.3f} ms",
        flush=True,
    )
    return {"gemms_ms": milliseconds, "bytes": read, "read_ms": copied}


def kernels(run: Run, lengths: list[int]) -> list[dict[str, object]]:
    """Every tiling at every length; the default's time is a metric."""
    bench = bench_kernels(run.config, lengths, WINDOWS)
    run.failures += bench.errors
    run.metrics |= default_times(bench)
    return [vars(row) for row in bench.rows]


class Steps:
    """A session of one canvas size with its block filled and K and V kept."""

    def __init__(self, run: Run, engine: CudaEngine, columns: int) -> None:
        self.run, self.columns = run, columns
        self.canvas: Canvas = masked_canvas(run.config, 1, columns)
        self.block: Int = middle_block(self.canvas)
        self.session: CudaSession = engine.session()
        self.session.fill(self.canvas, self.block)

    def tokens(self, step: int) -> Int:
        """The block, half decoded."""
        return block_tokens(self.canvas, self.block, self.run.config, step)

    def window(self, width: int) -> tuple[Int, Int]:
        """Tokens and columns of the block and what follows it, or what precedes it at the end."""
        start = min(int(self.block[0, 0]), self.columns - width)
        columns = np.arange(start, start + width, dtype=np.int32)[None]
        return np.take_along_axis(self.canvas.tokens, columns, 1), columns

    def window_inputs(self, width: int, step: int) -> tuple[Int, Int, Int, Sampling]:
        """What a window step with other tokens in the block is called with."""
        tokens, columns = self.window(width)
        first = int(self.block[0, 0] - columns[0, 0])
        tokens[:, first : first + BLOCK] = self.tokens(step)
        return tokens, columns, self.block, greedy(self.run.config, 1, step)

    def window_step(self, width: int, step: int) -> StepOutputs:
        """A window step with other tokens in the block."""
        return self.session.window(*self.window_inputs(width, step))


def measure(run: Run, engine: CudaEngine, columns: int) -> dict[str, object]:
    """All steps of one canvas size."""
    steps = Steps(run, engine, columns)
    session, config = steps.session, run.config
    plain = session.reuse(steps.tokens(0), greedy(config, 1), steps.block)
    kept = session.reuse_kv(steps.tokens(0), greedy(config, 1), steps.block)
    agreement = compare(run, steps, plain, kept, columns)
    for step in (session.reuse, session.reuse_kv):  # without logits, as they are timed
        step(steps.tokens(0), greedy(config, 1))
    device = {name: median(session.milliseconds(name, run.repeats))
              for name in ("reuse", "reuse_kv")}  # fmt: skip
    run.metrics[f"h200.reuse_kv_over_reuse.{run.precision}.n{columns}"] = (
        device["reuse_kv"] / device["reuse"]
    )
    found: dict[str, object] = {"agreement": agreement, "device_ms": device}
    found |= {f"window-{width}": measure_window(run, steps, width) for width in WINDOWS}
    both, held = f"{device['reuse']:.3f}, {device['reuse_kv']:.3f}", session.cache_bytes() >> 20
    print(f"N={columns}: reuse, reuse_kv {both} ms, agreement {agreement}, session {held} MiB")
    session.close()
    return found


def compare(
    run: Run, steps: Steps, plain: StepOutputs, kept: StepOutputs, columns: int
) -> dict[str, float]:
    """`reuse_kv` against `reuse` bit for bit; a window of the same tokens against it."""
    same = all(np.array_equal(value, getattr(kept, name)) for name, value in vars(plain).items())
    if not same:
        run.failures.append(f"n{columns}: reuse_kv differs from reuse")
    _, window = steps.window(BLOCK)
    found = steps.session.window(
        steps.tokens(0), window, steps.block, greedy(run.config, 1), steps.block
    )
    error = float(np.abs(found.logits - plain.logits).max() / np.abs(plain.logits).max())
    equal = float((found.token == plain.token).mean())
    run.metrics[f"h200.window_logit_error.{run.precision}.n{columns}"] = error
    run.metrics[f"h200.window_token_equal.{run.precision}.n{columns}"] = equal
    return {"bitwise": float(same), "logit_error": error, "token_equal": equal}


def measure_window(run: Run, steps: Steps, width: int) -> dict[str, float]:
    """Device and wall-clock time of windows of one width."""
    steps.window_step(width, 1)
    walls = []
    for step in range(run.repeats):
        inputs = steps.window_inputs(width, step)
        started = time.perf_counter()
        steps.session.window(*inputs)
        walls.append((time.perf_counter() - started) * 1e3)
    name = window_name(window_bucket(width, BLOCK), BLOCK)
    device = median(steps.session.milliseconds(name, run.repeats))
    wall, suffix = median(walls), f"{run.precision}.n{steps.columns}"
    label = "window_step" if width == BLOCK else f"window{width}_step"
    run.metrics |= {
        f"h200.{label}_ms.{suffix}": device,
        f"h200.{label}_wall_ms.{suffix}": wall,
        f"h200.{label}_host_ms.{suffix}": wall - device,
        f"h200.{label}_launch_us.{suffix}": launch_microseconds(steps.session, name, run.repeats),
    }
    ratio = device / run.metrics.get(f"h200.window_floor_ms.{run.precision}", float("nan"))
    print(
        f"N={steps.columns} W={width}: {device:.3f} ms device ({ratio:.3f} x floor), "
        f"{wall:.3f} wall, host {1e3 * (wall - device):.0f} us, "
        f"{100 * (wall - device) / wall:.1f}%",
        flush=True,
    )
    return {"device_ms": device, "wall_ms": wall, "over_floor": ratio}


def profile(run: Run, engine: CudaEngine, columns: int) -> dict[str, dict[str, float]]:
    """Kernels of three window steps by name: calls and microseconds a step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    steps = Steps(run, engine, columns)
    steps.session.reuse_kv(steps.tokens(0), greedy(run.config, 1))
    steps.window_step(BLOCK, 1)
    with profiler(activities=[ProfilerActivity.CUDA]) as recorded:
        for step in range(3):
            steps.window_step(BLOCK, step)
        torch.cuda.synchronize()
    calls: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for event in recorded.events():
        calls[event.name[:90]] += 1
        spent[event.name[:90]] += event.device_time
    names = [name for name, _ in spent.most_common(25)]
    table = {name: {"calls": calls[name] / 3, "us": spent[name] / 3} for name in names}
    for name, row in table.items():
        print(f"N={columns} {row['calls']:6.1f} x {row['us']:9.1f} us  {name}")
    steps.session.close()
    return table


def main() -> int:
    """Run the parts asked for; exit code 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--fp8", action="store_true", help="FP8 FFNs in all layers but the first")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = shallow(arguments.layers)
    weights = random_weights(config, "cuda")
    ceilings = sorted({*WINDOWS, *arguments.lengths})
    gemms = measure_table(config, torch.bfloat16, ceilings, report=print)
    fp8_gemms, precision = Fp8Table({}), "bf16"
    if arguments.fp8:
        recipe, precision = Fp8Recipe(), "fp8"
        weights = quantise_weights(config, weights, recipe)
        linears = select_linears(config, recipe).linears
        fp8_gemms = measure_fp8_table(config, linears, torch.bfloat16, ceilings, report=print)
    run = Run(config, weights, gemms, fp8_gemms, precision, arguments.repeats)
    if "checks" in arguments.parts:
        run.attempt("checks", lambda: checks(run, arguments.seeds))
    parts = {"floor": lambda: floor(run), "kernel": lambda: kernels(run, arguments.lengths)}
    for name in (name for name in parts if name in arguments.parts):
        run.attempt(name, parts[name])
    with CudaEngine(config, run.weights, gemms, run.fp8_gemms) as engine:
        for columns in arguments.lengths:
            if "steps" in arguments.parts:
                run.attempt(f"n{columns}", partial(measure, run, engine, columns))
            if "profile" in arguments.parts:
                run.attempt(f"profile n{columns}", partial(profile, run, engine, columns))
    run.details |= {"layers": arguments.layers, "failures": run.failures}
    name = f"window_step_{run.precision}".removesuffix("_bf16")
    path = write_result(name, torch.cuda.get_device_name(), run.metrics, run.details)
    for name in sorted(run.metrics):
        print(f"{name} = {run.metrics[name]:.6g}")
    print(f"{len(run.failures)} failures {run.failures}; wrote {path.name}")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
