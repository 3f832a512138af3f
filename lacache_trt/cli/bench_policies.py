"""`lacache-trt bench policies`: accuracy against speed on the problems of tiny-llada."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lacache_trt.cli.command import verb
from lacache_trt.cli.output import Output
from lacache_trt.policy_grid import GridSettings

if TYPE_CHECKING:
    from lacache_trt.policy_grid import GridReport


@verb
def policies(
    output: Output,
    engines: Annotated[
        list[Path],
        typer.Argument(
            metavar="ENGINES...", help="Engine directories; the first is the baseline's."
        ),
    ],
    settings: GridSettings,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the frontier as a PNG (extra 'plots').")
    ] = None,
    save_result: Annotated[
        Path | None, typer.Option("--save-result", help="Also write the report as JSON.")
    ] = None,
) -> None:
    """Try policies, caches and suffix dropout on tiny-llada, and draw accuracy against speed.

    The tune split chooses the fastest setting within the allowed loss; the held-out split says
    what it is worth, paired with the full schedule. Forwards are counted up to the answer's end.
    """
    from dataclasses import asdict

    from lacache_trt.bench_policies import bench_policies
    from lacache_trt.cli.packages import load_part
    from lacache_trt.cli.result_files import ResultFiles

    files = ResultFiles.checked(save_result, plot)
    drawing = None if plot is None else load_part("lacache_trt.frontier_plot", "plots")
    with output.progress() as progress:
        report = bench_policies(engines, settings, progress)
    if drawing is not None:
        files.draw(lambda path: drawing.draw(report, path))
    data = {**asdict(report), "plot": None if plot is None else str(plot)}
    files.deliver(output, data, lambda: _show(report, plot))


def _show(report: GridReport, plot: Path | None) -> None:
    from lacache_trt.cli.tables import key_values, one_line, table

    key_values(
        f"policies on {report.device}",
        {"machine": one_line(report.machine), "workload": one_line(report.workload)},
    )
    print()
    columns = ("case", "right, %", "forwards", "tokens/forward", "ms/answer", "frontier")
    table(
        "tune split",
        columns,
        [
            (
                one.name,
                round(100 * one.accuracy, 2),
                round(one.forwards, 2),
                round(one.tokens_per_forward, 2),
                round(one.ms_per_answer, 2),
                "*" if one.on_frontier else "",
            )
            for one in report.cases
        ],
    )
    found = report.held_out
    print(
        f"\nchosen: {found.chosen}\n"
        f"held-out, {found.problems} problems: {100 * found.chosen_accuracy:.2f}% right against "
        f"{100 * found.baseline_accuracy:.2f}%; loss {found.gap_points:.2f} points "
        f"[{found.gap_low:.2f}, {found.gap_high:.2f}] (95%, paired); "
        f"{found.chosen_forwards:.2f} forwards against {found.baseline_forwards:.2f}, "
        f"{found.forwards_ratio:.2f} times fewer"
    )
    for name in report.skipped:
        print(f"skipped: {name}")
    if plot is not None:
        print(f"frontier: {plot}")
