"""Milliseconds per denoising step on the CPU, without caches and with exact ones, in one run.

    python3 benchmarks/cpu_steps.py                       # 12 layers, d 768: some minutes
    python3 benchmarks/cpu_steps.py --layers 2 --hidden 128 --name cpu_steps_small

Random weights in LLaDA's checkpoint format are exported and built like any other model, then
`lacache_trt.bench` decodes the same random prompts with every cache; fills are counted.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from result_file import write_result  # noqa: E402
from synthetic import make_llada  # noqa: E402

from lacache_trt.bench import bench_engine  # noqa: E402
from lacache_trt.bench_report import BenchReport, BenchSettings  # noqa: E402
from lacache_trt.engines.builder import build_engine  # noqa: E402
from lacache_trt.engines.options import BuildOptions  # noqa: E402
from lacache_trt.export.exporter import export_bundle  # noqa: E402
from lacache_trt.export.options import ExportOptions  # noqa: E402
from lacache_trt.generation import GenerationConfig  # noqa: E402

STEP_METRICS = {"none": "cpu.none_ms", "exact": "cpu.exact_reuse_ms"}
"""Milliseconds per denoising step; with exact caches the fill is spread over its block's steps."""


def parse_arguments() -> argparse.Namespace:
    """The command line; heads have 64 dimensions, the FFN is 8/3 as wide as the model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--prompt-length", type=int, default=224)
    parser.add_argument("--gen-length", type=int, default=32)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="cpu_steps", help="name of the result file")
    return parser.parse_args()


def measure(arguments: argparse.Namespace, directory: Path) -> BenchReport:
    """Make the model, export, build, decode."""
    heads = arguments.hidden // 64
    checkpoint = make_llada(
        directory / "checkpoint",
        hidden=arguments.hidden,
        layers=arguments.layers,
        heads=heads,
        kv_heads=heads,
        ffn=arguments.hidden * 8 // 3,
        vocab=arguments.vocab,
    )
    bundle, engine = directory / "bundle", directory / "engine"
    export_bundle(str(checkpoint), bundle, ExportOptions(validate="off"))
    build_engine(bundle, engine, BuildOptions(engine="onnxruntime"))
    workload = BenchSettings(prompt_length=arguments.prompt_length, repeats=arguments.repeats)
    config = GenerationConfig(
        gen_length=arguments.gen_length,
        block_length=arguments.block_length,
        steps=arguments.steps,
    )
    return bench_engine(engine, workload, config)


def main() -> None:
    """Measure, print, write `benchmarks/results/NAME.json`."""
    arguments = parse_arguments()
    with TemporaryDirectory(prefix="lacache-trt-bench-") as directory:
        report = measure(arguments, Path(directory))
    metrics: dict[str, float] = {}
    for timing in report.timings:
        metrics[STEP_METRICS[timing.cache]] = timing.ms_per_step
        metrics[f"cpu.cache_bytes.{timing.cache}"] = timing.cache_bytes
    model = {"layers": arguments.layers, "hidden": arguments.hidden, "vocab": arguments.vocab}
    details = {"model": model, "load_average": os.getloadavg()[0], **asdict(report)}
    path = write_result(arguments.name, str(report.machine["cpu"]), metrics, details)
    for name, value in metrics.items():
        print(f"{name:24} {value:.4g}")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
