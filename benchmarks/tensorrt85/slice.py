"""LLaDA-8B's shape on TensorRT 8.5: one depth. Under Python 3.10 on the GPU machine.

    slice.py slice|shared LAYERS WEIGHTS_FOLDER LENGTH...

Builds fill and reuse over the random weights that `peers.py` wrote, then times the captured graphs
(device) and whole steps (host), and writes the layers' times and the inspector's report, one length
after the other. In a `slice` the embedding table is an input of the plans, in `shared` every large
weight is.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from on_device import (
    ROOT,
    Clock,
    build,
    layer_milliseconds,
    log_tensorrt,
    open_engine,
    replay_milliseconds,
    tensorrt,
    write_json,
)

from lacache_trt.engines.base import Canvas, Sampling
from lacache_trt.engines.tensorrt.layout import GRAPHS, WEIGHTS_FILE, layers_file

BLOCK, GENERATED, REPEATS, WARM_UP, SEED = 32, 256, 30, 5, 0
SMALL_PLAN = 30 * 10**6


def canvas_of(config: Any, columns: int) -> Canvas:
    """As `llada_shape.masked_canvas`, which needs torch: a random prompt and a masked answer."""
    rng = np.random.default_rng(SEED)
    generated = max(BLOCK, min(GENERATED, (columns - BLOCK) // BLOCK * BLOCK))
    tokens = rng.integers(0, config.mask_id, (1, columns)).astype(np.int32)
    tokens[:, columns - generated :] = config.mask_id
    positions = np.arange(columns, dtype=np.int32)[None]
    ends = np.zeros(1, np.int32), np.full(1, columns, np.int32)
    return Canvas(tokens, positions, *ends)


def greedy(config: Any, step: int) -> Sampling:
    """Sampling inputs of a greedy step."""
    return Sampling(
        temperature=np.zeros(1, np.float32),
        seed=np.zeros(1, np.int32),
        step=np.full(1, step, np.int32),
        guide_row=np.zeros(1, np.int32),
        cfg_scale=np.zeros(1, np.float32),
        suppress_ids=np.full((1, 1), config.mask_id, np.int32),
        confidence_exclude_ids=np.full((1, 1), -1, np.int32),
    )


def block_tokens(config: Any, step: int) -> Any:
    """A block with a random half of its positions committed."""
    rng = np.random.default_rng(step)
    tokens = np.full((1, BLOCK), config.mask_id, np.int32)
    chosen = rng.random(tokens.shape) < 0.5
    tokens[chosen] = rng.integers(0, config.mask_id, int(chosen.sum()))
    return tokens


def measure(trt: Any, engine: Any, length: int) -> dict[str, Any]:
    """Times of one canvas, and its predictions for a look at their plausibility."""
    config = engine.config
    canvas = canvas_of(config, length)
    columns = np.arange(length - BLOCK, length, dtype=np.int32)[None]
    session = engine.session()
    session.fill(canvas, columns)
    walls = []
    for step in range(WARM_UP + REPEATS):
        tokens, sampling = block_tokens(config, step), greedy(config, step)
        started = time.perf_counter()
        outputs = session.reuse(tokens, sampling)
        walls.append((time.perf_counter() - started) * 1e3)
    found = {
        "device_ms": replay_milliseconds(engine, session, REPEATS),
        "wall_ms": median(walls[WARM_UP:]),
        "cache_bytes": session.cache_bytes(),
        "scratch_bytes": engine._resources.scratch_bytes,
        "finite": bool(np.isfinite(outputs.confidence).all()),
        "mean_confidence": float(outputs.confidence.mean()),
        "tokens": outputs.token[0].tolist(),
    }
    found["layer_ms"] = layer_milliseconds(trt, engine, session)
    session.close()
    return found


def run(trt: Any, kind: str, layers: str, length: int, weights: Path) -> None:
    """Build, time and write one length."""
    clock, name = Clock(), f"{kind}.l{layers}.n{length}"
    out = ROOT / "work" / name / "engine"
    built = build(trt, ROOT / "models" / f"{kind}.{layers}" / f"n{length}", weights, out)
    clock.mark(f"{name}: build")
    with open_engine(built.manifest, trt) as engine:
        clock.mark("open")
        found = {**built.to_json(), **measure(trt, engine, length)}
        clock.mark("measure")
    results = Path(os.environ["TRT85_RESULTS"])
    for graph in GRAPHS:
        report = out / layers_file(graph)
        if report.is_file():
            shutil.copyfile(report, results / f"{name}.{graph}.layers.json")
    device, prefix = found["device_ms"], f"h200.trt85.{name.removeprefix('slice.')}"
    metrics = {
        f"{prefix}.exact_reuse_ms.fp16": device["reuse"],
        f"{prefix}.fill_ms.fp16": device["fill"],
        f"{prefix}.exact_reuse_wall_ms.fp16": found["wall_ms"],
        f"{prefix}.build_s": sum(found["build_s"].values()),
        f"{prefix}.plan_bytes": sum(found["plan_bytes"].values()),
    }
    print(json.dumps({**metrics, "constraints": built.constraints}, indent=1), flush=True)
    write_json(name, metrics, found)
    tidy(out)


def tidy(out: Path) -> None:
    """Small plans stay for a later run; gigabytes of weights, in plans or beside them, do not."""
    (out / WEIGHTS_FILE).unlink(missing_ok=True)
    for plan in out.glob("*.plan"):
        if plan.stat().st_size > SMALL_PLAN:
            plan.unlink()


def main() -> None:
    """Every length in one process: kernels that TensorRT compiled for one serve the next."""
    kind, layers, weights, *lengths = sys.argv[1:]
    log_tensorrt(f"{kind}.l{layers}.n{lengths[0]}")
    trt = tensorrt()
    for length in map(int, lengths):
        run(trt, kind, layers, length, Path(weights))


if __name__ == "__main__":
    main()
