"""GPU checks of AttentionWindow against float64: all elements, odd shapes, seeds, fp16 and bf16.

The cache holds NaN at the window's columns and the outputs are poisoned; every launch is done twice
and must give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_checks import DEVICE, poisoned, reference
from kernel_jobs import Ledger
from torch import Tensor

from lacache_trt.plugins.attention_window import kernel
from lacache_trt.plugins.window_write import kernel as write


@dataclass(frozen=True)
class WindowCase:
    """Heads, key heads, columns, head size, query rows (0: all), and per row its valid range and
    its window."""

    heads: int
    kv_heads: int
    length: int
    queries: int
    valid: tuple[tuple[int, int], ...]
    windows: tuple[tuple[int, int], ...]


CASES = (
    WindowCase(32, 32, 384, 0, ((0, 384),), ((128, 160),)),
    WindowCase(32, 32, 2048, 0, ((0, 2048), (63, 2000)), ((1024, 1056), (1990, 2022))),
    WindowCase(32, 32, 1152, 32, ((0, 1152),), ((896, 1152),)),
    WindowCase(28, 4, 1152, 0, ((5, 1152), (0, 1151)), ((896, 1152), (1024, 1152))),
    WindowCase(28, 4, 2047, 33, ((0, 2047),), ((0, 33),)),
    WindowCase(4, 2, 640, 0, ((0, 640), (100, 639), (0, 3)), ((0, 640), (90, 110), (0, 1))),
    WindowCase(8, 1, 333, 1, ((9, 333),), ((332, 333),)),
    WindowCase(2, 2, 65, 0, ((0, 65), (30, 65)), ((1, 64), (30, 31))),
)


def check_windows(ledger: Ledger, dtype: torch.dtype, seeds: int) -> None:
    """Every case, seed, head size and way."""
    for case in CASES:
        for seed in range(seeds):
            for head_dim in (64, 128):
                _check(ledger, case, dtype, head_dim, seed)


def _check(ledger: Ledger, case: WindowCase, dtype: torch.dtype, head_dim: int, seed: int) -> None:
    inputs = operands(case, dtype, head_dim, seed)
    fresh = {name: _with_window(inputs, name) for name in ("k", "v")}
    ranges = inputs["valid_from"], inputs["valid_to"]
    want = reference.attention(inputs["q_w"], fresh["k"], fresh["v"], *ranges)
    largest = max(float(inputs[name].double().abs().max()) for name in ("v_w",)) + 1.0
    bound = (1.5 * torch.finfo(dtype).eps + 2e-5) * max(largest, 5.0)
    name = f"window {case} {dtype} d{head_dim} seed {seed}"
    for split in (True, False):
        if split and inputs["q_w"].shape[2] > kernel.SPLIT_ROWS:
            continue
        out = run_window(inputs, split)
        ledger.bounded(f"{name} split={split}", out, want, bound)
        ledger.same(f"{name} split={split}", [out], [run_window(inputs, split)])
    _check_write(ledger, inputs, name)


def operands(case: WindowCase, dtype: torch.dtype, head_dim: int, seed: int) -> dict[str, Tensor]:
    """Random inputs; later seeds sharpen the softmax."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    rows, width = len(case.windows), max(stop - start for start, stop in case.windows)

    def normal(heads: int, count: int) -> Tensor:
        size = (rows, heads, count, head_dim)
        return torch.randn(size, generator=generator, device=DEVICE).to(dtype)

    columns = torch.full((rows, width), -1, dtype=torch.int32, device=DEVICE)
    for row, (start, stop) in enumerate(case.windows):
        columns[row, : stop - start] = torch.arange(start, stop, device=DEVICE)
    k, v = normal(case.kv_heads, case.length), normal(case.kv_heads, case.length)
    for row, (start, stop) in enumerate(case.windows):
        k[row, :, start:stop] = torch.nan
        v[row, :, start:stop] = torch.nan
    valid = torch.tensor(case.valid, dtype=torch.int32, device=DEVICE)
    return {
        "q_w": normal(case.heads, case.queries or width) * (1.0 + seed % 4),
        "k_w": normal(case.kv_heads, width),
        "v_w": normal(case.kv_heads, width) - 0.5,
        "k": k,
        "v": v,
        "window_columns": columns,
        "valid_from": valid[:, 0].contiguous(),
        "valid_to": valid[:, 1].contiguous(),
    }


def _with_window(inputs: dict[str, Tensor], name: str) -> Tensor:
    whole = inputs[name].clone()
    for row, columns in enumerate(inputs["window_columns"]):
        real = columns >= 0
        whole[row, :, columns[real].long()] = inputs[f"{name}_w"][row][:, real]
    return whole


def run_window(inputs: dict[str, Tensor], split: bool) -> Tensor:
    """The kernel's output."""
    q, k = inputs["q_w"], inputs["k"]
    batch, heads, count, head_dim = q.shape
    size = kernel.workspace_size(batch, heads, k.shape[1], count, k.shape[2], head_dim)
    out = poisoned(batch, count, heads * head_dim, dtype=q.dtype)
    kernel.launch(*inputs.values(), poisoned(size) if split else None, out)
    return out


def _check_write(ledger: Ledger, inputs: dict[str, Tensor], name: str) -> None:
    kept = [torch.stack([inputs[part]] * 2).nan_to_num() for part in ("k", "v")]
    want = [torch.stack([_with_window(inputs, part)] * 2) for part in ("k", "v")]
    fresh = [torch.stack([inputs[f"{part}_w"]] * 2) for part in ("k", "v")]
    write.launch(*fresh, inputs["window_columns"], *kept)
    ledger.same(f"{name} written", kept, want)


CHECKS = {"window": check_windows}
