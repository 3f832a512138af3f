"""Which library call is fastest for each linear and for attention, at LLaDA-8B's shapes.

    python3 benchmarks/run_from_checkout.py benchmarks/gemm_layouts.py

Linears: cuBLAS and cuBLASLt, with the weight stored [in, out] and [out, in], in one CUDA graph
over rotating cold weights. Attention: cuDNN's SDPA without a mask, this toolkit's kernel with a
valid range, and cuDNN over ragged sequences, where the left pads of each row form a sequence of
their own and the offsets are read from device memory; results are compared with float64 and a
captured graph is replayed with other offsets. Takes about a minute.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from ragged_attention import RaggedCase, attention_calls, check_calls
from result_file import write_result
from torch import Tensor

from lacache_trt.engines.cuda.capture import microseconds_per_call
from lacache_trt.engines.cuda.gemm import IMPLEMENTATIONS

DEVICE = "cuda"
SHAPES = ((4096, 12288), (4096, 4096), (4096, 24576), (12288, 4096), (4096, 126464))
ROWS = (32, 384, 1152, 2048)
LENGTHS = (384, 1152, 2048)
COLD_BYTES = 256 * 2**20
BF16 = torch.bfloat16
_PADS = (0, 1, 37)


class Timer:
    """Times calls on one stream; what fails is printed, counted and left out."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.failures: list[str] = []

    def microseconds(self, label: str, calls: Sequence[Callable[[], object]]) -> float:
        """Median device time of one call, NaN if it failed."""
        try:
            return microseconds_per_call(calls, self.stream)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0][:200]
            self.failures.append(f"{label}: {type(error).__name__}: {first}")
            print(f"FAILED {self.failures[-1]}", flush=True)
            return float("nan")


def linear_calls(rows: Tensor, weights: Sequence[Tensor]) -> dict[str, list[Callable[[], Tensor]]]:
    """Every way to multiply: library and storage of the weight."""
    stored = [weight.t().contiguous() for weight in weights]
    found: dict[str, list[Callable[[], Tensor]]] = {}
    for name, function in IMPLEMENTATIONS.items():
        found[f"{name} in_out"] = [partial(function, rows, weight) for weight in weights]
        found[f"{name} out_in"] = [partial(function, rows, weight.t()) for weight in stored]
    return found


def time_linears(timer: Timer, metrics: dict[str, float], rows_wanted: Sequence[int]) -> list[dict]:
    """Microseconds of every linear, row count and way."""
    table = []
    print(f"{'K':>6} {'N':>7} {'M':>5}  us (TFLOP/s, GB/s of weights)")
    for k, n in SHAPES:
        copies = max(2, -(-COLD_BYTES // (k * n * 2)))
        weights = [torch.randn(k, n, device=DEVICE, dtype=BF16) for _ in range(copies)]
        for m in rows_wanted:
            rows = torch.randn(m, k, device=DEVICE, dtype=BF16)
            cells = []
            for name, calls in linear_calls(rows, weights).items():
                took = timer.microseconds(f"{name} m{m} k{k} n{n}", calls)
                rate, bandwidth = 2e-6 * m * k * n / took, 2e-3 * k * n / took
                cells.append(f"{name} {took:7.1f} ({rate:4.0f}, {bandwidth:4.0f})")
                metrics[f"h200.linear.{name.replace(' ', '.')}.m{m}.n{n}.k{k}.us"] = took
                table.append({"m": m, "k": k, "n": n, "way": name, "us": took})
            print(f"{k:6d} {n:7d} {m:5d}  " + "  ".join(cells), flush=True)
        del weights
        torch.cuda.empty_cache()
    return table


def time_attention(timer: Timer, metrics: dict[str, float], lengths: Sequence[int]) -> list[dict]:
    """Microseconds of every attention way, pads 0 and 37, batch 1 and 4."""
    table = []
    for length in lengths:
        for batch, pads in ((1, 0), (1, 37), (4, 37)):
            case = RaggedCase(batch, length, pads, DEVICE)
            flops = 4.0 * batch * 32 * length * length * 128
            for name, calls in attention_calls(case).items():
                took = timer.microseconds(f"attention {name} n{length}", calls)
                print(
                    f"attention n{length} b{batch} pads {pads:3d} {name:24s} {took:8.1f} us "
                    f"{flops / took / 1e6:5.0f} TFLOP/s",
                    flush=True,
                )
                label = name.replace(" ", "_")
                metrics[f"h200.attention.{label}.b{batch}.n{length}.pads{pads}.us"] = took
                table.append({"b": batch, "n": length, "pads": pads, "way": name, "us": took})
    return table


def main() -> int:
    """Run both tables; exit code 1 if a check or a call failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skip-linears", action="store_true")
    parser.add_argument("--skip-attention", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    arguments = parser.parse_args()
    started = time.perf_counter()
    torch.manual_seed(0)
    timer, metrics, details = Timer(), dict[str, float](), dict[str, object]()
    if not arguments.skip_attention:
        details["checks"] = checks = check_calls(DEVICE, _PADS)
        timer.failures += [line for line in checks if line.startswith("FAILED")]
        print("\n".join(checks), flush=True)
        details["attention"] = time_attention(timer, metrics, arguments.lengths)
        print(f"attention took {time.perf_counter() - started:.0f} s", flush=True)
    if not arguments.skip_linears:
        details["linears"] = time_linears(timer, metrics, arguments.rows)
    details["failures"] = timer.failures
    path = write_result("gemm_layouts", torch.cuda.get_device_name(), metrics, details)
    print(f"{len(timer.failures)} failures, {time.perf_counter() - started:.0f} s, {path.name}")
    return 1 if timer.failures else 0


if __name__ == "__main__":
    sys.exit(main())
