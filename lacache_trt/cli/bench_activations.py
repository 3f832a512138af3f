"""`lacache-trt bench activations`: what the FFNs' linears receive, as figures and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lacache_trt.accuracy.settings import ActivationSettings
from lacache_trt.cli.command import verb
from lacache_trt.cli.output import Output

if TYPE_CHECKING:
    from lacache_trt.accuracy.activations import Atlas


@verb
def activations(
    output: Output,
    settings: ActivationSettings,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Checkpoint directory. [default: tiny-llada]"),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            help='Prompts, a JSON line each: a string, token ids or {"prompt": ...}.',
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw heat maps into this PNG file.")
    ] = None,
    save_result: Annotated[
        Path | None, typer.Option("--save-result", help="Also write the report as JSON.")
    ] = None,
) -> None:
    """Record the largest activation of each channel before the FFNs' linears, step by step.

    Says what FP8 per group would add as noise in each layer, and which layers to exclude.
    """
    from lacache_trt.cli.packages import load_part
    from lacache_trt.cli.result_files import ResultFiles

    files = ResultFiles.checked(save_result, plot)
    draw = load_part("lacache_trt.accuracy.plots", "plots").draw if plot is not None else None
    recorder = load_part("lacache_trt.accuracy.activations", "export")
    prompts = None
    if calibration is not None:
        from lacache_trt.prompt_file import read_prompt_file

        prompts = read_prompt_file(calibration).prompts
    with output.progress() as progress:
        atlas = recorder.record(settings, model, prompts, progress)
    drawn = None if draw is None else files.draw(lambda path: draw(atlas, path))
    data = {**atlas.to_json(), "plot": None if drawn is None else str(drawn)}
    files.deliver(output, data, lambda: _show(atlas, drawn))


def _show(atlas: Atlas, plot: Path | None) -> None:
    from lacache_trt.cli.tables import key_values, one_line, table

    key_values(f"{atlas.model} on {atlas.device}", {"workload": one_line(atlas.workload)})
    print()
    columns = ("linear", "largest", "median channel", "ratio", "channels > 6x", "FP8 output, dB")
    rows = [
        (
            row.linear,
            row.largest,
            row.median_channel,
            row.outlier_ratio,
            row.outlier_channels,
            row.sqnr_db,
        )
        for row in atlas.linears
    ]
    table("inputs of the FFNs' linears", columns, rows)
    layers = ", ".join(map(str, atlas.suggested)) or "none"
    print(f"\nlayers to leave in 16 bits: {layers}\n{atlas.rule}")
    if plot is not None:
        print(f"heat maps: {plot}")
