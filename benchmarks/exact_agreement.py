"""Exact caches against the plain graph, token by token, on random weights of LLaDA-8B's shape.

    python3 benchmarks/run_from_checkout.py benchmarks/exact_agreement.py

Each canvas has a block at another place; `exact` decodes it two tokens a step, and every canvas on
the way is predicted by `reuse` and `plain` of the CUDA engine, by the module in plain torch
operators and by the module in float64. What is excused, and why that can fail: `near_ties`.
Needs 90 GB of device memory at 32 layers. Exit code 1 if a differing token is not excused.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from canvases import Shape
from gpu_models import DeviceSession, engine_of
from llada_shape import BLOCK, random_weights, shallow
from near_ties import Predictions, walk_block
from result_file import write_result

PROMPT, COLUMNS = 128, 384
ERROR_RATIO = 2.0
"""The engine's worst error may be this many times the module's."""


def measure(layers: int, canvases: int, steps: int) -> Predictions:
    """Predictions of all paths on every canvas."""
    config = shallow(layers)
    weights = random_weights(config, "cuda")
    truth = DeviceSession(config, weights, torch.float64)
    module = DeviceSession(config, weights, torch.bfloat16)
    found = Predictions(torch.finfo(torch.bfloat16).eps)
    with engine_of(config, weights) as engine:
        for seed in range(canvases):
            start = PROMPT + BLOCK * (seed % ((COLUMNS - PROMPT) // BLOCK))
            shape = Shape(COLUMNS, BLOCK, (start,), (0,), (COLUMNS,), seed)
            walk_block(engine, (truth, module), shape, steps, found)
    return found


def main() -> int:
    """Measure, print, write `exact_agreement.json`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--canvases", type=int, default=10)
    parser.add_argument("--steps", type=int, default=16, help="per canvas")
    arguments = parser.parse_args()
    started = time.perf_counter()
    figures = measure(arguments.layers, arguments.canvases, arguments.steps).figures()
    for name, value in figures.items():
        print(f"{name:28s} {value:12.6g}")
    seconds = time.perf_counter() - started
    print(f"{seconds:.0f} s")
    prefix = f"h200.exact_vs_plain.layers{arguments.layers}"
    metrics = {f"{prefix}.{name}": value for name, value in figures.items()}
    metrics[f"{prefix}.differing_fraction"] = figures["differing"] / figures["predictions"]
    write_result("exact_agreement", torch.cuda.get_device_name(), metrics, {"seconds": seconds})
    worst = max(figures["exact_error_ulps"], figures["plain_error_ulps"])
    sound = worst <= ERROR_RATIO * figures["module_error_ulps"] and figures["median_top1"] > 0.5
    return 0 if sound and figures["not_excused"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
