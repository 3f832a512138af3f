"""Whole generations on the CUDA engine: exact against plain, against ONNX Runtime, memory, limits.

`exact` and `none` differ in rounding only, so their tokens may differ only at near ties, which are
counted and printed; `near_ties` says what one is. Anything else fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from canvases import Shape, block_tokens, greedy

from lacache_trt import GenerationConfig, Runtime
from lacache_trt.demo.problems import problem
from lacache_trt.errors import ArtifactError, CapacityError

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
gpu_models = pytest.importorskip("gpu_models")
near_ties = pytest.importorskip("near_ties")
WIDE = replace(
    gpu_models.GROUPED,
    hidden_size=4096,
    num_layers=4,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=12288,
    vocab_size=126464,
    mask_id=126336,
    eos_ids=(126081,),
)
TINY = Path(__file__).parent.parent / "lacache_trt" / "demo" / "tiny-llada"
WANTED = GenerationConfig(gen_length=64, block_length=32, steps=64, stop_at_eos=False)


@dataclass
class Agreement:
    """Predictions compared, excused near ties."""

    compared: int = 0
    excused: int = 0

    def line(self, what: str) -> str:
        """For the log."""
        share = self.excused / max(1, self.compared)
        return f"{what}: {self.compared} predictions, {self.excused} near ties ({share:.4%})"


def test_exact_equals_plain_on_a_wide_model() -> None:
    """4 layers of LLaDA-8B's width; every path steps over the canvas that `exact` decodes."""
    weights = gpu_models.random_weights(WIDE, torch.bfloat16)
    kinds = (torch.float64, torch.bfloat16)
    truth, module = (gpu_models.DeviceSession(WIDE, weights, kind) for kind in kinds)
    found = near_ties.Predictions(torch.finfo(torch.bfloat16).eps)
    with gpu_models.engine_of(WIDE, weights) as engine:
        for seed in range(4):
            shape = Shape(224, 32, (128,), (0,), (224,), seed)
            near_ties.walk_block(engine, (truth, module), shape, 16, found)
    figures = found.figures()
    print(f"exact against plain, {WIDE.num_layers} layers: {figures}")
    assert figures["median_top1"] > 0.5
    assert figures["not_excused"] == 0
    worst = max(figures["exact_error_ulps"], figures["plain_error_ulps"])
    assert worst <= 2 * figures["module_error_ulps"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One fp16 checkpoint, exported and built for this engine."""
    pytest.importorskip("onnxscript", reason="exporting needs onnxscript")
    from synthetic import make_llada

    from lacache_trt.engines.builder import build_engine
    from lacache_trt.engines.options import BuildOptions
    from lacache_trt.export.exporter import export_bundle
    from lacache_trt.export.options import ExportOptions

    folder = tmp_path_factory.mktemp("built")
    make_llada(folder / "model", hidden=128, heads=2, kv_heads=1, ffn=192, seed=3, dtype="float16")
    export_bundle(
        str(folder / "model"), folder / "bundle", ExportOptions(validate="off", cache="exact")
    )
    build_engine(folder / "bundle", folder / "cuda", BuildOptions(engine="cuda"))
    return {name: folder / name for name in ("bundle", "cuda")}


@contextmanager
def onnxruntime_of(bundle: Path, folder: Path) -> Iterator[Runtime]:
    """The bundle on ONNX Runtime; skips where it is not installed."""
    pytest.importorskip("onnxruntime")
    from lacache_trt.engines.builder import build_engine
    from lacache_trt.engines.options import BuildOptions

    build_engine(bundle, folder / "onnxruntime", BuildOptions(engine="onnxruntime"))
    with Runtime.load(folder / "onnxruntime") as loaded:
        yield loaded


@pytest.fixture
def runtime(built: dict[str, Path]) -> Iterator[Runtime]:
    """The CUDA engine of `built`."""
    with Runtime.load(built["cuda"]) as loaded:
        yield loaded


def test_generations_equal_onnxruntime(
    built: dict[str, Path], runtime: Runtime, tmp_path: Path
) -> None:
    """Step by step over ONNX Runtime's canvas, and how many whole generations are equal."""
    counted, equal = Agreement(), 0
    with onnxruntime_of(built["bundle"], tmp_path) as reference:
        config = runtime.engine.config
        for seed in range(12):
            prompt = np.random.default_rng(seed).integers(0, 90, 9 + seed).tolist()
            results = [each.generate(prompt, WANTED) for each in (runtime, reference)]
            equal += results[0].tokens == results[1].tokens
            shape = Shape(70 + seed, 32, (24,), (0,), (70 + seed,), seed)
            canvas, columns = shape.canvas(config), shape.block_columns
            tokens, steps = block_tokens(canvas, columns), []
            for each in (runtime, reference):
                session = each.engine.session()
                session.fill(canvas, columns)
                steps.append(session.reuse(tokens, greedy(1, config), columns))
                session.close()
            found, want = steps
            error = np.abs(found.logits - want.logits).max()
            assert error < 8e-3 * np.abs(want.logits).max()
            best = np.partition(want.logits[0], -2, axis=-1)[:, -2:]
            differs = found.token[0] != want.token[0]
            assert (best[:, 1] - best[:, 0] <= 2 * error)[differs].all()
            counted.compared += differs.size
            counted.excused += int(differs.sum())
    print(counted.line(f"against onnxruntime, {equal} of 12 generations equal"))
    assert equal >= 6


@pytest.mark.skipif(not TINY.is_dir(), reason="the model that ships is not in this checkout")
def test_tiny_llada_equals_onnxruntime(tmp_path: Path) -> None:
    """Whole generations of the trained model: exact, none and, for a few, ONNX Runtime.

    `benchmarks/tiny_agreement.py` compares more of them, across machines.
    """
    pytest.importorskip("onnxscript", reason="exporting needs onnxscript")
    from lacache_trt.engines.builder import build_engine
    from lacache_trt.engines.options import BuildOptions
    from lacache_trt.export.exporter import export_bundle
    from lacache_trt.export.options import ExportOptions

    bundle = tmp_path / "bundle"
    export_bundle(str(TINY), bundle, ExportOptions(dtype="bfloat16", validate="off", cache="exact"))
    prompts = [problem("held-out", index).question for index in range(16)]
    build_engine(bundle, tmp_path / "cuda", BuildOptions(engine="cuda"))
    with Runtime.load(tmp_path / "cuda") as loaded:
        exact, none = (
            [loaded.generate(each, replace(WANTED, cache=cache)).tokens for each in prompts]
            for cache in ("exact", "none")
        )
    assert exact == none
    with onnxruntime_of(bundle, tmp_path) as reference:
        found = reference.generate(prompts[:4], replace(WANTED, cache="exact"))
    assert [each.tokens for each in found] == exact[:4]


def test_memory_stays_flat(runtime: Runtime) -> None:
    """A thousand generations of three lengths after a warm-up; this process's own memory."""
    wanted = replace(WANTED, gen_length=32, steps=4)
    prompts = [[1, 2, 3], list(range(50)), list(range(1, 80))]

    def held() -> tuple[int, int]:
        alone = "PYTEST_XDIST_WORKER" not in os.environ
        free, total = torch.cuda.mem_get_info()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        device = total - free if alone else torch.cuda.memory_reserved()
        return device, pages * os.sysconf("SC_PAGE_SIZE")

    for _ in range(20):
        for prompt in prompts:
            runtime.generate(prompt, wanted)
    before = held()
    for index in range(1000):
        runtime.generate(prompts[index % 3], wanted)
    device, host = (after - start for after, start in zip(held(), before, strict=True))
    print(f"after 1000 generations: device {device:+,} bytes, host {host:+,} bytes")
    assert device <= 4 * 2**20
    assert host <= 16 * 2**20


def test_a_canvas_that_does_not_fit_fails_before_capture() -> None:
    """Needed and free bytes are named, and nothing is allocated."""
    config = replace(WIDE, num_layers=1)
    with gpu_models.engine_of(config, gpu_models.random_weights(config, torch.bfloat16)) as engine:
        rows = 2048
        shape = Shape(4096, 32, (4000,) * rows, (0,) * rows, (4096,) * rows, 0)
        session, before = engine.session(), torch.cuda.memory_allocated()
        with pytest.raises(CapacityError, match="does not fit") as caught:
            session.fill(shape.canvas(config), shape.block_columns)
        assert "bytes free" in str(caught.value)
        assert torch.cuda.memory_allocated() == before
        small = Shape(64, 32, (32,), (0,), (64,), 0)
        session.fill(small.canvas(config), small.block_columns)
        tokens = block_tokens(small.canvas(config), small.block_columns)
        assert np.isfinite(session.reuse(tokens, greedy(1, config)).confidence).all()


def test_runtimes_one_after_another(built: dict[str, Path]) -> None:
    """A runtime after another's close, and two side by side, give the same tokens."""
    prompt, found = list(range(20)), set()
    for _ in range(3):
        with Runtime.load(built["cuda"]) as one:
            found.add(one.generate(prompt, WANTED).tokens)
    with Runtime.load(built["cuda"]) as one, Runtime.load(built["cuda"]) as two:
        found |= {one.generate(prompt, WANTED).tokens, two.generate(prompt, WANTED).tokens}
        one.close()
        found.add(two.generate(prompt, WANTED).tokens)
    assert len(found) == 1


def test_another_gpu_is_refused(built: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest names the compute capability that the GEMM table was measured on."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    with pytest.raises(ArtifactError, match="another GPU"):
        Runtime.load(built["cuda"])
