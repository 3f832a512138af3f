"""What is timed: each op's configurations at LLaDA-8B's shapes, beside a library's kernel."""

from __future__ import annotations

from collections.abc import Callable

import kernel_checks as checks
import torch
import torch.nn.functional as F
from kernel_references import AttentionInputs, AttentionShape, attention_inputs, sample_inputs
from kernel_sweep import (
    BF16,
    HEAD_DIM,
    REUSE_BLOCK_KEYS,
    REUSE_TILES,
    SAMPLE_CHUNKS,
    SPLIT_TILES,
    STREAM_TILES,
)
from kernel_timing import Bench, rotations
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lacache_trt.plugins.attention import kernel as attention
from lacache_trt.plugins.attention_fill import kernel as fill
from lacache_trt.plugins.attention_reuse import kernel as reuse
from lacache_trt.plugins.rms_norm import kernel as rms_norm
from lacache_trt.plugins.rope import kernel as rope
from lacache_trt.plugins.sample_block import kernel as sample_block
from lacache_trt.plugins.swiglu import kernel as swiglu
from lacache_trt.plugins.triton_support import Tiles

PARTS = ("attention", "sample", "tokenwise")
LENGTHS = (384, 1152, 2048, 4096)
HEADS, BLOCK = 32, 32
WIDTH, FFN, VOCABULARY = 4096, 12288, 126464


def sdpa(inputs: AttentionInputs, q: Tensor, backend: SDPBackend) -> Callable[[], object]:
    def call() -> None:
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, inputs.k, inputs.v)

    return call


def bench_attention(bench: Bench, length: int) -> None:
    """Fill, reuse and attention at one length, beside cuDNN and flash SDPA."""
    shape = AttentionShape(HEADS, HEADS, length, HEAD_DIM, BLOCK, ((0, length),), (length // 2,))
    elements = HEADS * length * HEAD_DIM
    sets = rotations(elements * 12)
    inputs = [attention_inputs(shape, BF16, "cuda", seed) for seed in range(sets)]
    states = [checks.run_fill(each, None) for each in inputs]
    outs = [torch.empty(1, length, WIDTH, dtype=BF16, device="cuda") for _ in inputs]
    label = f"n{length}"
    flops = 4.0 * length * length * HEADS * HEAD_DIM
    moved = 8.0 * elements
    cudnn = bench.time(
        "sdpa", label, "cudnn", [sdpa(i, i.q, SDPBackend.CUDNN_ATTENTION) for i in inputs],
        flops, moved,
    )  # fmt: skip
    flash = [sdpa(i, i.q, SDPBackend.FLASH_ATTENTION) for i in inputs]
    bench.time("sdpa", label, "flash", flash, flops, moved, cudnn)
    outside = flops * (length - BLOCK) / length
    for tiles in STREAM_TILES:
        calls = [fill_call(i, s, tiles) for i, s in zip(inputs, states, strict=True)]
        bench.time("fill", label, tiles.label, calls, outside, 10.0 * elements, cudnn)
        calls = [attention_call(i, i.q, o, tiles) for i, o in zip(inputs, outs, strict=True)]
        bench.time("attention", label, tiles.label, calls, flops, moved, cudnn)
    block_flops = 2 * flops * BLOCK / length
    step_bytes = (8.0 + 4.0) * elements
    fresh = [tuple(part.clone() for part in checks.run_fill(i, None)) for i in inputs]
    for tiles in REUSE_TILES:
        calls = [reuse_call(*each, tiles) for each in zip(inputs, fresh, outs, strict=True)]
        bench.time("reuse", label, tiles.label, calls, block_flops, step_bytes, cudnn)
    for block_keys in REUSE_BLOCK_KEYS:
        calls = [
            reuse_call(*each, None, block_keys) for each in zip(inputs, fresh, outs, strict=True)
        ]
        name = f"block keys {block_keys}"
        bench.time("reuse", label, name, calls, block_flops, step_bytes, cudnn)
    pair = [
        both(fill_call(i, s, None), reuse_call(i, s, o, None))
        for i, s, o in zip(inputs, states, outs, strict=True)
    ]
    bench.time("pair", label, "shipping", pair, flops, 22.0 * elements, cudnn)
    bench_split(bench, inputs, label, length)


def bench_split(bench: Bench, inputs: list[AttentionInputs], label: str, length: int) -> None:
    """The last layer: 32 query rows on all keys."""
    flops = 4.0 * BLOCK * length * HEADS * HEAD_DIM
    moved = 4.0 * HEADS * length * HEAD_DIM
    library = min(
        bench.time("sdpa_m32", label, name, [sdpa(i, i.q_c, b) for i in inputs], flops, moved)
        for name, b in (
            ("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)
        )
    )  # fmt: skip
    size = attention.workspace_size(1, HEADS, HEADS, BLOCK, length, HEAD_DIM)
    workspace = torch.empty(size, device="cuda")
    out = torch.empty(1, BLOCK, WIDTH, dtype=BF16, device="cuda")
    for tiles in SPLIT_TILES:
        calls = [attention_call(i, i.q_c, out, tiles, workspace) for i in inputs]
        bench.time("split", label, tiles.label, calls, flops, moved, library)


def fill_call(i: AttentionInputs, state: list[Tensor], tiles: Tiles | None) -> Callable[[], None]:
    return lambda: fill.launch(
        i.q, i.k, i.v, i.valid_from, i.valid_to, i.block_columns, *state, tiles=tiles
    )


def attention_call(
    i: AttentionInputs, q: Tensor, out: Tensor, tiles: Tiles, workspace: Tensor | None = None
) -> Callable[[], None]:
    return lambda: attention.launch(
        q, i.k, i.v, i.valid_from, i.valid_to, workspace, out, tiles=tiles
    )


def reuse_call(
    i: AttentionInputs, state: list[Tensor], out: Tensor, tiles: Tiles | None,
    block_keys: int = 64,
) -> Callable[[], None]:  # fmt: skip
    size = reuse.workspace_size(1, HEADS, HEADS, i.q.shape[2], BLOCK, HEAD_DIM)
    workspace = torch.empty(size, device="cuda")
    return lambda: reuse.launch(
        i.q_c, i.k_c, i.v_c, i.q, i.k, i.v, *state, i.valid_from, i.valid_to, i.block_columns,
        workspace, out, tiles=tiles, block_keys=block_keys,
    )  # fmt: skip


def both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call


def bench_tokenwise(bench: Bench, rows: int) -> None:
    """Norm, activation and RoPE at one number of tokens, beside a copy of as many bytes."""
    label, device = f"n{rows}", "cuda"
    sets = rotations(rows * WIDTH * 8)
    x = [torch.randn(rows, WIDTH, device=device).to(BF16) for _ in range(4 * sets)]
    quads = [x[i : i + 4] for i in range(0, len(x), 4)]
    weight = torch.randn(WIDTH, device=device).to(BF16)
    moved = 8.0 * rows * WIDTH
    copy = bench.time(
        "copy", label, "2 of 4 tensors",
        [both(lambda q=q: q[2].copy_(q[0]), lambda q=q: q[3].copy_(q[1])) for q in quads],
        0.0, moved,
    )  # fmt: skip
    for warps in (4, 8, 16):
        calls = [
            lambda q=q, w=warps: rms_norm.launch(q[0], q[1], weight, q[2], q[3], 1e-5, w)
            for q in quads
        ]
        bench.time("rms_norm", label, f"w{warps}", calls, 0.0, moved, copy)
    sets = rotations(rows * FFN * 6)
    wide = [torch.randn(rows, 2 * FFN, device=device).to(BF16) for _ in range(sets)]
    narrow = [torch.empty(rows, FFN, dtype=BF16, device=device) for _ in range(sets)]
    pairs = list(zip(wide, narrow, strict=True))
    for columns, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        calls = [lambda p=p, c=columns, w=warps: swiglu.launch(*p, c, w) for p in pairs]
        bench.time("swiglu", label, f"c{columns}w{warps}", calls, 0.0, 6.0 * rows * FFN)
    tables = rope.angle_tables(
        torch.arange(rows, device=device)[None], torch.rand(HEAD_DIM // 2, device=device)
    )
    qkv = [w[:, : 3 * WIDTH].contiguous()[None] for w in wide]
    heads = [[torch.empty(1, HEADS, rows, HEAD_DIM, dtype=BF16, device=device)
              for _ in range(3)] for _ in wide]  # fmt: skip
    for tokens, group, warps in ((16, 8, 4), (16, 4, 4), (8, 8, 4), (32, 4, 4), (32, 8, 8)):
        calls = [
            lambda s=s, h=h, t=(tokens, group, warps): rope.launch(s, *tables, *h, *t)
            for s, h in zip(qkv, heads, strict=True)
        ]
        shape = f"t{tokens}h{group}w{warps}"
        bench.time("rope", label, shape, calls, 0.0, 12.0 * rows * WIDTH)


def bench_sample(bench: Bench) -> None:
    """32 rows of the vocabulary; the library column is torch.argmax alone."""
    label = f"r32.v{VOCABULARY}"
    moved = 2.0 * BLOCK * VOCABULARY
    cold = [sample_inputs(1, BLOCK, VOCABULARY, BF16, "cuda", seed) for seed in range(24)]
    hot = [sample_inputs(1, BLOCK, VOCABULARY, BF16, "cuda", s, temperature=1.0) for s in range(24)]
    library = bench.time(
        "argmax", label, "torch", [lambda i=i: i.logits.argmax(-1) for i in cold], 0.0, moved
    )
    token = torch.empty(1, BLOCK, dtype=torch.int32, device="cuda")
    scores = [torch.empty(1, BLOCK, device="cuda") for _ in range(3)]
    workspace = torch.empty(sample_block.workspace_size(1, BLOCK, VOCABULARY, 512), device="cuda")
    # the head GEMM leaves the logits in the L2: one buffer, many calls
    for name, sets in (("sample", cold), ("sample_in_l2", cold[:1] * 24), ("sample_hot", hot)):
        for chunk, warps in SAMPLE_CHUNKS:
            calls = [
                lambda i=i, c=chunk, w=warps: sample_block.launch(
                    *i.tensors(), workspace, token, *scores, chunk=c, warps=w
                )
                for i in sets
            ]
            bench.time(name, label, f"c{chunk}w{warps}", calls, 0.0, moved, library)


def time_parts(bench: Bench, parts: list[str]) -> None:
    if "attention" in parts:
        for length in LENGTHS:
            bench_attention(bench, length)
            torch.cuda.empty_cache()
    if "sample" in parts:
        bench_sample(bench)
    if "tokenwise" in parts:
        for rows in LENGTHS[:3]:
            bench_tokenwise(bench, rows)
            torch.cuda.empty_cache()
