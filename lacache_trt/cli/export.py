"""`lacache-trt export`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from lacache_trt.cli.command import verb
from lacache_trt.cli.output import Output
from lacache_trt.errors import InvalidRequestError
from lacache_trt.export.options import ExportOptions


@verb
def export(
    output: Output,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory or hub id.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Bundle directory to create.")],
    options: ExportOptions,
) -> None:
    """Export a LLaDA or Dream checkpoint into a bundle: graphs, weights, tokenizer, manifest."""
    from lacache_trt.cli.packages import load_part

    model = os.path.expanduser(model)
    _refuse_artefact(Path(model), out)
    exporter = load_part("lacache_trt.export.exporter", "export")
    with output.progress() as progress:
        report = exporter.export_bundle(model, out, options, progress)
    validation = dict(report.validation)
    data = {"out": str(report.out), "seconds": report.seconds, "validation": validation}

    def render() -> None:
        from lacache_trt.cli.tables import key_values, one_line

        key_values(
            f"bundle {report.out}",
            {"seconds": f"{report.seconds:.1f}", "validation": one_line(validation)},
        )
        print(f"next: lacache-trt build {report.out} ENGINE --engine NAME (see lacache-trt doctor)")

    output.result(data, render)


def _refuse_artefact(model: Path, out: Path) -> None:
    """A bundle or an engine has a manifest and no config.json."""
    if not (model / "manifest.json").is_file() or (model / "config.json").exists():
        return
    raise InvalidRequestError(
        "MODEL is a bundle or an engine already, not a checkpoint",
        got=f"{model}, which holds a manifest.json and no config.json",
        expected="a checkpoint directory or a hub id",
        fix=f"if it is a bundle, build it: lacache-trt build {model} {out}",
    )
