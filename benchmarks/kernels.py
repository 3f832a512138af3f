"""Checks and times every kernel on a GPU; run it as `python3 benchmarks/kernels.py`.

1. Correctness: what ships for every op, and the geometries that are timed, in a pool of processes
   (all elements against float64); a configuration that fails is reported and not timed.
2. Time: each configuration at LLaDA-8B's shapes (32 heads x 128, d 4096, FFN 12288, vocabulary
   126464, Bk 32) in one CUDA graph over rotating buffers larger than the L2, median of many
   replays; the library's time of the same run beside it.
3. `--ptx-of 89`: the checks of what ships for another SM, loaded from its PTX, and that none of
   it was left out.
Writes kernels.json, or kernels_sm89.json, into $OUT. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from dataclasses import asdict

import kernel_checks  # noqa: F401 (makes the package importable from a checkout)
import torch
from kernel_cases import PARTS, time_parts
from kernel_jobs import Outcome, run_jobs
from kernel_sweep import jobs, shipping_jobs
from kernel_timing import Bench
from result_file import write_result


def report_checks(outcomes: list[Outcome]) -> set[str]:
    """Print failures; labels of the jobs that failed."""
    for outcome in sorted(outcomes, key=lambda o: o.job.label):
        state = "ok  " if not outcome.failures else "FAIL"
        print(
            f"{state} {outcome.job.label:40s} {outcome.cases:5d} comparisons, worst error "
            f"{outcome.worst:.2f} of its bound, {outcome.seconds:.0f} s"
        )
        for failure in outcome.failures[:3]:
            print(f"       {failure[:400]}")
    return {o.job.label for o in outcomes if o.failures}


def check_metrics(outcomes: list[Outcome]) -> dict[str, float]:
    """How much was compared."""
    return {
        "h200.kernel_checks.jobs": len(outcomes),
        "h200.kernel_checks.failed": sum(1 for o in outcomes if o.failures),
        "h200.kernel_checks.comparisons": sum(o.cases for o in outcomes),
        "h200.kernel_checks.worst_of_bound": max((o.worst for o in outcomes), default=0.0),
    }


def metrics(bench: Bench) -> dict[str, float]:
    """Stable dotted names of the fastest configuration of each op and shape."""
    found: dict[str, float] = {}
    for op, shape in sorted({(r.op, r.shape) for r in bench.rows}):
        row = bench.best(op, shape)
        if row is None:
            continue
        name = {"fill": "attention_fill", "reuse": "attention_reuse"}.get(op, op)
        base = f"h200.kernel.{name}.{shape}"
        found[f"{base}.us"] = row.microseconds
        found[f"{base}.tflops"] = row.tflops
        found[f"{base}.gbps"] = row.gbps
        print(
            f"best {op:12s} {shape:12s} {row.configuration:16s} {row.microseconds:9.2f} us "
            f"{row.tflops:6.0f} TFLOP/s {row.gbps:6.0f} GB/s {row.over_library:5.2f} x library"
        )
    return found


def never_launched(outcomes: list[Outcome], sm: int) -> list[str]:
    """Configurations that ship for an SM and that no check launched."""
    from kernel_ptx import shipping

    launched = {name for outcome in outcomes for name in outcome.launched}
    missing = [c.name for c in shipping(sm) if c.name not in launched]
    print(f"{len(launched)} sm_{sm} configurations launched from PTX, missing: {missing or 'none'}")
    return missing


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=16, help="0: check in this process")
    parser.add_argument("--only", default="", help="check only jobs whose label matches this")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help="time only these")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument(
        "--ptx-of", type=int, metavar="SM", help="check this SM's kernels, loaded as PTX; no times"
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    started = time.perf_counter()
    sm = arguments.ptx_of
    candidates = jobs() if sm is None else shipping_jobs(sm)
    wanted = [job for job in candidates if re.search(arguments.only, job.label)]
    outcomes = [] if arguments.no_checks else run_jobs(wanted, arguments.workers)
    failed = report_checks(outcomes)
    print(f"checks took {time.perf_counter() - started:.0f} s", flush=True)
    bench = Bench(failed)
    missing = []
    if sm is None:
        time_parts(bench, arguments.parts)
    elif not arguments.only:
        missing = never_launched(outcomes, sm)
    details = {
        "rows": [asdict(row) for row in bench.rows],
        "errors": bench.errors,
        "worst_of_bound": {o.job.label: o.worst for o in outcomes},
        "failed_checks": {o.job.label: o.failures for o in outcomes if o.failures},
        "launched_from_ptx": sorted({name for o in outcomes for name in o.launched}),
        "missing_from_ptx": missing,
    }
    found = check_metrics(outcomes) | metrics(bench)
    name = "kernels" if sm is None else f"kernels_sm{sm}"
    write_result(name, torch.cuda.get_device_name(), found, details)
    bad = len(failed) + len(bench.errors) + len(missing)
    print(f"{len(outcomes)} check jobs, {bad} failed, {time.perf_counter() - started:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
