"""Tokens a second of one stream at LLaDA-8B's shape, with *simulated acceptance*.

    python3 benchmarks/run_from_checkout.py benchmarks/stream_simulated.py

Random weights on the device, so what a step accepts and where the answer ends is scripted
(`stream_script`); forwards, sampler, policy and decoding loop are the real ones. In one process:
    vanilla    one step of the official rules over transformers' Llama, one token a forward. The
               long case is extrapolated from its milliseconds a step: nobody waits for 2,048 steps
    eager      the same accelerators over the same plain eager forward (`EagerStream`)
    short      P=128 G=256, dual cache, 1 to 8 tokens per forward, FP8 and bf16
    long       gen 2048, answer 106 tokens, EOS stop, DPad, threshold, dual, FP8; then one part
               switched off at a time
Ratios are to vanilla, to eager and to the autoregressive bound (bytes of weights at 4.3 TB/s).
`--budget` seconds after the start no further measurement begins; what was left out is listed.
`--toy` runs all of it at a tiny size without a GPU, where no figure means anything.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import host_time
import reference_llada
import torch
from fp8_step import quantise_weights
from llada_shape import BLOCK, random_weights, shallow
from result_file import write_result
from stream_script import EagerStream, Script
from stream_timing import (
    LABEL,
    TOY,
    Sizes,
    Stream,
    measure,
    measure_eager,
    print_ratios,
    settings,
    uncaptured,
)

from lacache_trt.engines.cuda import engine as engine_module
from lacache_trt.engines.cuda.engine import CudaEngine
from lacache_trt.engines.cuda.fp8 import Fp8Table, measure_fp8_table
from lacache_trt.engines.cuda.gemm import GemmTable, measure_table
from lacache_trt.model.config import ModelConfig
from lacache_trt.model.fp8 import Fp8Recipe, select_linears

BANDWIDTH = 4.3e12


def vanilla(stream: Stream, network: torch.nn.Module, steps: int) -> dict[str, float]:
    """Seconds of both answers at one token a forward and the milliseconds of a measured step.

    Also warms the eager accelerators up.
    """
    sizes, found = stream.sizes, {}
    for label, length in (("short", sizes.short), ("long", sizes.long)):
        times = reference_llada.step_milliseconds(
            network, stream.config, sizes.prompt, length, steps, "model"
        )
        found[label] = median(times)
        stream.metrics[f"h200.reference_step_ms.p{sizes.prompt}.g{length}"] = found[label]
        print(f"vanilla P={sizes.prompt} G={length}: {found[label]:.2f} ms a step", flush=True)
    warm = settings(sizes.short, suffix="dpad")
    stream.eager.run(stream.prompt(), warm, Script(stream.config, 8.0, BLOCK))
    return {
        "short_seconds": sizes.short * found["short"] / 1e3,
        "long_seconds": sizes.long * found["long"] / 1e3,
    }


def bounds(stream: Stream, given: dict[str, Any]) -> dict[str, float]:
    """Tokens a second of an autoregressive model that reads each weight once a token."""
    found = {}
    for name, (_, tensors, *_) in given.items():
        read = sum(t.numel() * t.element_size() for n, t in tensors.items() if n != "embed.weight")
        found[name] = BANDWIDTH / read
        stream.metrics[f"h200.autoregressive_bound_tok_s.{name}"] = found[name]
    return found


def short_case(stream: Stream, reference: dict[str, float], bound: dict[str, float]) -> None:
    """P=128 G=256 with the dual cache at several tokens per forward."""
    sizes, length = stream.sizes, stream.sizes.short
    config = settings(length)
    for rate in sizes.rates:
        key = f"tpf{rate:g}".replace(".", "_")
        size = f"p{sizes.prompt}.g{length}"
        if not stream.in_time(f"short {key}"):
            continue
        rows = {"eager": measure_eager(stream, f"eager {size} {key}", config, rate, length)}
        for precision, engine in stream.engines.items():
            name = f"{size}.{precision}.dual.{key}"
            found = rows[precision] = measure(stream, name, engine, config, rate, length)
            found |= {
                "over_vanilla": reference["short_seconds"] / found["seconds"],
                "over_eager": rows["eager"]["seconds"] / found["seconds"],
                "over_autoregressive_bf16": found["tok_s"] / bound["bf16"],
            }
            stream.metrics[f"h200.stream_tok_s.{name}"] = found["tok_s"]
            stream.metrics[f"h200.stream_host_share.{name}"] = found["host_share"]
            print_ratios(found)
        stream.metrics[f"h200.stream_tok_s.{size}.eager.dual.{key}"] = rows["eager"]["tok_s"]
        stream.details[f"short {key}"] = rows


def long_case(
    stream: Stream, reference: dict[str, float], bound: dict[str, float], best_arguments: Any
) -> None:
    """The paper's long case, and each part switched off alone."""
    sizes, best = stream.sizes, stream.engines.get("fp8", stream.engines["bf16"])
    config = settings(sizes.long, suffix="dpad")
    base = measure(stream, "long", best, config, sizes.rate, sizes.answer)
    eager = measure_eager(stream, "long eager", config, sizes.rate, sizes.answer)
    base |= {
        "over_vanilla_extrapolated": reference["long_seconds"] / base["seconds"],
        "over_eager": eager["seconds"] / base["seconds"],
        "over_autoregressive_bf16": base["tok_s"] / bound["bf16"],
    }
    print_ratios(base)
    stream.metrics |= {f"h200.stream_long.{name}": value for name, value in base.items()}
    found = {"all": base, "eager": eager}
    for name, part in long_parts(stream, best, best_arguments).items():
        if not stream.in_time(f"long {name}"):
            continue
        row = found[name] = part()
        factor = row["seconds"] / base["seconds"]
        stream.metrics[f"h200.stream_long.slower_{name}"] = factor
        print(f"{LABEL} long {name}: {factor:.2f} x the time of all together", flush=True)
    stream.details["long"] = found


def long_parts(
    stream: Stream, best: CudaEngine, best_arguments: Any
) -> dict[str, Callable[[], dict[str, float]]]:
    """The long case with one thing changed, by its name; the longest ones last."""
    sizes = stream.sizes

    def part(
        name: str, engine: CudaEngine = best, rate: float = sizes.rate, **changed: Any
    ) -> dict[str, float]:
        config = settings(sizes.long, **({"suffix": "dpad"} | changed))
        repeats = 3 if config.stop_at_eos else 1
        return measure(stream, f"long {name}", engine, config, rate, sizes.answer, repeats)

    def without_graphs() -> dict[str, float]:
        with uncaptured():
            return part("without_graphs", CudaEngine(*best_arguments))

    return {
        "without_fp8": lambda: part("without_fp8", stream.engines["bf16"]),
        "one_token_per_forward": lambda: part("one_token_per_forward", rate=1.0),
        "without_dpad": lambda: part("without_dpad", suffix="full"),
        "exact_cache": lambda: part("exact_cache", cache="exact"),
        "no_cache": lambda: part("no_cache", cache="none"),
        "without_graphs": without_graphs,
        "without_eos_stop": lambda: part("without_eos_stop", stop_at_eos=False),
    }


def tables(config: ModelConfig, sizes: Sizes, recipe: Fp8Recipe) -> tuple[GemmTable, Fp8Table]:
    """The GEMM choices for windows and for canvases."""
    rows = sorted({BLOCK, sizes.prompt + sizes.short, 1152, sizes.prompt + sizes.long})
    linears = select_linears(config, recipe).linears
    return (
        measure_table(config, torch.bfloat16, rows),
        measure_fp8_table(config, linears, torch.bfloat16, rows),
    )


def prepare(layers: int, toy: bool, budget: float) -> tuple[Stream, Any, dict[str, Any]]:
    """What is shared, the eager network, and what each engine is made of."""
    started = time.perf_counter()
    if toy:
        host_time.install()
        config, sizes = replace(host_time.CONFIG, vocab_size=512, mask_id=511, eos_ids=(510,)), TOY
        weights = random_weights(config, "cpu", dtype=torch.float32)
        arguments = {"bf16": (config, weights, GemmTable({}), Fp8Table({}))}
    else:
        config, sizes, recipe = shallow(layers), Sizes(), Fp8Recipe()
        weights = random_weights(config, "cuda")
        gemms, fp8_gemms = tables(config, sizes, recipe)
        arguments = {"fp8": (config, quantise_weights(config, weights, recipe), gemms, fp8_gemms)}
        arguments["bf16"] = (config, weights, gemms, Fp8Table({}))
    module: Any = engine_module
    module.MAX_LANES = 64  # the answer without an EOS stop passes through 33 canvas sizes
    engines = {name: CudaEngine(*given) for name, given in arguments.items()}
    network = reference_llada.build_reference(config, weights)
    stream = Stream(config, sizes, engines, EagerStream(network, config), started + budget)
    print(f"prepared in {time.perf_counter() - started:.1f} s", flush=True)
    return stream, network, arguments


def main() -> int:
    """Measure everything that fits into the budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8, help="vanilla steps that are timed")
    parser.add_argument("--budget", type=float, default=110.0)
    parser.add_argument("--toy", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    started = time.perf_counter()
    stream, network, given = prepare(arguments.layers, arguments.toy, arguments.budget)
    reference_llada.DEVICE = "cpu" if arguments.toy else "cuda"
    reference, bound = vanilla(stream, network, arguments.steps), bounds(stream, given)
    short_case(stream, reference, bound)
    long_case(stream, reference, bound, given.get("fp8", given["bf16"]))
    stream.details |= {
        "simulated_acceptance": True,
        "vanilla_long_is_extrapolated": True,
        "left_out": stream.left_out,
        "layers": arguments.layers,
    }
    device = "cpu (toy)" if arguments.toy else torch.cuda.get_device_name()
    name = "stream_simulated_toy" if arguments.toy else "stream_simulated"
    path = write_result(name, device, stream.metrics, stream.details)
    for key in sorted(stream.metrics):
        print(f"{key} = {stream.metrics[key]:.6g}")
    print(f"left out {stream.left_out}; {time.perf_counter() - started:.0f} s; wrote {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
