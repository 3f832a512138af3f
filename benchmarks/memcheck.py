"""compute-sanitizer's memcheck over every kernel configuration that ships, without any filter.

    python3 benchmarks/run_from_checkout.py benchmarks/memcheck.py

A process per op, dtype and SM (`memcheck_parts`), many at once: first without the tool, which
compiles the kernels into a cache of its own, then under it. Every tensor is its own allocation
(torch's caching is off), so that a byte past its end is seen. sm_89 runs from its PTX. What makes
"0 errors" mean something: the configurations launched under the tool are counted and compared with
those that ship, and a part that writes out of bounds must be reported.
Writes `memcheck.json`; exit code 1 on an error, a configuration not launched, or a blind tool.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from kernel_ptx import shipping
from memcheck_parts import PARTS
from result_file import write_result

HERE = Path(__file__).resolve().parent
# Failed driver calls are not reported: cuda-bindings looks up symbols that a driver may lack, and
# every call that matters here raises.
SANITIZER = (
    *("compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no"),
    *("--target-processes", "application-only"),
)
OVERRUN = "overrun"
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


@dataclass(frozen=True)
class Part:
    """An op's launches in one dtype with one SM's kernels."""

    name: str
    dtype: str
    sm: int

    @property
    def label(self) -> str:
        """For the table."""
        return f"{self.name} {self.dtype} sm_{self.sm}"


@dataclass(frozen=True)
class Outcome:
    """A part's run: the tool's errors (None without a summary), launches by configuration."""

    part: Part
    returned: int
    errors: int | None
    launches: dict[str, int]
    seconds: float
    output: str = field(repr=False)


def run_part(part: Part, cache: str, tool: tuple[str, ...], timeout: float) -> Outcome:
    """Run one part in its own process."""
    script = str(HERE / "memcheck_parts.py")
    command = [*tool, sys.executable, script, part.name, part.dtype, str(part.sm)]
    settings = {"TRITON_CACHE_DIR": cache, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command, env=os.environ | settings, capture_output=True, text=True, timeout=timeout
        )
        returned, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        returned, output = 124, f"timed out after {error.timeout} s"
    summary = SUMMARY.search(output)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    launches = json.loads(lines[-1]) if lines and returned == 0 else {}
    errors = int(summary[1]) if summary else None
    return Outcome(part, returned, errors, launches, time.perf_counter() - started, output)


def run_all(
    parts: list[Part], jobs: int, tool: tuple[str, ...], cache: str, timeout: float
) -> list[Outcome]:
    """Run the parts, `jobs` at once, and print what failed."""
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(lambda part: run_part(part, cache, tool, timeout), parts))
    for outcome in outcomes:
        clean = outcome.returned == 0 and (not tool or outcome.errors == 0)
        print(
            f"{outcome.part.label:32s} {sum(outcome.launches.values()):5d} launches, "
            f"errors {outcome.errors if tool else '-'}, {outcome.seconds:.0f} s",
            flush=True,
        )
        if not clean and outcome.part.name != OVERRUN:
            print(outcome.output[-3000:])
    return outcomes


def report(outcomes: list[Outcome], sms: tuple[int, ...], folder: Path | None) -> int:
    """Write the result; returns the number of things that are wrong."""
    checked = [o for o in outcomes if o.part.name != OVERRUN]
    blind = [o.part.label for o in outcomes if o.part.name == OVERRUN and not o.errors]
    seen: Counter[str] = Counter()
    for outcome in checked:
        seen.update({f"sm_{outcome.part.sm} {n}": c for n, c in outcome.launches.items()})
    wanted = {f"sm_{sm} {each.name}" for sm in sms for each in shipping(sm)}
    missing = sorted(wanted - set(seen))
    failed = [o.part.label for o in checked if o.returned or o.errors is None]
    metrics = {
        "h200.memcheck.errors": float(sum(o.errors or 0 for o in checked)),
        "h200.memcheck.launches": float(seen.total()),
        "h200.memcheck.configurations": float(len(wanted & set(seen))),
        "h200.memcheck.configurations_missing": float(len(missing)),
        "h200.memcheck.parts_failed": float(len(failed)),
        "h200.memcheck.errors_in_overrun": float(
            sum(o.errors or 0 for o in outcomes if o.part.name == OVERRUN)
        ),
    }
    for name, value in metrics.items():
        print(f"{name:42s} {value:8.0f}")
    details = {"missing": missing, "failed": failed, "blind": blind, "launches": dict(seen)}
    write_result("memcheck", torch.cuda.get_device_name(), metrics, details, folder)
    return int(metrics["h200.memcheck.errors"]) + len(missing) + len(failed) + len(blind)


def main() -> int:
    """Compile, check, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sm", type=int, nargs="*", default=[90, 89])
    parser.add_argument("--timeout", type=float, default=240, help="seconds a part may take")
    arguments = parser.parse_args()
    sms = tuple(arguments.sm)
    dtypes = ("float16", "bfloat16")
    parts = [Part(n, d, sm) for n in PARTS if n != OVERRUN for d in dtypes for sm in sms]
    canaries = [Part(OVERRUN, "float16", sm) for sm in sms]
    with tempfile.TemporaryDirectory() as cache:
        print("without the tool:")
        run_all(parts, arguments.jobs, (), cache, arguments.timeout)
        print("under memcheck:")
        outcomes = run_all([*parts, *canaries], arguments.jobs, SANITIZER, cache, arguments.timeout)
    return 1 if report(outcomes, sms, None) else 0


if __name__ == "__main__":
    sys.exit(main())
