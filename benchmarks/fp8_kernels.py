"""Checks and times the FP8 kernels on a GPU.

    python3 benchmarks/run_from_checkout.py benchmarks/fp8_kernels.py

1. Correctness: `fp8_checks` in a pool of processes, every geometry that is timed and every stage
   count of what ships; this also compiles the kernels in parallel. What fails is not timed.
2. Time: `fp8_cases` in CUDA graphs over cold rotating weights, medians, libraries beside them.
Writes fp8-kernels.json into $OUT. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict

import torch
from fp8_cases import (
    ROWS,
    SHAPES,
    LinearBench,
    bench_large_copy,
    bench_merge,
    bench_quantising,
    jobs,
)
from kernel_jobs import Outcome, run_jobs
from kernel_timing import Bench
from result_file import write_result


def report(outcomes: list[Outcome]) -> set[str]:
    """Print every job; the names of the geometries that failed."""
    for outcome in sorted(outcomes, key=lambda o: o.job.label):
        print(
            f"{'FAIL' if outcome.failures else 'ok  '} {outcome.job.label:34s} "
            f"{outcome.cases:4d} comparisons, worst {outcome.worst:.3f} of its bound, "
            f"{outcome.seconds:.0f} s"
        )
        for failure in outcome.failures[:3]:
            print(f"       {failure[:300]}")
    return {o.job.label for o in outcomes if o.failures}


def metrics(bench: Bench) -> dict[str, float]:
    """Dotted names of the fastest configuration of each op and shape; prints the ratios."""
    found: dict[str, float] = {}
    for op, shape in sorted({(r.op, r.shape) for r in bench.rows}):
        row = bench.best(op, shape)
        if row is None:
            continue
        base = f"h200.kernel.{op}.{shape}"
        found |= {f"{base}.us": row.microseconds, f"{base}.gbps": row.gbps}
        if row.tflops:
            found[f"{base}.tflops"] = row.tflops
        if op != "group_linear":
            continue
        others = {
            name: bench.best(name, shape)
            for name in ("cublas_bf16", "scaled_mm_block", "scaled_mm_rowwise")
        }
        ratios = ", ".join(
            f"{other.microseconds / row.microseconds:.2f} x {name}"
            for name, other in others.items()
            if other is not None
        )
        print(
            f"best {shape:20s} {row.configuration:26s} {row.microseconds:8.2f} us "
            f"{row.tflops:6.0f} TFLOP/s {row.gbps:6.0f} GB/s of weights; as fast as {ratios}"
        )
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=16, help="0: check in this process")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    started = time.perf_counter()
    outcomes = [] if arguments.no_checks else run_jobs(jobs(), arguments.workers)
    failed = report(outcomes)
    print(f"checks took {time.perf_counter() - started:.0f} s", flush=True)
    bench = Bench({label.replace("linear", "group_linear", 1) for label in failed})
    if not arguments.no_times:
        bench_large_copy(bench)
        for rows in (1152, 2048):
            bench_quantising(bench, rows)
        bench_merge(bench, 32, 4096)
        for columns, width in SHAPES:
            linear = LinearBench(bench, columns, width)
            for rows in arguments.rows:
                linear.run(rows)
            print(f"{time.perf_counter() - started:.0f} s", flush=True)
            del linear
            torch.cuda.empty_cache()
    details = {
        "rows": [asdict(row) for row in bench.rows],
        "errors": bench.errors,
        "failed_checks": {o.job.label: o.failures for o in outcomes if o.failures},
        "worst_of_bound": {o.job.label: o.worst for o in outcomes},
        "comparisons": sum(o.cases for o in outcomes),
    }
    write_result("fp8-kernels", torch.cuda.get_device_name(), metrics(bench), details)
    print(f"{len(outcomes)} jobs, {len(failed)} failed, {time.perf_counter() - started:.0f} s")
    return 1 if failed or bench.errors else 0


if __name__ == "__main__":
    sys.exit(main())
