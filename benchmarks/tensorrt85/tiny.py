"""tiny-llada on TensorRT 8.5: one dtype, one block length. Under the GPU machine's Python 3.10.

    tiny.py float16|shared|fp8 BLOCK

`shared` is float16 with the large weights as inputs of both plans.

Whole generations of the held-out problems against ONNX Runtime's traces; the caches' addresses in
both plans; one captured graph for each plan through all steps; eager and captured bits; the same
step twice; and the inputs and output hashes of one step for `loader`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import traces
from on_device import (
    ROOT,
    Clock,
    build,
    copied,
    fnv1a,
    log_tensorrt,
    open_engine,
    replay_milliseconds,
    same_bits,
    tensorrt,
    write_json,
)

from lacache_trt.decoding import rows
from lacache_trt.engines.base import Sampling
from lacache_trt.generation import GenerationConfig

GENERATED, BATCH = 64, 4
# Of a gap between two probabilities. FP8 rounds to another value where two computations differ by
# an ulp next to the middle between two: `tests/test_fp8_engine.py` has 0.1 for logits.
BOUNDS = {"float16": 2e-2, "shared": 2e-2, "fp8": 5e-2}
REFERENCE = ROOT / "models" / "tiny.reference"


def decoding(block: int) -> GenerationConfig:
    """As in `graphs.decoding`."""
    return GenerationConfig(
        gen_length=GENERATED, block_length=block, steps=GENERATED, stop_at_eos=False
    )


class CountingDevice:
    """Counts what the engine captures and replays."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.captures = self.replays = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def capture(self, body: Callable[[], None]) -> Any:
        self.captures += 1
        return self._device.capture(body)

    def replay(self, graph: Any) -> None:
        self.replays += 1
        self._device.replay(graph)


def count_calls(engine: Any) -> CountingDevice:
    """Put a counting device in the place of the engine's."""
    counting = CountingDevice(engine._device)
    engine._device = counting
    object.__setattr__(engine._resources, "device", counting)
    return counting


def one_step(engine: Any, prompts: list[list[int]], block: int) -> tuple[Any, Any, Any]:
    """A session after `fill`, and what `reuse` takes, for the first batch."""
    canvas = rows.pad_left([tuple(each) for each in prompts[:BATCH]], GENERATED, engine.config)
    first = canvas.tokens.shape[1] - GENERATED
    columns = np.tile(np.arange(first, first + block, dtype=np.int32), (BATCH, 1))
    session = engine.session()
    session.fill(canvas, columns)
    sampling = Sampling(
        temperature=np.zeros(BATCH, np.float32),
        seed=np.zeros(BATCH, np.int32),
        step=np.zeros(BATCH, np.int32),
        guide_row=np.arange(BATCH, dtype=np.int32),
        cfg_scale=np.zeros(BATCH, np.float32),
        suppress_ids=rows.id_rows((engine.config.mask_id,), BATCH),
        confidence_exclude_ids=rows.id_rows((), BATCH),
    )
    return session, np.take_along_axis(canvas.tokens, columns, axis=1), sampling


def bound_in_place(session: Any) -> dict[str, bool]:
    """For every cache: fill writes it where reuse reads it."""
    calls = {graph: call for (graph, _), call in session._lane._calls.items()}
    fill, reuse = calls["fill"]._context, calls["reuse"]._context
    return {
        name: fill.get_tensor_address(name) == reuse.get_tensor_address(name) == address
        for name, address in session._lane._caches.items()
    }


def bits(engine: Any, session: Any, tokens: Any, sampling: Any) -> dict[str, bool]:
    """Eager against captured, and the same twice; the caches too."""
    calls = {graph: call for (graph, _), call in session._lane._calls.items()}

    def eager(graph: str) -> None:
        with engine._device.activated():
            calls[graph]._enqueue()
            engine._device.synchronize()

    session.reuse(tokens, sampling)
    replayed = copied(session.reuse(tokens, sampling))
    again = copied(session.reuse(tokens, sampling))
    eager("reuse")
    by_hand = {k: np.array(v) for k, v in session._lane._steps[0][1].arrays.items()}
    before = {name: array.copy() for name, array in session.cache_arrays().items()}
    with engine._device.activated():
        engine._device.replay(calls["fill"]._captured)
        engine._device.synchronize()
    replayed_caches = {name: array.copy() for name, array in session.cache_arrays().items()}
    eager("fill")
    return {
        "reuse_replay_equals_eager": same_bits(replayed, by_hand),
        "reuse_repeats": same_bits(replayed, again),
        "fill_replay_equals_first": same_bits(before, replayed_caches),
        "fill_eager_equals_replay": same_bits(replayed_caches, session.cache_arrays()),
    }


def dump_for_loader(session: Any, engine: Any, folder: Path) -> dict[str, str]:
    """Every input of the reuse plan as the device has it, and the hash of each output."""
    folder.mkdir(parents=True, exist_ok=True)
    lane, plan = session._lane, engine._resources.plans["reuse"]
    call = next(call for (graph, _), call in lane._calls.items() if graph == "reuse")
    hashes = {}
    with engine._device.activated():
        call._enqueue()
        engine._device.synchronize()
        cuda = engine._device._cuda
        for spec in (*plan.inputs, *plan.outputs):
            context = call._context
            shape = tuple(context.get_tensor_shape(spec.name))
            kind = {"bfloat16": "uint16"}.get(spec.dtype, spec.dtype)
            array = np.empty(shape, kind)
            cuda.memcpy_dtoh(array, context.get_tensor_address(spec.name))
            if spec in plan.inputs:
                array.tofile(folder / f"{spec.name}.bin")
            else:
                hashes[spec.name] = fnv1a(array.tobytes())
    return hashes


def prepare_weights(dtype: str, folder: Path) -> None:
    """tiny-llada's weights file: as it is where one was packed, else from its float16 data."""
    folder.mkdir(parents=True, exist_ok=True)
    model, target = ROOT / "models" / f"tiny.{dtype}", folder / "weights.safetensors"
    if (model / target.name).is_file():
        shutil.copyfile(model / target.name, target)
        return
    data = (ROOT / "models" / "tiny.reference" / "weights.float16").read_bytes()
    target.write_bytes((model / "weights.header").read_bytes() + data)


def reference_trace(dtype: str, block: int) -> traces.Arrays:
    """ONNX Runtime's: the dtype's own where there is one."""
    folder = ROOT / "models" / f"tiny.{dtype}"
    name = f"onnxruntime.bk{block}.npz"
    return traces.read((folder if (folder / name).is_file() else REFERENCE) / name)


def main() -> None:
    """Build, run, compare, write."""
    dtype, block = sys.argv[1], int(sys.argv[2])
    clock, name = Clock(), f"tiny.{dtype}.bk{block}"
    log_tensorrt(name)
    trt = tensorrt()
    clock.mark("import tensorrt")
    work = ROOT / "work" / name
    prepare_weights(dtype, work / "weights")
    model = ROOT / "models" / f"tiny.{dtype}" / f"bk{block}"
    built = build(trt, model, work / "weights", work / "engine", quick=True)
    clock.mark("build")
    details: dict[str, Any] = {"dtype": dtype, "block": block, **built.to_json()}
    prompts = json.loads((REFERENCE / "prompts.json").read_text())
    with open_engine(built.manifest, trt) as engine:
        clock.mark("open")
        device = count_calls(engine)
        session, tokens, sampling = one_step(engine, prompts, block)
        session.reuse(tokens, sampling)
        details |= {"in_place": bound_in_place(session)}
        details |= {"bits": bits(engine, session, tokens, sampling)}
        details |= {"replay_ms": replay_milliseconds(engine, session, 50)}
        details |= {"hashes": dump_for_loader(session, engine, work / "inputs")}
        session.close()
        clock.mark("checks")
        device.captures = device.replays = 0
        trace = traces.generate_traced(engine, prompts, decoding(block), BATCH)
        details |= {"captures": device.captures, "replays": device.replays}
        details |= {"reuse_steps": len(prompts) // BATCH * GENERATED}
        again = traces.generate_traced(engine, prompts[:BATCH], decoding(block), BATCH)
        details |= {"repeats": bool((again["tokens"] == trace["tokens"][:BATCH]).all())}
        clock.mark("generate")
        traces.save(work / "trace.npz", trace)
        reference = reference_trace(dtype, block)
        found = traces.compare(reference, trace, engine.config.mask_id, BOUNDS[dtype])
    details |= {"comparison": asdict(found), "bound": BOUNDS[dtype]}
    metrics = {
        f"h200.trt85.{name}.token_equal_fraction": found.equal_tokens,
        f"h200.trt85.{name}.equal_rows": found.equal_rows,
        f"h200.trt85.{name}.near_ties": found.near_ties,
        f"h200.trt85.{name}.wrong_rows": len(found.wrong),
    }
    print(json.dumps(details, indent=1), flush=True)
    write_json(name, metrics, details)


if __name__ == "__main__":
    main()
