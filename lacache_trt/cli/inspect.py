"""`lacache-trt inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lacache_trt.cli.command import verb
from lacache_trt.cli.output import Output


@verb
def inspect(
    output: Output,
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Bundle, engine directory or checkpoint.")
    ],
    hashes: Annotated[
        bool, typer.Option("--hashes", help="Read every file and check its SHA-256.")
    ] = False,
) -> None:
    """Show what a bundle, an engine directory or a checkpoint holds."""
    from lacache_trt.inspection import inspect_path

    with output.progress() as progress:
        found = inspect_path(path, hashes="full" if hashes else "sizes", progress=progress)

    def render() -> None:
        from lacache_trt.cli.inspect_view import show_inspection

        show_inspection(found)

    output.result(found, render)
