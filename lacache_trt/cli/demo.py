"""`lacache-trt demo`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lacache_trt.cli.command import verb
from lacache_trt.cli.output import Output

if TYPE_CHECKING:
    from lacache_trt.demo.problems import Problem
    from lacache_trt.demo.run import DemoReport
    from lacache_trt.generation import GenerationConfig
    from lacache_trt.runtime import Runtime

PROBLEMS = 32
SHOWN = 3


@verb
def demo(
    output: Output,
    problems: Annotated[
        int, typer.Option("--problems", min=1, max=100_000, help="Held-out problems to ask.")
    ] = PROBLEMS,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", help="Keep the bundle and the engine in this directory."),
    ] = None,
) -> None:
    """Run the whole chain on the model that ships: export, build, answer word problems.

    Shows a few answers being denoised step by step, then the accuracy on held-out problems and
    the time per step without caches and with exact ones.
    """
    from dataclasses import asdict

    from lacache_trt.cli.packages import load_part

    run = load_part("lacache_trt.demo.run", "export")
    with output.progress() as progress:

        def watch(runtime: Runtime, items: Sequence[Problem], settings: GenerationConfig) -> None:
            from lacache_trt.cli.denoising import show_answer
            from lacache_trt.cli.progress import RichProgress

            if isinstance(progress, RichProgress):
                progress.pause()
            for item in items[:SHOWN]:
                show_answer(runtime, item, settings)

        report = run.run_demo(problems, keep, progress, None if output.json else watch)
    output.result(asdict(report), lambda: _show_report(report))


def _show_report(report: DemoReport) -> None:
    from lacache_trt.cli.tables import key_values

    print()
    key_values(
        "tiny-llada on held-out word problems",
        {
            "accuracy": f"{report.accuracy:.1%} ({report.correct} of {report.problems})",
            **{
                f"ms per step, cache {cache}": f"{value:.2f}"
                for cache, value in report.ms_per_step.items()
            },
            **{f"{stage} took": f"{value:.1f} s" for stage, value in report.seconds.items()},
        },
    )
    if report.directory:
        print(
            f'next: lacache-trt generate {report.directory}/engine "a question like these" '
            "--gen-length 64 --steps 64 --stream"
        )
