"""How fast an engine denoises: milliseconds per step for each cache, fills counted.

Every cache decodes the same random prompts with the same settings in one process, so the numbers
of one report can be compared. A step is a forward of the whole batch.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean, median

import numpy as np

import lacache_trt
from lacache_trt.bench_report import BenchReport, BenchSettings, CacheTiming
from lacache_trt.combinations import WINDOW_CACHES
from lacache_trt.engines.base import Engine
from lacache_trt.errors import InvalidRequestError
from lacache_trt.generation import GenerationConfig, GenerationResult
from lacache_trt.model.config import DTYPE_BYTES, ModelConfig
from lacache_trt.progress import Progress, SilentProgress
from lacache_trt.runtime import Runtime

WHOLE_ANSWERS = {
    "stop_at_eos": False,
    "stop_in_block": False,
    "eos_truncation": None,
    "eos_guard": 0,
}
"""Settings with which nothing ends an answer early."""


def bench_engine(
    directory: Path,
    settings: BenchSettings | None = None,
    config: GenerationConfig | None = None,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure the engine in `directory`; generation never stops early, so the work is fixed.

    Caches that the engine does not have are left out and named in the report.

    Raises:
        InvalidRequestError: it has none of them.
    """
    settings, progress = settings or BenchSettings(), progress or SilentProgress()
    config = replace(config or GenerationConfig(), **WHOLE_ANSWERS)  # type: ignore[arg-type]
    asked = [_with_cache(config, name) for name in settings.cache_names]
    timings: list[CacheTiming] = []
    with Runtime.load(directory) as runtime:
        model = runtime.engine.config
        configs = _possible(asked, runtime.engine)
        prompts = random_prompts(model, settings)
        for chosen in configs:
            progress.start(f"cache {chosen.cache}", settings.warmup + settings.repeats)
            runs = _runs(runtime, prompts, chosen, settings, progress)
            baseline = timings[0].ms_per_step if timings else None
            timings.append(_timing(runs, chosen, settings, model, baseline))
        engine, device = runtime.engine.name, runtime.engine.device
    return BenchReport(
        engine,
        device,
        lacache_trt.__version__,
        machine_facts(),
        workload_facts(settings, config),
        tuple(timings),
        tuple(each.cache for each in asked if each not in configs),
    )


def _with_cache(config: GenerationConfig, name: str) -> GenerationConfig:
    refresh = config.refresh_every if name in WINDOW_CACHES else None
    return replace(config, cache=name, refresh_every=refresh)  # type: ignore[arg-type]


def _possible(configs: Sequence[GenerationConfig], engine: Engine) -> list[GenerationConfig]:
    """Those whose cache the engine has; a TensorRT engine, for example, has no `none`."""
    caches = engine.capabilities.caches
    possible = [config for config in configs if config.cache in caches]
    if not possible:
        raise InvalidRequestError(
            f"the {engine.name} engine has none of the caches to measure",
            got=", ".join(config.cache for config in configs),
            expected=", ".join(sorted(caches)),
            fix=f"--caches {','.join(sorted(caches))}",
        )
    return possible


def random_prompts(model: ModelConfig, settings: BenchSettings) -> list[list[int]]:
    """Seeded token ids without the mask and the end tokens."""
    ordinary = np.setdiff1d(np.arange(model.vocab_size), [model.mask_id, *model.eos_ids])
    drawn = np.random.default_rng(0).choice(ordinary, (settings.batch, settings.prompt_length))
    return [[int(token) for token in row] for row in drawn]


def _runs(
    runtime: Runtime,
    prompts: list[list[int]],
    config: GenerationConfig,
    settings: BenchSettings,
    progress: Progress,
) -> list[GenerationResult]:
    """The first row of each timed run; all rows of a run share its steps."""
    runs: list[GenerationResult] = []
    for run in range(settings.warmup + settings.repeats):
        results = runtime.generate(list(prompts), config)
        progress.advance()
        if run >= settings.warmup:
            runs.append(results[0] if isinstance(results, list) else results)
    return runs


def _timing(
    runs: Sequence[GenerationResult],
    config: GenerationConfig,
    settings: BenchSettings,
    model: ModelConfig,
    baseline: float | None,
) -> CacheTiming:
    blocks = [block for run in runs for block in run.blocks]
    forwards = sum(block.forwards for block in blocks)
    fills, steps = sum(b.fill_s for b in blocks), sum(b.steps_s for b in blocks)
    ms_per_step = 1e3 * (fills + steps) / forwards
    tokens = settings.batch * config.gen_length * len(runs)
    columns = settings.batch * (settings.prompt_length + config.gen_length)
    size = DTYPE_BYTES["float32"]
    held = columns * model.cache_bytes_per_token(size)
    if config.has_window:
        held += columns * 2 * model.num_layers * model.kv_size * size
    return CacheTiming(
        cache=config.cache,
        ms_per_step=ms_per_step,
        ms_per_reuse=1e3 * steps / forwards,
        ms_per_fill=1e3 * fills / len(blocks),
        block_ms_median=1e3 * median(block.fill_s + block.steps_s for block in blocks),
        first_block_ms=1e3 * median(run.blocks[0].fill_s + run.blocks[0].steps_s for run in runs),
        tokens_per_second=tokens / (fills + steps),
        tokens_per_forward=mean(run.tokens_per_forward for run in runs),
        cache_bytes=0 if config.cache == "none" else held,
        speedup=1.0 if baseline is None else baseline / ms_per_step,
    )


def workload_facts(settings: BenchSettings, config: GenerationConfig) -> dict[str, object]:
    """What is decoded; two reports are comparable if these agree."""
    return {
        "batch": settings.batch,
        "prompt_length": settings.prompt_length,
        "gen_length": config.gen_length,
        "block_length": config.block_length,
        "steps": config.steps,
        "policy": config.policy,
        "repeats": settings.repeats,
        **_changed(config),
    }


def _changed(config: GenerationConfig) -> dict[str, object]:
    """Settings that are not the defaults, as JSON has them."""
    changed = {
        field.name: config.setting(field.name)
        for field in fields(config)
        if config.setting(field.name) != field.metadata.get("default", field.default)
        and field.name not in ("cache", "deadline_s", *WHOLE_ANSWERS)
    }
    return {name: list(v) if isinstance(v, tuple) else v for name, v in changed.items()}


def machine_facts() -> dict[str, object]:
    """What the host is."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor()
