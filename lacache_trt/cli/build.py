"""`lacache-trt build`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lacache_trt.cli.command import PrefixedFlags, WithoutFlags, verb
from lacache_trt.cli.output import Output
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.registry import require_legacy
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.errors import InvalidRequestError
from lacache_trt.model.fp8 import Fp8Recipe

if TYPE_CHECKING:
    from lacache_trt.engines.builder import BuildReport

DRY_RUN_HELP = "Show what would be built with TensorRT, and the memory it would take."
FP8_HELP = "Quantise linears to FP8; the bundle is not changed."
CALIBRATION: Any = typer.Option(
    "--calibration",
    metavar="FILE.jsonl",
    help="Prompts that static FP8 scales are measured on, a JSON line each: "
    'a string, token ids or {"prompt": ...}.',
)


@verb
def build(
    output: Output,
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Bundle directory.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Engine directory to create.")],
    options: Annotated[BuildOptions, WithoutFlags(("tensorrt", "fp8", "calibration"))],
    tensorrt: TensorRTOptions,
    recipe: Annotated[Fp8Recipe, PrefixedFlags("fp8")],
    fp8: Annotated[bool, typer.Option("--fp8", help=FP8_HELP)] = False,
    calibration: Annotated[Path | None, CALIBRATION] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help=DRY_RUN_HELP)] = False,
) -> None:
    """Build an engine from a bundle.

    `--engine auto` means TensorRT, else TensorRT-RTX where this machine can use it, else exit
    code 3 with the other choices: an engine is never replaced by another one silently.
    An engine is built for this machine's GPU. `--engine tensorrt-rtx --sm 89` builds for an L40S or
    RTX GPU of another machine and needs no GPU here. The flags from --sm to --timing-cache are
    for TensorRT and TensorRT-RTX only. Flags that begin with --fp8- say what --fp8 quantises.
    """
    from lacache_trt.cli.packages import load_part

    if not fp8 and recipe != Fp8Recipe():
        raise InvalidRequestError(
            "the FP8 flags say what to quantise, and nothing is quantised",
            got="flags that begin with --fp8-, without --fp8",
            fix="add --fp8",
        )
    options = replace(
        options, tensorrt=tensorrt, fp8=recipe if fp8 else None, calibration=calibration
    )
    if tensorrt.trt_version is not None and options.engine == "tensorrt":
        require_legacy(tensorrt.trt_version)
    if dry_run:
        _dry_run(output, bundle, options)
        return
    builder = load_part("lacache_trt.engines.builder", "export")
    with output.progress() as progress:
        report = builder.build_engine(bundle, out, options, progress)
    for warning in report.warnings:
        output.note(f"warning: {warning}")
    _show_built(output, report)


def _show_built(output: Output, report: BuildReport) -> None:
    data = {
        "out": str(report.out),
        "engine": report.engine,
        "seconds": report.seconds,
        "total_bytes": report.total_bytes,
        "warnings": list(report.warnings),
    }

    def render() -> None:
        from lacache_trt.cli.next_step import generate_line
        from lacache_trt.cli.tables import human_bytes, key_values
        from lacache_trt.engines.builder import DERIVED

        key_values(
            f"engine {report.out}",
            {
                "engine": report.engine,
                "size": human_bytes(report.total_bytes),
                "seconds": f"{report.seconds:.1f}",
            },
        )
        if (report.out / DERIVED).is_dir():
            print(f"kept: {report.out / DERIVED}, the quantised bundle; `verify` compares with it")
        print(f"next: {generate_line(report.out)}")

    output.result(data, render)


def _dry_run(output: Output, bundle: Path, options: BuildOptions) -> None:
    from lacache_trt.artifacts import load_manifest
    from lacache_trt.cli.packages import load_part
    from lacache_trt.engines.registry import AUTO, TENSORRT_ENGINES

    if options.engine not in (AUTO, *TENSORRT_ENGINES):
        raise InvalidRequestError(
            "--dry-run shows TensorRT builds only",
            got=f"--engine {options.engine}",
            expected=f"--engine {' or '.join((AUTO, *TENSORRT_ENGINES))}",
        )
    estimate = load_part("lacache_trt.engines.tensorrt.estimate", "export")
    planned = estimate.plan_build(load_manifest(bundle, "bundle", hashes="sizes"), options)

    def render() -> None:
        from lacache_trt.cli.build_view import show_planned

        show_planned(planned)

    output.result(planned, render)
