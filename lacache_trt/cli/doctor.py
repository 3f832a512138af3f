"""`lacache-trt doctor`."""

from __future__ import annotations

import typer

from lacache_trt.cli.command import verb
from lacache_trt.cli.output import Output


@verb
def doctor(output: Output) -> None:
    """Show what this machine can export, build and run, and how to add what is missing.

    Exit code 1 if not even the ONNX Runtime engine can run.
    """
    from dataclasses import asdict

    from lacache_trt.doctor import examine

    report = examine()

    def render() -> None:
        from lacache_trt.cli.doctor_view import show_report

        show_report(report)

    output.result(asdict(report), render)
    if not report.healthy:
        raise typer.Exit(1)
