"""Device time of every kernel and library call of a step, at a model's own shapes.

Each is captured in one CUDA graph over rotating buffers larger than the L2, with random values.
Rates count the operations that the call has to do and the bytes that it has to move at least once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import lacache_trt
from lacache_trt.artifacts import load_manifest
from lacache_trt.bench import machine_facts, workload_facts
from lacache_trt.bench_report import BenchSettings, KernelReport, KernelTiming
from lacache_trt.engines.cuda.capture import microseconds_per_call
from lacache_trt.engines.cuda.engine import require_cuda
from lacache_trt.engines.cuda.gemm import GemmTable, weight_shapes
from lacache_trt.engines.cuda.ops import CudaOps
from lacache_trt.errors import InvalidRequestError
from lacache_trt.generation import GenerationConfig
from lacache_trt.model.config import ModelConfig
from lacache_trt.progress import Progress, SilentProgress

COLD_BYTES = 256 * 2**20
MOST_SETS = 16
LISTED_IDS = 8


@dataclass(frozen=True)
class Case:
    """One thing to time: a call per set of buffers, its operations and its bytes."""

    name: str
    calls: Sequence[Callable[[], object]]
    operations: float
    moved: float


@dataclass(frozen=True)
class Shapes:
    """The sizes of a step of one model."""

    config: ModelConfig
    dtype: torch.dtype
    rows: int
    columns: int
    block: int

    def draw(self, *shape: int) -> Tensor:
        """Normal values on the device."""
        return torch.randn(shape, device="cuda", dtype=self.dtype)

    def sets(self, elements: int) -> int:
        """Buffer sets that exceed the L2 together."""
        return max(2, min(MOST_SETS, -(-COLD_BYTES // (elements * self.dtype.itemsize))))

    def ranges(self) -> tuple[Tensor, Tensor, Tensor]:
        """valid_from, valid_to and the columns of a block in the middle."""
        start = (self.columns - self.block) // 2
        block = torch.arange(start, start + self.block, dtype=torch.int32, device="cuda")
        valid_from = torch.zeros(self.rows, dtype=torch.int32, device="cuda")
        return valid_from, valid_from + self.columns, block.expand(self.rows, -1).contiguous()


def bench_kernels(
    directory: Path,
    settings: BenchSettings | None = None,
    config: GenerationConfig | None = None,
    progress: Progress | None = None,
) -> KernelReport:
    """Time the kernels of the CUDA engine in `directory`; the weights are not read."""
    settings, config = settings or BenchSettings(), config or GenerationConfig()
    progress = progress or SilentProgress()
    manifest = load_manifest(directory, "engine", hashes="sizes")
    if manifest.body.get("engine") != "cuda":
        raise InvalidRequestError(
            "only the cuda engine has kernels to time",
            got=f"an engine of {manifest.body.get('engine')}",
            fix="use bench step or bench generate",
        )
    require_cuda()
    columns = -(-(settings.prompt_length + config.gen_length) // 64) * 64
    dtype = getattr(torch, str(manifest.body["dtype"]))
    shapes = Shapes(manifest.model, dtype, settings.batch, columns, config.block_length)
    ops = CudaOps(GemmTable.from_json(manifest.body.get("gemms")))
    timings = []
    progress.start("kernels")
    for case in cases(shapes, ops):
        timings.append(_timed(case))
        progress.advance()
    return KernelReport(
        "cuda",
        torch.cuda.get_device_name(),
        lacache_trt.__version__,
        machine_facts(),
        workload_facts(settings, config),
        tuple(timings),
    )


def cases(shapes: Shapes, ops: CudaOps) -> Iterator[Case]:
    """Linears, attention, token-wise kernels and the sampler."""
    many, few = shapes.rows * shapes.columns, shapes.rows * shapes.block
    for k, n in weight_shapes(shapes.config):
        counts = (few,) if n == shapes.config.vocab_size else (few, many)
        yield from (_linear(shapes, ops, m, k, n) for m in counts)
    yield from _attention(shapes, ops)
    yield from _token_wise(shapes, ops)
    yield _sampler(shapes, ops)


def _linear(shapes: Shapes, ops: CudaOps, m: int, k: int, n: int) -> Case:
    rows = shapes.draw(m, k)
    weights = [shapes.draw(k, n) for _ in range(shapes.sets(k * n))]
    moved = (m * k + k * n + m * n) * shapes.dtype.itemsize
    calls = [lambda w=weight: ops.linear(rows, w) for weight in weights]
    return Case(f"linear.m{m}.k{k}.n{n}", calls, 2.0 * m * k * n, moved)


def _attention(shapes: Shapes, ops: CudaOps) -> Iterator[Case]:
    config, b, n, bk = shapes.config, shapes.rows, shapes.columns, shapes.block
    hq, hkv, d, size = config.num_heads, config.num_kv_heads, config.head_dim, shapes.dtype.itemsize
    valid_from, valid_to, columns = shapes.ranges()
    count = shapes.sets((hq + 2 * hkv) * b * n * d)
    sets = [
        (shapes.draw(b, hq, n, d), shapes.draw(b, hkv, n, d), shapes.draw(b, hkv, n, d))
        for _ in range(count)
    ]
    few = [shapes.draw(b, heads, bk, d) for heads in (hq, hkv, hkv)]
    states = [ops.attention_fill(*each, valid_from, valid_to, columns) for each in sets]
    whole, token = 4.0 * b * hq * n * n * d, float(b * n * d)
    kv = 2.0 * hkv * token * size

    def case(name: str, calls: Sequence[Callable[[], object]], flops: float, moved: float) -> Case:
        return Case(f"{name}.b{b}.n{n}", calls, flops, moved)

    attended = [lambda s=each: ops.attention(*s, valid_from, valid_to) for each in sets]
    yield case("attention", attended, whole, 2 * hq * token * size + kv)
    split = [
        lambda s=each: ops.attention(few[0], s[1], s[2], valid_from, valid_to) for each in sets
    ]
    yield case("attention_last_layer", split, whole * bk / n, kv)
    filled = [lambda s=each: ops.attention_fill(*s, valid_from, valid_to, columns) for each in sets]
    yield case("attention_fill", filled, whole * (n - bk) / n, hq * token * (size + 4) + kv)
    reused = [
        lambda s=each, t=state: ops.attention_reuse(*few, *s, *t, valid_from, valid_to, columns)
        for each, state in zip(sets, states, strict=True)
    ]
    yield case("attention_reuse", reused, 2 * whole * bk / n, hq * token * (2 * size + 4) + kv)


def _token_wise(shapes: Shapes, ops: CudaOps) -> Iterator[Case]:
    config, b, n, size = shapes.config, shapes.rows, shapes.columns, shapes.dtype.itemsize
    width, ffn, total = config.hidden_size, config.intermediate_size, config.qkv_size
    weight, tokens = shapes.draw(width), b * n
    hidden = [shapes.draw(b, n, width) for _ in range(shapes.sets(2 * tokens * width))]
    norms = [lambda x=each: ops.norm(x, weight, config.norm_eps) for each in hidden]
    yield Case(f"rms_norm.n{tokens}", norms, 0.0, 2.0 * tokens * width * size)
    fused = [shapes.draw(b, n, total) for _ in range(shapes.sets(2 * tokens * total))]
    table = torch.rand(b, n, config.head_dim // 2, device="cuda")
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    ropes = [lambda f=each: ops.split_rope(f, table, table, *heads) for each in fused]
    yield Case(f"split_rope.n{tokens}", ropes, 0.0, 2.0 * tokens * total * size)
    gates = [shapes.draw(b, n, 2 * ffn) for _ in range(shapes.sets(3 * tokens * ffn))]
    activations = [lambda g=gate: ops.swiglu(g) for gate in gates]
    yield Case(f"swiglu.n{tokens}", activations, 0.0, 3.0 * tokens * ffn * size)


def _sampler(shapes: Shapes, ops: CudaOps) -> Case:
    b, bk, vocabulary = shapes.rows, shapes.block, shapes.config.vocab_size
    zeros = torch.zeros(b, device="cuda")
    whole = torch.zeros(b, dtype=torch.int32, device="cuda")
    guide = torch.arange(b, dtype=torch.int32, device="cuda")
    ids = torch.full((b, LISTED_IDS), -1, dtype=torch.int32, device="cuda")
    positions = torch.zeros(b, bk, dtype=torch.int32, device="cuda")
    sampling = (positions, zeros, whole, whole, guide, zeros, ids, ids)
    sets = [shapes.draw(b, bk, vocabulary) for _ in range(shapes.sets(b * bk * vocabulary))]
    calls = [lambda x=logits: ops.sample_block(x, *sampling) for logits in sets]
    moved = float(b * bk * vocabulary * shapes.dtype.itemsize)
    return Case(f"sample_block.r{b * bk}.v{vocabulary}", calls, 0.0, moved)


def _timed(case: Case) -> KernelTiming:
    took = microseconds_per_call(case.calls, torch.cuda.Stream())
    return KernelTiming(case.name, took, case.operations / took / 1e6, case.moved / took / 1e3)
