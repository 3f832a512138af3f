"""`lacache-trt inspect`."""

from __future__ import annotations

import json
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
    layers: Annotated[
        bool, typer.Option("--layers", help="Print what TensorRT made of each graph, as JSON.")
    ] = False,
) -> None:
    """Show what a bundle, an engine directory or a checkpoint holds."""
    from lacache_trt.inspection import inspect_path, read_layers

    if layers:
        report = read_layers(path)
        output.result(report, lambda: print(json.dumps(report, indent=1)))
        return
    with output.progress() as progress:
        found = inspect_path(path, hashes="full" if hashes else "sizes", progress=progress)

    def render() -> None:
        from lacache_trt.cli.inspect_view import show_inspection

        show_inspection(found)

    output.result(found, render)
