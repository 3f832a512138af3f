"""Parts of `cuda_step`: the floor, the attribution and the profile of one step."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from statistics import median

import torch
from llada_shape import BLOCK, greedy, masked_canvas, middle_block
from step_variants import FullHead, FullLastLayer, UnfusedOps
from torch import Tensor

from lacache_trt.engines.cuda.capture import capture, replay_milliseconds
from lacache_trt.engines.cuda.engine import device_model
from lacache_trt.engines.cuda.floor import floor_milliseconds
from lacache_trt.engines.cuda.gemm import GemmTable
from lacache_trt.model.config import ModelConfig
from lacache_trt.model.programs import FillProgram, PlainProgram, ReuseProgram
from lacache_trt.model.transformer import Transformer

TRITON_NAME = re.compile(r"[a-z_]+_kernel")
Step = Callable[[], object]
Weights = Mapping[str, Tensor]


def floors(
    config: ModelConfig, weights: Weights, gemms: GemmTable, rows: int, columns: int, repeats: int
) -> dict[str, float]:
    """The floor of an exact step and of a step without caches."""
    found = {}
    for name, full in (("exact", False), ("plain", True)):
        sizes = (rows, columns, BLOCK)
        found[name] = floor_milliseconds(
            config, weights, gemms, sizes, repeats, full_first_layer=full
        )
        torch.cuda.empty_cache()
    return found


class StepInputs:
    """Device tensors of one step of one canvas, as the programs take them."""

    def __init__(self, model: Transformer, columns: int) -> None:
        config, device = model.config, model.weight("embed.weight").device
        canvas = masked_canvas(config, 1, columns)
        blocks = middle_block(canvas)
        arrays = {**vars(canvas), "block_columns": blocks, **vars(greedy(config, 1))}
        on_device = {name: torch.from_numpy(value).to(device) for name, value in arrays.items()}
        order = ("tokens", "positions", "valid_from", "valid_to", "block_columns")
        self.geometry = tuple(on_device[name] for name in order)
        self.block_tokens = self.geometry[0].gather(1, self.geometry[4].long())
        names = ("temperature", "seed", "step", "guide_row", "cfg_scale")
        lists = ("suppress_ids", "confidence_exclude_ids")
        self.sampling = tuple(on_device[name] for name in (*names, *lists))
        self.logit_columns = self.geometry[4].new_zeros(1, 0)
        with torch.inference_mode():
            self.caches = FillProgram(model)(*self.geometry)

    def reuse(self) -> tuple[Tensor, ...]:
        """Arguments of `ReuseProgram`."""
        _, positions, valid_from, valid_to, columns = self.geometry
        ranges = (columns, positions, valid_from, valid_to)
        step = (*self.sampling, self.logit_columns)
        return (self.block_tokens, *ranges, *self.caches, *step)

    def plain(self) -> tuple[Tensor, ...]:
        """Arguments of `PlainProgram`."""
        return (*self.geometry, *self.sampling, self.logit_columns)


def attribution(
    config: ModelConfig,
    weights: Weights,
    gemms: GemmTable,
    columns: int,
    repeats: int,
    metrics: dict[str, float],
) -> dict[str, float]:
    """Milliseconds of each variant; the differences are printed as gains."""
    model = device_model(config, weights, gemms)
    unfused = device_model(config, weights, gemms)
    unfused.ops = UnfusedOps(gemms)
    inputs = StepInputs(model, columns)
    programs: dict[str, Step] = {
        "exact": lambda: ReuseProgram(model)(*inputs.reuse()),
        "last_layer_full": lambda: FullLastLayer(model)(*inputs.reuse()),
        "head_full": lambda: FullHead(model)(*inputs.reuse()),
        "no_caches": lambda: PlainProgram(model)(*inputs.plain()),
        "unfused": lambda: ReuseProgram(unfused)(*inputs.reuse()),
    }
    stream = torch.cuda.Stream()
    found = {}
    for name, program in programs.items():
        graph = capture([program], stream)
        found[name] = median(replay_milliseconds(graph, stream, repeats))
        del graph
        torch.cuda.empty_cache()
    found["eager"] = _eager_milliseconds(programs["exact"])
    found["eager_unfused"] = _eager_milliseconds(programs["unfused"])
    _record(found, columns, metrics)
    return found


def _record(found: dict[str, float], columns: int, metrics: dict[str, float]) -> None:
    """Write the variants and their gains into `metrics`; print the gains."""
    gains = {
        "graph": found["eager"] - found["exact"],
        "fusion": found["unfused"] - found["exact"],
        "graph_and_fusion": found["eager_unfused"] - found["exact"],
        "last_layer_cut": found["last_layer_full"] - found["exact"],
        "block_only_head_and_sampler": found["head_full"] - found["last_layer_full"],
        "layer_0_caches": found["no_caches"] - found["exact"],
    }
    for name, value in found.items():
        metrics[f"h200.variant_ms.bf16.{name}.n{columns}"] = value
    for name, gain in gains.items():
        metrics[f"h200.gain_ms.bf16.{name}.n{columns}"] = gain
        print(
            f"N={columns} {name}: {gain:+.3f} ms, {100 * gain / found['exact']:+.1f}% of the step",
            flush=True,
        )


def _eager_milliseconds(step: Step, repeats: int = 8) -> float:
    """Wall-clock median of a step launched kernel by kernel."""
    times = []
    with torch.inference_mode():
        for _ in range(repeats + 2):
            torch.cuda.synchronize()
            started = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - started) * 1e3)
    return median(times[2:])


def profile_tables(
    config: ModelConfig, weights: Weights, gemms: GemmTable, columns: int
) -> dict[str, object]:
    """Kernels of one replay by name, and device time of one eager run by operator and shape."""
    from torch.profiler import ProfilerActivity, profile

    model = device_model(config, weights, gemms)
    inputs = StepInputs(model, columns)
    program = ReuseProgram(model)
    stream = torch.cuda.Stream()
    graph = capture([lambda: program(*inputs.reuse())], stream)
    replay_milliseconds(graph, stream, 3)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler, torch.cuda.stream(stream):
        graph.replay()
        torch.cuda.synchronize()
    kernels = _kernel_rows(profiler)
    _print_rows(f"N={columns}: kernels of one replay", kernels)
    del graph
    with torch.inference_mode(), profile(activities=activities, record_shapes=True) as profiler:
        program(*inputs.reuse())
        torch.cuda.synchronize()
    operators = _operator_rows(profiler)
    _print_rows(f"N={columns}: operators of one eager step", operators)
    return {"kernels": kernels, "operators": operators}


Row = tuple[str, int, float]
"""Name, count, microseconds in all."""


def _kernel_rows(profiler: torch.profiler.profile) -> list[Row]:
    counts: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for event in profiler.events():
        if "CUDA" in str(event.device_type):
            name = str(event.name)[:90]
            counts[name] += 1
            total[name] += float(event.device_time_total)  # type: ignore[assignment]
    return [(name, counts[name], float(time_)) for name, time_ in total.most_common(40)]


def _operator_rows(profiler: torch.profiler.profile) -> list[Row]:
    """Torch operators by input shape, and this toolkit's kernels, which belong to none."""
    rows = [
        (f"{row.key} {row.input_shapes}"[:90], int(row.count), float(row.self_device_time_total))
        for row in profiler.key_averages(group_by_input_shape=True)
        if row.self_device_time_total > 0
        and ("CUDA" not in str(row.device_type) or TRITON_NAME.fullmatch(str(row.key)))
    ]
    return sorted(rows, key=lambda row: -row[2])[:40]


def _print_rows(title: str, rows: list[Row]) -> None:
    whole = sum(row[2] for row in rows)
    print(f"{title}: {whole / 1e3:.3f} ms in {sum(row[1] for row in rows)}")
    for name, count, time_ in rows[:25]:
        print(f"  {time_:9.1f} us {100 * time_ / whole:5.1f}% {count:4d} x  {name}")
    print(flush=True)
