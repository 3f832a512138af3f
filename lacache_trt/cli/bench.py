"""`lacache-trt bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lacache_trt.bench_report import BenchReport, BenchSettings
from lacache_trt.cli.command import WithoutFlags, verb
from lacache_trt.cli.output import Output
from lacache_trt.generation import GenerationConfig


@verb
def bench(
    output: Output,
    engines: Annotated[Path, typer.Argument(metavar="ENGINES", help="Engine directory.")],
    config: Annotated[GenerationConfig, WithoutFlags(("cache", "stop_at_eos"))],
    workload: BenchSettings,
    save_result: Annotated[
        Path | None, typer.Option("--save-result", help="Also write the report as JSON.")
    ] = None,
) -> None:
    """Measure milliseconds per denoising step for each cache, fills counted, in one run."""
    import json
    from dataclasses import asdict

    from lacache_trt.bench import bench_engine

    with output.progress() as progress:
        report = bench_engine(engines, workload, config, progress)
    data = asdict(report)
    if save_result is not None:
        save_result.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    output.result(data, lambda: _show(report))


def _show(report: BenchReport) -> None:
    from lacache_trt.cli.tables import human_bytes, key_values, one_line, table

    key_values(
        f"{report.engine} on {report.device}",
        {"machine": one_line(report.machine), "workload": one_line(report.workload)},
    )
    print()
    columns = ("cache", "ms/step", "ms/fill", "ms/block", "tokens/s", "caches", "speedup")
    rows = [
        (
            timing.cache,
            round(timing.ms_per_step, 3),
            round(timing.ms_per_fill, 3),
            round(timing.block_ms_median, 2),
            round(timing.tokens_per_second, 1),
            human_bytes(timing.cache_bytes),
            round(timing.speedup, 3),
        )
        for timing in report.timings
    ]
    table("timings", columns, rows)
