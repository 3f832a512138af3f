"""The CUDA engine on a GPU: every element against float64, repeatability, lanes, threads, memory.

Bounds. A step's logits may be at most twice as far from float64 as those of the same module run
with plain torch operators in the engine's dtype; the sampler's scores are compared with float64 on
the engine's own logits. A token may differ from float64 only where float64's two best logits are
closer than twice the largest error of that step's logits.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from canvases import Shape, block_tokens, greedy
from numpy.typing import NDArray

from lacache_trt.engines.base import StepOutputs

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
gpu_models = pytest.importorskip("gpu_models")
CONFIGS, SHAPES = gpu_models.CONFIGS, gpu_models.SHAPES
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HERE = Path(__file__).parent
every_model = pytest.mark.parametrize("name", CONFIGS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def scores_of(
    logits: NDArray[np.float64], suppressed: int, token: NDArray[np.int32]
) -> tuple[NDArray[np.float64], ...]:
    """confidence, margin and negative entropy in float64 of logits [B, Bk, V]."""
    kept = logits.copy()
    kept[..., suppressed] = -np.inf
    weights = np.exp(kept - kept.max(-1, keepdims=True))
    p = weights / weights.sum(-1, keepdims=True)
    best = np.partition(p, -2, axis=-1)[..., -2:]
    log_p = np.log(np.where(p > 0, p, 1))
    confidence = np.take_along_axis(p, token[..., None], -1)[..., 0]
    return confidence, best[..., 1] - best[..., 0], (p * log_p).sum(-1)


def check_step(
    found: StepOutputs, truth: StepOutputs, rounded: StepOutputs, suppressed: int
) -> None:
    """Logits, tokens and scores within the bounds of the module's docstring."""
    error = np.abs(found.logits - truth.logits.astype(np.float64))
    allowed = np.abs(rounded.logits - truth.logits.astype(np.float64))
    assert np.isfinite(found.logits).all()
    assert error.max() <= 2 * allowed.max(), (error.max(), allowed.max())
    assert np.sqrt((error**2).mean()) <= 1.5 * np.sqrt((allowed**2).mean())
    exact = truth.logits.astype(np.float64)
    exact[..., suppressed] = -np.inf
    best = np.partition(exact, -2, axis=-1)[..., -2:]
    differs = found.token != exact.argmax(-1)
    assert (best[..., 1] - best[..., 0] <= 2 * error.max())[differs].all()
    own = found.logits.astype(np.float64)
    own_best = own.copy()
    own_best[..., suppressed] = -np.inf
    np.testing.assert_array_equal(found.token, own_best.argmax(-1))
    wanted = scores_of(own, suppressed, found.token)
    for got, want, bound in zip(
        (found.confidence, found.margin, found.neg_entropy), wanted, (5e-6, 5e-6, 5e-5), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=bound)


@every_model
@every_dtype
def test_steps_against_float64(name: str, dtype: torch.dtype) -> None:
    """reuse and plain at every shape, one engine."""
    config = CONFIGS[name]
    weights = gpu_models.random_weights(config, dtype)
    truth = gpu_models.DeviceSession(config, weights, torch.float64)
    rounded = gpu_models.DeviceSession(config, weights, dtype)
    with gpu_models.engine_of(config, weights) as engine:
        for shape in SHAPES.values():
            canvas, columns = shape.canvas(config), shape.block_columns
            tokens, sampling = block_tokens(canvas, columns), greedy(shape.rows, config)
            session = engine.session()
            for each in (session, truth, rounded):
                each.fill(canvas, columns)
            want, near = (each.reuse(tokens, sampling, columns) for each in (truth, rounded))
            check_step(session.reuse(tokens, sampling, columns), want, near, config.mask_id)
            step = session.plain(canvas, columns, sampling, columns)
            check_step(step, want, near, config.mask_id)
            session.close()


@every_model
@every_dtype
def test_caches_against_float64(name: str, dtype: torch.dtype) -> None:
    """Embeddings to the bit, projections and attention state within a few ulp."""
    config = CONFIGS[name]
    weights = gpu_models.random_weights(config, dtype, seed=1)
    truth = gpu_models.DeviceSession(config, weights, torch.float64)
    eps = torch.finfo(dtype).eps
    with gpu_models.engine_of(config, weights) as engine:
        for shape in SHAPES.values():
            session = engine.session()
            for each in (session, truth):
                each.fill(shape.canvas(config), shape.block_columns)
            pads = -shape.length % 64
            found, want = session.cache_arrays(), truth.cache_arrays()
            np.testing.assert_array_equal(found["embed"][:, pads:], want["embed"])
            for row in range(shape.rows):
                real = slice(shape.valid_from[row], shape.valid_to[row])
                moved = slice(real.start + pads, real.stop + pads)
                for part in "qkv":
                    got, ref = found[part][row][:, moved], want[part][row][:, real]
                    assert np.abs(got - ref).max() <= 6 * eps * np.abs(want[part]).max(), part
                check_state(found, want, row, shape, pads, 12 * eps)
            session.close()


def check_state(
    found: dict[str, NDArray[np.float32]],
    want: dict[str, NDArray[np.float64]],
    row: int,
    shape: Shape,
    pads: int,
    bound: float,
) -> None:
    """Mean and log-sum of the state of one row's U columns; none if it has no U column."""
    columns = np.arange(shape.valid_from[row], shape.valid_to[row])
    start = shape.starts[row]
    outside = columns[(columns < start) | (columns >= start + shape.width)]
    if not len(outside):
        return
    means, sums = [], []
    for state, moved in ((found, outside + pads), (want, outside)):
        total = state["fa_sum"][row][:, moved].astype(np.float64)
        means.append(state["fa_acc"][row][:, moved] / total[..., None])
        sums.append(state["fa_max"][row][:, moved] + np.log(total))
    assert np.abs(means[0] - means[1]).max() <= bound * np.abs(want["v"]).max()
    assert np.abs(sums[0] - sums[1]).max() <= bound * max(1.0, np.abs(sums[1]).max())


@every_dtype
def test_reuse_is_bitwise_repeatable(dtype: torch.dtype) -> None:
    """Across replays, sessions, other work in between, engines and processes."""
    config, shape = CONFIGS["grouped"], SHAPES["padded_rows"]
    canvas, columns = shape.canvas(config), shape.block_columns
    tokens, sampling = block_tokens(canvas, columns), greedy(shape.rows, config)
    digests = set()
    with gpu_models.engine_of(config, gpu_models.random_weights(config, dtype)) as engine:
        first, second, other = (engine.session() for _ in range(3))
        for session in (first, second):
            session.fill(canvas, columns)
        for repeat in range(20):
            long = SHAPES["long"]
            other.fill(long.canvas(config), long.block_columns)
            other.plain(long.canvas(config), long.block_columns, greedy(long.rows, config))
            first.plain(canvas, columns, sampling, columns)
            session = (first, second)[repeat % 2]
            digests.add(gpu_models.outputs_digest(session.reuse(tokens, sampling, columns)))
    digests.add(gpu_models.step_digest(config, dtype, shape))
    kind = str(dtype).removeprefix("torch.")
    command = [sys.executable, str(HERE / "gpu_models.py"), "grouped", kind, "padded_rows"]
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_batch_equals_its_rows() -> None:
    """A row beside others is predicted as alone, up to the rounding of differently sized GEMMs."""
    config, shape = CONFIGS["grouped"], SHAPES["padded_rows"]
    canvas, columns = shape.canvas(config), shape.block_columns
    weights = gpu_models.random_weights(config, torch.float16)
    with gpu_models.engine_of(config, weights) as engine:
        session = engine.session()
        session.fill(canvas, columns)
        whole = session.reuse(block_tokens(canvas, columns), greedy(3, config), columns)
        for row in range(shape.rows):
            alone = type(canvas)(*(value[row : row + 1] for value in vars(canvas).values()))
            session.fill(alone, columns[row : row + 1])
            tokens = block_tokens(alone, columns[row : row + 1])
            step = session.reuse(tokens, greedy(1, config), columns[row : row + 1])
            error = np.abs(step.logits[0] - whole.logits[row]).max()
            assert error < 4e-3 * np.abs(step.logits).max()
            best = np.partition(step.logits[0], -2, axis=-1)[:, -2:]
            differs = step.token[0] != whole.token[row]
            assert (best[:, 1] - best[:, 0] <= 2 * error)[differs].all()


def test_threads_and_two_engines() -> None:
    """Eight threads over two engines give what each session gives alone."""
    config = CONFIGS["grouped"]
    weights = gpu_models.random_weights(config, torch.bfloat16)
    shapes = [Shape(100 + 9 * i, 32, (60,), (i,), (100 + 9 * i,), 20 + i) for i in range(8)]
    results: dict[int, set[str]] = {i: set() for i in range(8)}
    engines = [gpu_models.engine_of(config, weights) for _ in range(2)]

    def work(index: int, repeats: int) -> None:
        shape = shapes[index]
        canvas, columns = shape.canvas(config), shape.block_columns
        session = engines[index % 2].session()
        for _ in range(repeats):
            session.fill(canvas, columns)
            for _ in range(5):
                step = session.reuse(block_tokens(canvas, columns), greedy(1, config), columns)
                results[index].add(gpu_models.outputs_digest(step))
        session.close()

    threads = [threading.Thread(target=work, args=(index, 10)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
    for index in range(8):
        work(index, 1)
        assert len(results[index]) == 1, index
    engines[0].close()
    results[1].clear()
    work(1, 1)
    engines[1].close()
    assert len(results[1]) == 1
