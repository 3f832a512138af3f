"""Milliseconds of a denoising step at LLaDA-8B's shape with FP8 FFNs, beside bf16.

    python3 benchmarks/run_from_checkout.py benchmarks/fp8_step.py

Random weights made on the device, the same in both engines; those of the recipe's linears are
quantised there. Per canvas: device time of a replayed `reuse`, the floor (the step's GEMMs and
cuDNN attention alone, FP8 where the step is; quantising is not in it), bytes that the engine holds,
and how many of a block's tokens and how much of its logits agree with bf16. About two minutes.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
from cuda_step import ceilings_for
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

from lacache_trt.engines.base import StepOutputs
from lacache_trt.engines.cuda.engine import CudaEngine
from lacache_trt.engines.cuda.floor import floor_milliseconds
from lacache_trt.engines.cuda.fp8 import Fp8Table, measure_fp8_table
from lacache_trt.engines.cuda.gemm import GemmTable, measure_table
from lacache_trt.model.config import ModelConfig
from lacache_trt.model.fp8 import Fp8Recipe, select_linears
from lacache_trt.plugins.fp8 import quantise_blocks

DEVICE = "cuda"
LENGTHS = (384, 1152, 2048)


@dataclass
class Measured:
    """One precision: its tables, and what was found."""

    name: str
    weights: dict[str, Tensor]
    gemms: GemmTable
    fp8_gemms: Fp8Table
    metrics: dict[str, float] = field(default_factory=dict)
    outputs: dict[int, StepOutputs] = field(default_factory=dict)


def quantise_weights(
    config: ModelConfig, weights: dict[str, Tensor], recipe: Fp8Recipe
) -> dict[str, Tensor]:
    """The weights with the recipe's linears in FP8; the others are the same tensors."""
    found = dict(weights)
    for linear in select_linears(config, recipe).linears:
        values, scale = quantise_blocks(weights[linear + ".weight"].t())
        found |= {linear + ".weight": values.contiguous(), linear + ".scale": scale.contiguous()}
    return found


def measure(run: Measured, config: ModelConfig, lengths: Sequence[int], repeats: int) -> None:
    """Step, floor and memory of one precision at every length."""
    held = sum(tensor.nbytes for tensor in run.weights.values())
    run.metrics[f"h200.weights_gb.{run.name}"] = held / 1e9
    for columns in lengths:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine = CudaEngine(config, run.weights, run.gemms, run.fp8_gemms)
        canvas = masked_canvas(config, 1, columns)
        blocks = middle_block(canvas)
        session = engine.session()
        session.fill(canvas, blocks)
        tokens = block_tokens(canvas, blocks, config, 0)
        run.outputs[columns] = session.reuse(tokens, greedy(config, 1), blocks)
        session.reuse(tokens, greedy(config, 1))
        step = median(session.milliseconds("reuse", repeats))
        memory = held + torch.cuda.memory_allocated() - before
        sizes = (1, columns, BLOCK)
        floor = floor_milliseconds(
            config, run.weights, run.gemms, sizes, repeats, fp8_gemms=run.fp8_gemms
        )
        name = f"{run.name}.n{columns}"
        run.metrics |= {
            f"h200.exact_reuse_ms.{name}": step,
            f"h200.floor_ms.{name}": floor,
            f"h200.exact_over_floor.{name}": step / floor,
            f"h200.engine_gb.{name}": memory / 1e9,
        }
        print(
            f"{run.name} N={columns}: reuse {step:.3f} ms, floor {floor:.3f} ms, ratio "
            f"{step / floor:.3f}, engine {memory / 1e9:.2f} GB",
            flush=True,
        )
        session.close()
        engine.close()
        del engine, session


def compare(half: Measured, quantised: Measured, metrics: dict[str, float]) -> None:
    """Speed-up, equal tokens of the block, and the logits' signal to error in dB."""
    for columns, found in quantised.outputs.items():
        expected = half.outputs[columns]
        error = np.square(found.logits - expected.logits).sum()
        sqnr = 10 * np.log10(np.square(expected.logits).sum() / error)
        name = f"n{columns}"
        ratio = (
            half.metrics[f"h200.exact_reuse_ms.bf16.{name}"]
            / quantised.metrics[f"h200.exact_reuse_ms.{quantised.name}.{name}"]
        )
        metrics |= {
            f"h200.speedup.{quantised.name}.{name}": ratio,
            f"h200.equal_tokens.{quantised.name}.{name}": float(
                (found.token == expected.token).mean()
            ),
            f"h200.logit_sqnr_db.{quantised.name}.{name}": float(sqnr),
        }
        print(f"N={columns}: {ratio:.3f} x bf16, {sqnr:.1f} dB", flush=True)


def main() -> int:
    """Measure both precisions and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--scope", default="ffn", choices=("ffn", "linears", "all"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    started = time.perf_counter()
    config, recipe = shallow(arguments.layers), Fp8Recipe(scope=arguments.scope)
    linears = select_linears(config, recipe).linears
    ceilings = ceilings_for([(1, columns) for columns in arguments.lengths])
    weights = random_weights(config, DEVICE)
    gemms = measure_table(config, torch.bfloat16, ceilings, report=print)
    fp8_gemms = measure_fp8_table(config, linears, torch.bfloat16, ceilings, report=print)
    print(f"tables: {time.perf_counter() - started:.1f} s", flush=True)
    half = Measured("bf16", weights, gemms, Fp8Table({}))
    measure(half, config, arguments.lengths, arguments.repeats)
    name = "fp8" if arguments.scope == "ffn" else f"fp8-{arguments.scope}"
    quantised = Measured(name, quantise_weights(config, weights, recipe), gemms, fp8_gemms)
    measure(quantised, config, arguments.lengths, arguments.repeats)
    metrics = half.metrics | quantised.metrics
    compare(half, quantised, metrics)
    details = {
        "layers": arguments.layers,
        "fp8_gemms": fp8_gemms.to_json(),
        "linears": list(linears),
    }
    path = write_result("fp8_step", torch.cuda.get_device_name(), metrics, details)
    for key in sorted(metrics):
        print(f"{key} = {metrics[key]:.6g}")
    print(f"wrote {path.name}, {time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
