"""`lacache-trt bench generate`, `step` and `kernels`: how fast an engine is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lacache_trt.bench_report import BenchReport, BenchSettings, KernelReport, StepReport
from lacache_trt.cli.command import WithoutFlags, verb
from lacache_trt.cli.output import Output
from lacache_trt.generation import GenerationConfig
from lacache_trt.progress import Progress

if TYPE_CHECKING:
    from lacache_trt.bench_compare import Change, SavedReport
    from lacache_trt.cli.result_files import ResultFiles

Report = BenchReport | StepReport | KernelReport


EngineDirectory = Annotated[Path, typer.Argument(metavar="ENGINES", help="Engine directory.")]
# --caches says which; answers never end early; refresh_every needs "cache", so --config has it.
_UNUSED = ("cache", "stop_at_eos", "stop_in_block", "eos_truncation", "eos_guard", "refresh_every")
Decoding = Annotated[GenerationConfig, WithoutFlags(_UNUSED)]
Steps = Annotated[BenchSettings, WithoutFlags(("caches",))]
SaveResult = Annotated[
    Path | None, typer.Option("--save-result", help="Also write the report as JSON.")
]
Compare = Annotated[
    Path | None, typer.Option("--compare", help="A saved report to show the changes against.")
]


@verb
def generate(
    output: Output,
    engines: EngineDirectory,
    config: Decoding,
    workload: BenchSettings,
    save_result: SaveResult = None,
    compare: Compare = None,
) -> None:
    """Measure whole generations from random prompts: ms per step for each cache, fills counted."""
    from lacache_trt.bench import bench_engine

    files = _Files.checked(save_result, compare, workload, config)
    _measure(output, partial(bench_engine, engines, workload, config), files)


@verb
def step(
    output: Output,
    engines: EngineDirectory,
    config: Decoding,
    workload: Steps,
    save_result: SaveResult = None,
    compare: Compare = None,
) -> None:
    """Measure fill, reuse and plain one by one."""
    from lacache_trt.bench_steps import bench_steps

    files = _Files.checked(save_result, compare, workload, config)
    _measure(output, partial(bench_steps, engines, workload, config), files)


@verb
def kernels(
    output: Output,
    engines: EngineDirectory,
    config: Decoding,
    workload: Steps,
    save_result: SaveResult = None,
    compare: Compare = None,
) -> None:
    """Measure what a CUDA engine launches."""
    from lacache_trt.engines.cuda.kernel_times import bench_kernels

    files = _Files.checked(save_result, compare, workload, config)
    _measure(output, partial(bench_kernels, engines, workload, config), files)


@dataclass(frozen=True)
class _Files:
    """Where the report goes and what it is compared with."""

    result: ResultFiles
    saved: SavedReport | None

    @classmethod
    def checked(
        cls,
        save_result: Path | None,
        compare: Path | None,
        workload: BenchSettings,
        config: GenerationConfig,
    ) -> _Files:
        """Raise for what can be known before a measurement, which would be lost after it."""
        from lacache_trt.bench import workload_facts
        from lacache_trt.bench_compare import read_saved
        from lacache_trt.cli.result_files import ResultFiles

        result = ResultFiles.checked(save_result)
        if compare is None:
            return cls(result, None)
        saved = read_saved(compare)
        saved.check("workload", workload_facts(workload, config))
        return cls(result, saved)


def _measure(output: Output, measurement: Callable[[Progress], Report], files: _Files) -> None:
    """Every number of a report comes from one run."""
    with output.progress() as progress:
        report = measurement(progress)
    data: dict[str, Any] = asdict(report)
    changes: list[Change] = []
    try:
        if files.saved is not None:
            from lacache_trt.bench_compare import compare

            changes = compare(files.saved, data)
            data["changes"] = [asdict(change) for change in changes]
    except Exception:
        files.result.save(data)
        raise
    files.result.deliver(output, data, lambda: _show(report, changes))


def _show(report: Report, changes: Sequence[Change]) -> None:
    from lacache_trt.cli.tables import key_values, one_line, table

    key_values(
        f"{report.engine} on {report.device}",
        {"machine": one_line(report.machine), "workload": one_line(report.workload)},
    )
    print()
    table("timings", *_timings(report))
    if changes:
        rows = [(change.name, change.old, change.new, change.ratio) for change in changes]
        table("changes", ("number", "old", "new", "new / old"), rows)
    for name in () if isinstance(report, KernelReport) else report.skipped:
        print(f"skipped: {name}, which the {report.engine} engine does not have")


def _timings(report: Report) -> tuple[Sequence[str], Iterable[Sequence[object]]]:
    from lacache_trt.cli.tables import human_bytes

    if isinstance(report, StepReport):
        columns = ("graph", "ms", "p95", "ms on device", "floor", "device / floor")
        return columns, [
            (t.graph, t.wall_ms, t.wall_ms_p95, *_on_device(t.device_ms, t.floor_ms))
            for t in report.timings
        ]
    if isinstance(report, KernelReport):
        return ("kernel", "us", "TFLOP/s", "GB/s"), [
            (t.kernel, t.microseconds, t.tflops, t.gbps) for t in report.timings
        ]
    names = (
        "cache", "ms/step", "ms/fill", "ms/block", "tokens/s", "tokens/forward", "caches", "speedup"
    )  # fmt: skip
    return names, [
        (
            t.cache,
            round(t.ms_per_step, 3),
            round(t.ms_per_fill, 3),
            round(t.block_ms_median, 2),
            round(t.tokens_per_second, 1),
            round(t.tokens_per_forward, 2),
            human_bytes(t.cache_bytes),
            round(t.speedup, 3),
        )
        for t in report.timings
    ]


def _on_device(device: float | None, floor: float | None) -> tuple[object, object, object]:
    ratio = device / floor if device is not None and floor else None
    return tuple("-" if value is None else value for value in (device, floor, ratio))  # type: ignore[return-value]
