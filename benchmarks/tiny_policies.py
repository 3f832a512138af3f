"""Accuracy against speed on tiny-llada: the grid of `lacache-trt bench policies`, kept as a result.

    python3 benchmarks/run_from_checkout.py benchmarks/tiny_policies.py BUNDLE --problems 1000
    python3 benchmarks/run_from_checkout.py benchmarks/tiny_policies.py --draw RESULT.json OUT.png

Builds an engine of the bundle (and one with FP8 FFNs with `--fp8`), runs the grid and writes
`tiny_policies.json`. The second form draws the frontier of such a file, where matplotlib is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from result_file import write_result

from lacache_trt.bench_policies import bench_policies
from lacache_trt.cli.progress_lines import LineProgress
from lacache_trt.engines.builder import build_engine
from lacache_trt.engines.options import BuildOptions
from lacache_trt.model.fp8 import Fp8Recipe
from lacache_trt.policy_grid import CaseResult, GridReport, GridSettings, HeldOut


def parse_arguments() -> argparse.Namespace:
    """The command line; the grid's own defaults stay where they are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument("--engine", default="cuda")
    parser.add_argument("--fp8", action="store_true", help="also an engine with FP8 FFNs")
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--held-out", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--policies", default=GridSettings.policies)
    parser.add_argument("--caches", default=GridSettings.caches)
    parser.add_argument("--suffixes", default=GridSettings.suffixes)
    parser.add_argument("--draw", type=Path, nargs=2, metavar=("RESULT", "PNG"))
    return parser.parse_args()


def run(arguments: argparse.Namespace) -> GridReport:
    """Build the engines and run the grid on them."""
    settings = GridSettings(
        problems=arguments.problems,
        held_out=arguments.held_out,
        batch=arguments.batch,
        policies=arguments.policies,
        caches=arguments.caches,
        suffixes=arguments.suffixes,
    )
    recipes = {"plain": None, "fp8": Fp8Recipe()} if arguments.fp8 else {"plain": None}
    with tempfile.TemporaryDirectory() as folder:
        directories = [Path(folder) / name for name in recipes]
        for directory, recipe in zip(directories, recipes.values(), strict=True):
            options = BuildOptions(engine=arguments.engine, fp8=recipe)
            build_engine(arguments.bundle, directory, options)
        with LineProgress() as progress:
            return bench_policies(directories, settings, progress)


def keep(report: GridReport) -> None:
    """Print every case and write the result file."""
    for case in report.cases:
        print(
            f"{'*' if case.on_frontier else ' '} {case.name}: {100 * case.accuracy:.2f}% right, "
            f"{case.forwards:.2f} forwards, {case.ms_per_answer:.2f} ms"
        )
    found = report.held_out
    print(f"chosen: {found}")
    for name in report.skipped:
        print(f"skipped: {name}")
    metrics = {
        "tiny.policies.baseline_exact_match": found.baseline_accuracy,
        "tiny.policies.chosen_exact_match": found.chosen_accuracy,
        "tiny.policies.gap_points": found.gap_points,
        "tiny.policies.gap_points_bound": found.gap_high,
        "tiny.policies.forwards_ratio": found.forwards_ratio,
    }
    print(write_result("tiny_policies", report.device, metrics, asdict(report)))


def draw(result: Path, picture: Path) -> None:
    """The frontier of a kept result."""
    from lacache_trt.frontier_plot import draw as draw_report

    details = json.loads(result.read_text(encoding="utf-8"))["details"]
    cases = tuple(CaseResult(**case) for case in details["cases"])
    held_out = HeldOut(**details["held_out"])
    report = {**details, "cases": cases, "held_out": held_out}
    draw_report(GridReport(**report), picture)


def main() -> None:
    """Run and keep, or draw."""
    arguments = parse_arguments()
    if arguments.draw:
        draw(*arguments.draw)
    elif arguments.bundle is None:
        raise SystemExit("a bundle of tiny-llada is needed: lacache-trt export")
    else:
        keep(run(arguments))


if __name__ == "__main__":
    main()
