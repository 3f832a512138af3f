"""`lacache-trt verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lacache_trt.cli.command import verb
from lacache_trt.cli.output import Output

if TYPE_CHECKING:
    from lacache_trt.verify_report import VerifyReport

BUNDLE_HELP = "Bundle to compare with; without it the engine's own plain graph is the reference."
REPORT_HELP = "Write the report to this file, as JSON or Markdown by its suffix."


@verb
def verify(
    output: Output,
    engines: Annotated[Path, typer.Argument(metavar="ENGINES", help="Engine directory.")],
    bundle: Annotated[Path | None, typer.Option("--bundle", help=BUNDLE_HELP)] = None,
    report: Annotated[Path | None, typer.Option("--report", help=REPORT_HELP)] = None,
) -> None:
    """Check an engine: files, contract, every output against the plain graph, whole answers.

    Exit code 1 if a numerical check fails.
    """
    from lacache_trt.errors import InvalidRequestError
    from lacache_trt.verify import verify_engine

    if report is not None and report.suffix not in (".json", ".md"):
        raise InvalidRequestError(
            "unknown kind of report", got=str(report), expected="a name that ends in .json or .md"
        )
    with output.progress() as progress:
        result = verify_engine(engines, bundle=bundle, report=report, progress=progress)
    output.result(result.to_json(), lambda: _show(result))
    if not result.passed:
        raise typer.Exit(1)


def _show(report: VerifyReport) -> None:
    from lacache_trt.cli.tables import table

    table(
        f"{'passed' if report.passed else 'FAILED'}: {report.engine} on {report.device}, "
        f"{report.dtype}, against {report.reference}",
        ("check", "held", "figures"),
        [(check.name, "yes" if check.passed else "NO", check.shown) for check in report.checks],
    )
    print(
        f"relative: largest difference over largest value, at most {report.bound:g}; "
        "ulps: the same in units of float32 rounding;\n"
        "excused: tokens that differ where the reference's two best are closer than that bound, "
        "at most 0.1% of them or one; differing: other tokens that differ;\n"
        "swapped: steps that would commit in another order, within the bound."
    )
