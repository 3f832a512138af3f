"""FP8 schemes on tiny-llada: exact match, predictions, planted outliers, the paper's claims.

    python3 benchmarks/run_from_checkout.py benchmarks/tiny_accuracy.py --problems 5000
    python3 benchmarks/run_from_checkout.py benchmarks/tiny_accuracy.py --engine bf16 --engine fp8

The torch reference simulates every scheme, so this needs no engine; with `--engine` it compares
built engines instead, the first one being the baseline. The result goes to `tiny_accuracy.json`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from result_file import write_result

from lacache_trt.accuracy.report import AccuracyReport
from lacache_trt.accuracy.settings import AccuracySettings
from lacache_trt.accuracy.study import compare_engines, compare_schemes
from lacache_trt.cli.progress_lines import LineProgress


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--problems", type=int, default=5000)
    add("--steps", type=int, nargs="+", default=[64, 8])
    add("--schemes", default="all")
    add("--scopes", default="ffn,linears,all")
    add("--batch-rows", type=int, default=512)
    add("--resamples", type=int, default=2000)
    add("--device", default="auto")
    add("--engine", type=Path, action="append", default=[])
    add("--name", default="tiny_accuracy", help="of the result file")
    return parser.parse_args()


def print_report(report: AccuracyReport) -> None:
    """A line per case, then the claims."""
    for case in report.cases:
        scores = " ".join(
            f"@{steps}: {100 * score.value:.2f}%"
            + (f" gap {100 * case.gap[steps].value:+.2f}" if steps in case.gap else "")
            + (f" <= {100 * case.gap[steps].high:.2f}" if steps in case.gap else "")
            for steps, score in case.exact_match.items()
        )
        noise = f"{case.sqnr_db[-1].value:.1f} dB" if case.sqnr_db else "-"
        print(f"{case.name:22}{scores} KL {case.divergence} same {case.agreement} logits {noise}")
    for row in report.outliers:
        print(f"outlier x{row.outlier:g} {row.name:22}logits {row.logits_ulps:.1f} ulps")
    for claim in report.claims:
        print(f"{claim.statement}: {claim.verdict}")
        for item in claim.evidence:
            print(f"    {item.says:8}{item.measure}: {item.harm}")


def main() -> None:
    """Measure, print, write the result."""
    arguments = parse_arguments()
    settings = AccuracySettings(
        problems=arguments.problems,
        steps=tuple(arguments.steps),
        schemes=arguments.schemes,
        scopes=arguments.scopes,
        batch_rows=arguments.batch_rows,
        resamples=arguments.resamples,
        device=arguments.device,
    )
    began = time.monotonic()
    with LineProgress() as progress:
        if arguments.engine:
            report = compare_engines(arguments.engine, settings, progress=progress)
        else:
            report = compare_schemes(settings, progress=progress)
    print_report(report)
    seconds = time.monotonic() - began
    print(f"{seconds:.0f} s")
    path = write_result(
        arguments.name, report.device, report.metrics(), {**report.to_json(), "seconds": seconds}
    )
    print(path)


if __name__ == "__main__":
    main()
