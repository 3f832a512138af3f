"""`lacache-trt bench accuracy`: what FP8 costs on the problems of tiny-llada."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lacache_trt.accuracy.settings import AccuracySettings
from lacache_trt.cli.command import verb
from lacache_trt.cli.output import Output

if TYPE_CHECKING:
    from lacache_trt.accuracy.report import AccuracyReport, CaseResult
    from lacache_trt.accuracy.statistics import Bounded


@verb
def accuracy(
    output: Output,
    settings: AccuracySettings,
    engine: Annotated[
        list[Path] | None,
        typer.Option(
            "--engine",
            help="Engine directory to measure instead of the schemes; repeat it, baseline first.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint", help="A model trained on the same problems. [default: tiny-llada]"
        ),
    ] = None,
    save_result: Annotated[
        Path | None, typer.Option("--save-result", help="Also write the report as JSON.")
    ] = None,
) -> None:
    """Compare FP8 schemes in simulation, or built engines, on held-out problems.

    Exact match with paired bounds, divergence and agreement of predictions, noise per layer, worst
    errors beside planted outliers, and the paper's claims answered with these numbers.
    """
    from lacache_trt.cli.packages import load_part
    from lacache_trt.cli.result_files import ResultFiles

    files = ResultFiles.checked(save_result)
    study = load_part("lacache_trt.accuracy.study", "export")
    with output.progress() as progress:
        if engine:
            report = study.compare_engines(engine, settings, checkpoint, progress)
        else:
            report = study.compare_schemes(settings, checkpoint, progress)
    files.deliver(output, report.to_json(), lambda: _show(report))


def _show(report: AccuracyReport) -> None:
    from lacache_trt.cli.tables import key_values, one_line, table

    key_values(
        f"baseline {report.baseline} on {report.device}",
        {"workload": one_line(report.workload), "interval": "95%, paired bootstrap over problems"},
    )
    counts = sorted({steps for case in report.cases for steps in case.exact_match}, reverse=True)
    answers = [case for case in report.cases if case.exact_match]
    columns = ["case", "layers"]
    for steps in counts:
        columns += [f"right at {steps} steps", "baseline - case", "same tokens"]
    print()
    table("exact match, %", columns, [_answers(case, counts) for case in answers])
    predictions = [case for case in report.cases if case.divergence is not None]
    print()
    names = (
        "case",
        "layers",
        "KL, 1e-6 nats",
        "same token, %",
        "noise after each layer, logits: dB",
    )
    table("predictions of masked blocks", names, [_predictions(case) for case in predictions])
    if report.outliers:
        print()
        rows = [
            (row.name, row.outlier, row.logits_ulps, max(row.caches_ulps.values()))
            for row in report.outliers
        ]
        table("worst errors, bf16 ulps", ("case", "outlier", "logits", "caches"), rows)
    for claim in report.claims:
        print(f"\n{claim.statement}: {claim.verdict}")
        for item in claim.evidence:
            print(f"  {item.says:8}{item.measure}: {claim.worse} is worse by {item.harm}")


def _answers(case: CaseResult, counts: Sequence[int]) -> list[object]:
    cells: list[object] = [case.name, case.layers]
    for steps in counts:
        gap = case.gap.get(steps)
        same = case.same_answer.get(steps)
        cells.append(f"{100 * case.exact_match[steps].value:.2f}")
        cells.append(
            "-"
            if gap is None
            else f"{100 * gap.value:+.2f} [{100 * gap.low:+.2f}, {100 * gap.high:+.2f}]"
        )
        cells.append("-" if same is None else f"{100 * same:.2f}")
    return cells


def _predictions(case: CaseResult) -> list[object]:
    return [
        case.name,
        case.layers,
        _scaled(case.divergence, 1e6, 1),
        _scaled(case.agreement, 100, 3),
        " ".join(f"{level.value:.1f}" for level in case.sqnr_db),
    ]


def _scaled(found: Bounded | None, factor: float, digits: int) -> str:
    if found is None:
        return "-"
    value, low, high = (
        f"{factor * part:.{digits}f}" for part in (found.value, found.low, found.high)
    )
    return f"{value} [{low}, {high}]"
