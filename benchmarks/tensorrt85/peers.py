"""What TensorRT 8.5 is compared with, on the same random weights: under the machine's own Python.

peers.py weights MODEL FOLDER       write the weights file that the lowered graphs of `slice.LAYERS`
                                    or `shared.LAYERS` refer to
peers.py measure LAYERS             our CUDA engine in float16 and bfloat16, and the eager
                                    reference in bfloat16, as `cuda_step.py` times them
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import reference_llada
import torch
from llada_shape import BLOCK, block_tokens, greedy, masked_canvas, middle_block, shallow
from llada_shape import random_weights as make_weights

from lacache_trt.engines.cuda.engine import CudaEngine
from lacache_trt.engines.cuda.gemm import measure_table

ROOT = Path(os.environ["TRT85_ROOT"])
RESULTS = Path(os.environ["TRT85_RESULTS"])
LENGTHS = (384, 1152)
PAIRS = ((128, 256), (128, 1024))
REPEATS, WARM_UP = 30, 5


def write_weights(name: str, folder: Path) -> None:
    """Random float16 weights at the offsets of the layout, one file."""
    model = ROOT / "models" / name
    facts = json.loads((model / "weights.json").read_text())
    config = replace(shallow(int(name.split(".")[1])), dtype="float16")
    weights = make_weights(config, "cuda", dtype=torch.float16)
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with open(folder / "weights.safetensors", "wb") as file:
        file.write((model / "weights.header").read_bytes())
        for name, offset in facts["offsets"].items():
            file.seek(offset)
            weights.pop(name).cpu().numpy().tofile(file)
    size = (folder / "weights.safetensors").stat().st_size
    if size != facts["size"]:
        raise RuntimeError(f"the weights file has {size} bytes instead of {facts['size']}")
    print(f"{size:,} bytes of weights in {time.perf_counter() - started:.1f} s", flush=True)


def measure_engine(layers: int, dtype: torch.dtype, metrics: dict[str, float]) -> None:
    """Device and wall-clock milliseconds of the CUDA engine."""
    label = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    config = replace(shallow(layers), dtype=str(dtype).removeprefix("torch."))
    weights = make_weights(config, "cuda", dtype=dtype)
    gemms = measure_table(config, dtype, sorted({BLOCK, *LENGTHS}))
    with CudaEngine(config, weights, gemms) as engine:
        for length in LENGTHS:
            canvas = masked_canvas(config, 1, length)
            blocks = middle_block(canvas)
            session = engine.session()
            session.fill(canvas, blocks)
            walls = []
            for step in range(WARM_UP + REPEATS):
                tokens = block_tokens(canvas, blocks, config, step)
                sampling = greedy(config, 1, step)
                started = time.perf_counter()
                session.reuse(tokens, sampling)
                walls.append((time.perf_counter() - started) * 1e3)
            name = f"h200.trt85.peer.l{layers}.n{length}"
            metrics[f"{name}.cuda_reuse_ms.{label}"] = median(
                session.milliseconds("reuse", REPEATS)
            )
            metrics[f"{name}.cuda_fill_ms.{label}"] = median(session.milliseconds("fill", REPEATS))
            metrics[f"{name}.cuda_reuse_wall_ms.{label}"] = median(walls[WARM_UP:])
            session.close()


def measure_reference(layers: int, metrics: dict[str, float]) -> None:
    """Milliseconds of the eager reference's step at the same lengths."""
    config = shallow(layers)
    network = reference_llada.build_reference(config, make_weights(config, "cuda"))
    found: dict[str, float] = {}
    reference_llada.measure(network, config, found, pairs=PAIRS, steps=12)
    for (prompt, generated), value in zip(PAIRS, found.values(), strict=True):
        metrics[f"h200.trt85.peer.l{layers}.n{prompt + generated}.reference_ms.bf16"] = value


def attempt(label: str, part: Callable[[], Any], failures: list[str]) -> None:
    """Run a part; a failure is reported and the others go on."""
    started = time.perf_counter()
    try:
        part()
    except Exception as error:
        failures.append(f"{label}: {type(error).__name__}: {error}")
        print(failures[-1], flush=True)
    torch.cuda.empty_cache()
    print(f"-- {label}: {time.perf_counter() - started:.1f} s", flush=True)


def main() -> int:
    """Write weights, or measure the peers."""
    torch.manual_seed(0)
    if sys.argv[1] == "weights":
        write_weights(sys.argv[2], Path(sys.argv[3]))
        return 0
    layers = int(sys.argv[2])
    metrics: dict[str, float] = {}
    failures: list[str] = []
    for dtype in (torch.float16, torch.bfloat16):
        attempt(f"cuda {dtype}", lambda d=dtype: measure_engine(layers, d, metrics), failures)
    attempt("reference", lambda: measure_reference(layers, metrics), failures)
    details = {"failures": failures, "torch": torch.__version__}
    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    found = {"metrics": metrics, "details": details, "versions": versions}
    text = json.dumps(found, indent=1)
    (RESULTS / f"peers.l{layers}.json").write_text(text)
    print(text, flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
