"""`lacache-trt build`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lacache_trt.cli.command import verb
from lacache_trt.cli.output import Output
from lacache_trt.engines.options import BuildOptions


@verb
def build(
    output: Output,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Bundle directory.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Engine directory to create.")],
    options: BuildOptions,
) -> None:
    """Build an engine from a bundle.

    `--engine auto` means TensorRT, else TensorRT-RTX where this machine can use it, else exit
    code 3 with the other choices: an engine is never replaced by another one silently.
    """
    from lacache_trt.cli.packages import load_part

    builder = load_part("lacache_trt.engines.builder", "export")
    with output.progress() as progress:
        report = builder.build_engine(bundle, out, options, progress)
    data = {
        "out": str(report.out),
        "engine": report.engine,
        "seconds": report.seconds,
        "total_bytes": report.total_bytes,
    }

    def render() -> None:
        from lacache_trt.cli.tables import human_bytes, key_values

        key_values(
            f"engine {report.out}",
            {
                "engine": report.engine,
                "size": human_bytes(report.total_bytes),
                "seconds": f"{report.seconds:.1f}",
            },
        )
        print(f'next: lacache-trt generate {report.out} "your question"')

    output.result(data, render)
