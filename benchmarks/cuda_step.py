"""Milliseconds of a denoising step on the CUDA engine at LLaDA-8B's shape, and where they go.

    python3 benchmarks/run_from_checkout.py benchmarks/cuda_step.py

Random bf16 weights made on the device; no files. Through the engine's public interface: one fill,
then many reuse steps with changing block tokens. Device time comes from events around the replays
of the captured graph, wall-clock time from the host around each `reuse`. In the same process:
    floor        the step's GEMMs and cuDNN attention alone, in one graph
    attribution  the step with one thing switched off at a time (`step_variants`)
    profile      one replay by kernel, one eager run by operator and shape
    reference    the eager baseline (`reference_llada`)
A part that fails is reported and the others go on. About three minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import reference_llada
import torch
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
from step_parts import attribution, floors, profile_tables
from torch import Tensor

from lacache_trt.engines.base import Canvas, Int, Session
from lacache_trt.engines.cuda.engine import CudaEngine
from lacache_trt.engines.cuda.gemm import GemmTable, measure_table
from lacache_trt.model.config import ModelConfig

DEVICE = "cuda"
CASES = ((1, 384), (1, 383), (1, 1152), (1, 2048), (4, 383))
ATTRIBUTED = (384, 1152, 2048)
PARTS = ("steps", "floor", "attribution", "profile", "reference")


@dataclass
class Run:
    """What the parts share, and what they find."""

    config: ModelConfig
    weights: dict[str, Tensor]
    gemms: GemmTable
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


def case_name(rows: int, columns: int) -> str:
    """Suffix of the metrics of a case."""
    return f"n{columns}" if rows == 1 else f"b{rows}.n{columns}"


def measure_case(run: Run, engine: CudaEngine, rows: int, columns: int) -> dict[str, object]:
    """Fill, reuse and plain of one canvas size."""
    canvas = masked_canvas(run.config, rows, columns)
    blocks = middle_block(canvas)
    session = engine.session()
    started = time.perf_counter()
    session.fill(canvas, blocks)
    session.reuse(blocks * 0 + run.config.mask_id, greedy(run.config, rows))
    first = time.perf_counter() - started
    walls = [_wall(run, session, blocks, canvas, step) for step in range(run.repeats)]
    session.plain(canvas, blocks, greedy(run.config, rows))
    device = {
        graph: median(session.milliseconds(graph, run.repeats))
        for graph in ("reuse", "fill", "plain")
    }
    wall, host = median(walls), median(walls) - device["reuse"]
    per_token = session.cache_bytes() / (rows * -(-columns // 64) * 64)
    name = case_name(rows, columns)
    run.metrics |= {
        f"h200.exact_reuse_ms.bf16.{name}": device["reuse"],
        f"h200.exact_reuse_wall_ms.bf16.{name}": wall,
        f"h200.host_ms_per_step.bf16.{name}": host,
        f"h200.fill_ms.bf16.{name}": device["fill"],
        f"h200.plain_ms.bf16.{name}": device["plain"],
        f"h200.cache_bytes_per_token.bf16.{name}": per_token,
    }
    print(
        f"B={rows} N={columns}: reuse {device['reuse']:.3f} ms device, {wall:.3f} wall "
        f"(host {1e3 * host:.0f} us, {100 * host / wall:.1f}%), fill {device['fill']:.3f}, "
        f"plain {device['plain']:.3f}, caches {per_token:.0f} B a token, "
        f"first fill and reuse {first:.1f} s",
        flush=True,
    )
    session.close()
    return {"device_ms": device, "wall_ms": walls, "first_s": first}


def _wall(run: Run, session: Session, blocks: Int, canvas: Canvas, step: int) -> float:
    tokens = block_tokens(canvas, blocks, run.config, step)
    sampling = greedy(run.config, len(tokens), step)
    started = time.perf_counter()
    session.reuse(tokens, sampling)
    return (time.perf_counter() - started) * 1e3


def measure_floor(run: Run, rows: int, columns: int) -> dict[str, float]:
    """The floor of a case, and the step's ratio to it."""
    name = case_name(rows, columns)
    bucket = -(-columns // 64) * 64
    found = floors(run.config, run.weights, run.gemms, rows, bucket, run.repeats)
    step = run.metrics.get(f"h200.exact_reuse_ms.bf16.{name}", float("nan"))
    plain = run.metrics.get(f"h200.plain_ms.bf16.{name}", float("nan"))
    run.metrics |= {
        f"h200.floor_ms.bf16.{name}": found["exact"],
        f"h200.plain_floor_ms.bf16.{name}": found["plain"],
        f"h200.exact_over_floor.bf16.{name}": step / found["exact"],
    }
    print(
        f"B={rows} N={columns}: floor {found['exact']:.3f} ms (layer 0 on the block's rows), "
        f"{found['plain']:.3f} (layer 0 in full); reuse / floor {step / found['exact']:.3f}, "
        f"plain / its floor {plain / found['plain']:.3f}",
        flush=True,
    )
    return found


def run_parts(run: Run, parts: Sequence[str], cases: Sequence[tuple[int, int]]) -> None:
    """Every part in turn; the steps first, since the floor's ratio needs them."""
    lengths = [columns for rows, columns in cases if rows == 1 and columns in ATTRIBUTED]
    if "steps" in parts:
        engine = CudaEngine(run.config, run.weights, run.gemms)
        for rows, columns in cases:
            label = f"steps {case_name(rows, columns)}"
            run.attempt(label, lambda r=rows, c=columns: measure_case(run, engine, r, c))
        engine.close()
    if "floor" in parts:
        for rows, columns in cases:
            label = f"floor {case_name(rows, columns)}"
            run.attempt(label, lambda r=rows, c=columns: measure_floor(run, r, c))
    shared = (run.config, run.weights, run.gemms)
    if "attribution" in parts:
        for columns in lengths:
            run.attempt(
                f"attribution n{columns}",
                lambda c=columns: attribution(*shared, c, run.repeats, run.metrics),
            )
    if "profile" in parts:
        for columns in lengths[:1] + lengths[-1:]:
            run.attempt(f"profile n{columns}", lambda c=columns: profile_tables(*shared, c))
    if "reference" in parts:
        torch.cuda.empty_cache()
        run.attempt("reference", lambda: _reference(run))


def _reference(run: Run) -> object:
    network = reference_llada.build_reference(run.config, run.weights)
    rows = reference_llada.measure(network, run.config, run.metrics, steps=12)
    for prompt, generated in reference_llada.PAIRS:
        ours = run.metrics.get(f"h200.exact_reuse_wall_ms.bf16.n{prompt + generated}")
        theirs = run.metrics.get(f"h200.reference_step_ms.p{prompt}.g{generated}")
        if ours and theirs:
            ratio = theirs / ours
            run.metrics[f"h200.step_speedup.p{prompt}.g{generated}"] = ratio
            print(f"P={prompt} G={generated}: reference / exact step = {ratio:.2f} x", flush=True)
    return rows


def ceilings_for(cases: Sequence[tuple[int, int]]) -> list[int]:
    """The row counts that occur, so that the GEMM table has an entry for each."""
    found = {BLOCK}
    for rows, columns in cases:
        found |= {rows * BLOCK, rows * (-(-columns // 64) * 64)}
    return sorted(found)


def main() -> int:
    """Run the parts asked for; exit code 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--lengths", type=int, nargs="+", help="only these N, batch 1")
    arguments = parser.parse_args()
    cases = CASES if not arguments.lengths else tuple((1, n) for n in arguments.lengths)
    torch.manual_seed(0)
    started = time.perf_counter()
    config = shallow(arguments.layers)
    weights = random_weights(config, DEVICE)
    print(f"weights: {time.perf_counter() - started:.1f} s", flush=True)
    gemms = measure_table(config, torch.bfloat16, ceilings_for(cases), report=print)
    print(f"GEMM table: {time.perf_counter() - started:.1f} s", flush=True)
    run = Run(config, weights, gemms, arguments.repeats)
    run.details |= {"layers": arguments.layers, "gemms": gemms.to_json()}
    run_parts(run, arguments.parts, cases)
    run.details["failures"] = run.failures
    path = write_result("cuda_step", torch.cuda.get_device_name(), run.metrics, run.details)
    for name in sorted(run.metrics):
        print(f"{name} = {run.metrics[name]:.6g}")
    print(f"{len(run.failures)} failures {run.failures}, {time.perf_counter() - started:.0f} s")
    print(f"wrote {path.name}")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
