"""What the FP8 kernels are timed on, and beside which library calls.

GroupLinear at LLaDA-8B's FFN shapes over cold rotating weights; libraries: cuBLAS in bf16, and
`torch._scaled_mm` with one scale per row and with scales of 1 x 128 and 128 x 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from fp8_inputs import BF16, library_scales, scaled_product
from kernel_jobs import Job
from kernel_timing import L2_BYTES, Bench, rotations
from torch import Tensor

from lacache_trt.plugins import fp8
from lacache_trt.plugins.group_linear import kernel as group_linear
from lacache_trt.plugins.group_linear.finish import merge_kernel
from lacache_trt.plugins.group_linear.kernel import RULES, Geometry, merge_constants
from lacache_trt.plugins.rms_norm_quant import kernel as rms_norm_quant
from lacache_trt.plugins.swiglu_quant import kernel as swiglu_quant

SHAPES = ((24576, 4096), (4096, 12288))
ROWS = (32, 64, 128, 384, 1152, 2048)
PROGRAMS = (0, 132, 198, 264, 396, 528)
Calls = list[Callable[[], object]]


def stream(rows: int, columns: int, stages: int, step: int = 1) -> Geometry:
    return Geometry(rows, columns, 4, stages, streams=True, step=step)


def swept(rows: int) -> Iterator[Geometry]:
    """Geometries worth trying for a number of rows, without a split of K. All fit the registers."""
    if rows <= 32:
        for columns, stages, step in (
            (64, 3, 1), (64, 4, 1), (64, 6, 1), (64, 2, 2), (64, 3, 2), (128, 4, 1)
        ):  # fmt: skip
            yield stream(32, columns, stages, step=step)
    elif rows <= 64:
        for stages, step in ((3, 1), (4, 1), (5, 1), (2, 2), (3, 2)):
            yield stream(64, 64, stages, step=step)
        yield stream(32, 64, 4)
    elif rows <= 128:
        for tile, stages in ((128, 3), (128, 4), (64, 3), (64, 4)):
            yield stream(tile, 64, stages)
    if rows >= 128:
        for stages in (3, 4):
            yield Geometry(64, 128, 4, stages)
            yield Geometry(128, 64, 4, stages)
        for stages in (3, 4, 5):
            yield Geometry(128, 128, 8, stages)


def with_splits(geometry: Geometry, rows: int, columns: int, width: int) -> Iterator[Geometry]:
    """The geometry with every `programs` that leads to another number of splits."""
    seen = set()
    for programs in PROGRAMS if rows < 1000 else (0,):
        made = Geometry(**(vars(geometry) | {"programs": programs}))
        found = group_linear.splits(rows, columns, width // fp8.GROUP, made)
        if found not in seen:
            seen.add(found)
            yield made


def jobs() -> list[Job]:
    """Checks of what ships at every stage count, and of every swept geometry over fewer sizes."""
    found = [Job("group_linear_library", "linear library"), Job("accumulator", "accumulator")]
    for dtype in (torch.float16, BF16):
        name = str(dtype).removeprefix("torch.")
        found.append(Job("quantising", f"quantising {name}", {"dtype": dtype}))
        found.append(Job("group_linear_broken", f"broken {name}", {"dtype": dtype}))
        base = {"dtype": dtype, "geometry": None, "most_rows": 2048, "seeds": 3}
        found.append(Job("group_linear", f"linear shipping {name}", base))
    for geometry, most_rows in sorted(_checked(), key=lambda pair: pair[0].label):
        arguments = {"dtype": BF16, "geometry": geometry, "most_rows": most_rows}
        found.append(Job("group_linear", f"linear {geometry.label}", arguments))
    return found


def _checked() -> set[tuple[Geometry, int]]:
    """(geometry that splits, most rows to check it on)."""
    found = set()
    for rows in ROWS:
        for geometry in swept(rows):
            found.add((Geometry(**(vars(geometry) | {"programs": 264})), min(2048, 4 * rows)))
    for rule in RULES[90]:
        for stages in range(1, rule.geometry.stages + 1):
            made = Geometry(**(vars(rule.geometry) | {"stages": stages, "programs": 264}))
            found.add((made, min(2048, 4 * rule.most_rows)))
    best: dict[str, tuple[Geometry, int]] = {}
    for geometry, most in found:
        if geometry.label not in best or best[geometry.label][1] < most:
            best[geometry.label] = (geometry, most)
    return set(best.values())


class LinearBench:
    """Buffers of one linear and its library times."""

    def __init__(self, bench: Bench, columns: int, width: int) -> None:
        self.bench = bench
        self.columns, self.width = columns, width
        sets = max(3, rotations(columns * width))
        make = torch.randn(columns, width, device="cuda") * width**-0.5
        self.weights = [fp8.quantise_blocks(make.roll(i, 0)) for i in range(sets)]
        self.wide = [make.roll(i, 0).t().contiguous().to(BF16) for i in range(2)]
        largest = max(m.geometry.programs * 128 * 256 for m in RULES[90])
        self.workspace = torch.empty(max(largest, 528 * 128 * 256), device="cuda")

    def run(self, rows: int) -> None:
        """Libraries first, then every swept geometry."""
        x = torch.randn(rows, self.width, device="cuda")
        x *= torch.exp(torch.randn(self.width // 128, device="cuda")).repeat_interleave(128)
        quantised, scale = fp8.quantise_groups(x)
        scale = scale.t().contiguous().t()  # as the CUDA engine keeps it
        out = torch.empty(rows, self.columns, dtype=BF16, device="cuda")
        label = f"m{rows}.n{self.columns}.k{self.width}"
        flops = 2.0 * rows * self.columns * self.width
        moved = float(self.columns * self.width)
        dense = x.to(BF16)
        calls: Calls = [lambda w=w: torch.mm(dense, w, out=out) for w in self.wide]
        self.bench.time("cublas_bf16", label, "bf16", calls, flops, 2 * moved)
        best = self.libraries(label, quantised, scale, flops, moved)
        for shape in swept(rows):
            if f"group_linear {shape.label}" in self.bench.excluded:
                continue
            for geometry in with_splits(shape, rows, self.columns, self.width):
                count, _ = group_linear.splits(rows, self.columns, self.width // 128, geometry)
                calls = [
                    lambda w=w, g=geometry: group_linear.launch(
                        quantised, scale, *w, None, self.workspace, out, g
                    )
                    for w in self.weights
                ]
                name = f"{geometry.label}/{count}"
                self.bench.time("group_linear", label, name, calls, flops, moved, best)

    def libraries(
        self, label: str, quantised: Tensor, scale: Tensor, flops: float, moved: float
    ) -> float:
        """Microseconds of the blockwise `_scaled_mm`, or of the one with a scale per row."""
        row = scale.amax(1, keepdim=True).contiguous()
        column = scale.new_ones(1, self.columns)
        per_row: Calls = [
            lambda w=w: torch._scaled_mm(quantised, w.t(), row, column, out_dtype=BF16)
            for w, _ in self.weights
        ]
        by_row = self.bench.time("scaled_mm_rowwise", label, "torch", per_row, flops, moved)
        blockwise: Calls = []
        for w, ws in self.weights:
            stored, right = library_scales((quantised, scale, w, ws))
            blockwise.append(lambda w=w, s=stored, r=right: scaled_product((quantised, s, w, r)))
        took = self.bench.time("scaled_mm_block", label, "torch", blockwise, flops, moved)
        return took or by_row


def bench_quantising(bench: Bench, rows: int) -> None:
    """RMSNormQuant at D 4096 and SwiGLUQuant at F 12288, beside copies of as many bytes."""
    eps = torch.tensor([1e-5], device="cuda")
    pairs, copy = quantising_buffers(bench, "rms_norm_quant", rows, 4096, 4096)
    gain = torch.randn(4096, device="cuda").to(BF16)
    for warps in (2, 4, 8, 16):
        calls: Calls = [
            lambda x=x, to=to, w=warps: rms_norm_quant.launch(x, gain, eps, *to, w)
            for x, to in pairs
        ]
        moved = quantising_bytes(rows, 4096, 4096)
        bench.time("rms_norm_quant", f"n{rows}", f"w{warps}", calls, 0.0, moved, copy)
    pairs, copy = quantising_buffers(bench, "swiglu_quant", rows, 24576, 12288)
    for tile, warps in ((4, 1), (4, 2), (8, 2), (8, 4), (16, 4), (16, 8)):
        calls = [
            lambda x=x, to=to, t=tile, w=warps: swiglu_quant.launch(x, *to, t, w) for x, to in pairs
        ]
        moved = quantising_bytes(rows, 24576, 12288)
        bench.time("swiglu_quant", f"n{rows}", f"t{tile}w{warps}", calls, 0.0, moved, copy)


def quantising_bytes(rows: int, read: int, written: int) -> float:
    """bf16 in, E4M3 and scales out."""
    return rows * (2.0 * read + written + written / 32)


def quantising_buffers(
    bench: Bench, op: str, rows: int, read: int, written: int
) -> tuple[list[tuple[Tensor, tuple[Tensor, Tensor]]], float]:
    """Rotating (input, outputs), and the time of a copy of as many bytes."""
    moved = quantising_bytes(rows, read, written)
    half, pairs, copies = int(moved) // 4, [], []
    for _ in range(min(24, max(3, -(-2 * L2_BYTES // int(moved))))):
        quantised = torch.empty(rows, written, dtype=fp8.E4M3, device="cuda")
        scale = torch.empty(rows, written // 128, device="cuda")
        pairs.append((torch.randn(rows, read, device="cuda").to(BF16), (quantised, scale)))
        copies.append(torch.randn(2, half, device="cuda").to(BF16))
    copy: Calls = [lambda c=c: c[1].copy_(c[0]) for c in copies]
    return pairs, bench.time(f"copy_as_{op}", f"n{rows}", "torch", copy, 0.0, 4.0 * half)


def bench_merge(bench: Bench, rows: int, columns: int) -> None:
    """The second phase alone; its partial sums lie in L2, as after the first."""
    out = torch.empty(rows, columns, dtype=BF16, device="cuda")
    for splits in (2, 4, 8):
        partial = torch.randn(splits, rows, columns, device="cuda")
        for elements in (256, 512, 1024):
            constants = merge_constants(False) | {"ELEMENTS": elements}
            grid = (-(-rows * columns // elements),)
            calls: Calls = [
                lambda p=partial, g=grid, c=constants, s=splits: merge_kernel[g](
                    out, p, out, rows * columns, s, **c, num_warps=4, num_stages=1
                )
            ] * 8
            moved = rows * columns * (4.0 * splits + 2)
            name = f"e{elements}/{splits}"
            bench.time("group_linear_merge", f"m{rows}.n{columns}", name, calls, 0.0, moved)


def bench_large_copy(bench: Bench) -> None:
    """What a copy of 2 x 1 GB reaches."""
    source = torch.randn(1 << 29, device="cuda").to(BF16)
    target = torch.empty_like(source)
    bench.time("copy", "large", "torch", [lambda: target.copy_(source)] * 2, 0.0, 2.0 * 2**30)
