"""One part of the memory check: every shipping configuration of one op and dtype, launched.

    python3 benchmarks/run_from_checkout.py benchmarks/memcheck_parts.py fill float16 90

Inputs come from the CPU, so that hardly any kernel but ours runs here. The last line printed names
the configurations that were launched and how often. `overrun` writes out of bounds on purpose: it
shows that the tool at work would have seen it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import fp8_checks
import kernel_checks as checks
import kernel_references as reference
import torch
import window_checks
from kernel_ptx import HOMES, TYPES, borrowed, key_of, shipping
from kernel_references import AttentionInputs
from torch import Tensor

from lacache_trt.plugins import fp8
from lacache_trt.plugins.triton_support import device_sm

SHAPES = [*checks.ODD, *checks.LONG[2:]]
ROWS = 9


class Counted:
    """Stands for a jitted kernel: notes which configuration each launch is, and launches it."""

    def __init__(self, kernel: Any, names: dict[Any, list[str]], seen: Counter[str]) -> None:
        self._kernel, self._names, self._seen = kernel, names, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(
        self, grid: tuple[int, ...], *arguments: Tensor | int, num_warps: int, num_stages: int,
        **constants: object,
    ) -> None:  # fmt: skip
        types = tuple(TYPES[a.dtype] if isinstance(a, Tensor) else "i32" for a in arguments)
        names = self._names.get(key_of(types, constants, num_warps), ["does not ship"])
        self._seen.update(names[:1])
        self._seen.update(dict.fromkeys(names[1:], 0))  # equal instances have several names
        self._kernel[grid](*arguments, num_warps=num_warps, num_stages=num_stages, **constants)
        torch.cuda.synchronize()


@contextmanager
def counted(sm: int) -> Iterator[Counter[str]]:
    """Within it, launches of kernels are counted by configuration."""
    major, minor = torch.cuda.get_device_capability()
    configurations = shipping(sm)  # before anything is replaced: they name the jitted kernels
    originals = [getattr(home, name) for home, name in HOMES]
    seen: Counter[str] = Counter()
    with nullcontext() if sm == 10 * major + minor else borrowed(sm):
        current = [getattr(home, name) for home, name in HOMES]
        for (home, name), kernel, original in zip(HOMES, current, originals, strict=True):
            names: dict[Any, list[str]] = {}
            for each in configurations:
                if each.kernel is original:
                    key = key_of(tuple(each.arguments.values()), each.constants, each.warps)
                    names.setdefault(key, []).append(each.name)
            setattr(home, name, Counted(kernel, names, seen))
        try:
            yield seen
        finally:
            for (home, name), kernel in zip(HOMES, current, strict=True):
                setattr(home, name, kernel)


def attention_inputs(dtype: torch.dtype) -> Iterator[AttentionInputs]:
    """Every shape at both head sizes, on the device."""
    for head_dim in (64, 128):
        for shape in checks.sized(SHAPES, head_dim):
            inputs = reference.attention_inputs(shape, dtype, "cpu", 0)
            yield AttentionInputs(**{name: value.cuda() for name, value in vars(inputs).items()})


def run_fill(dtype: torch.dtype) -> None:
    for inputs in attention_inputs(dtype):
        checks.run_fill(inputs, None)


def run_reuse(dtype: torch.dtype) -> None:
    for inputs in attention_inputs(dtype):
        checks.run_reuse(inputs, checks.run_fill(inputs, None), None, 64)


def run_attention(dtype: torch.dtype) -> None:
    for inputs in attention_inputs(dtype):
        for q in (inputs.q, inputs.q_c):
            few = q.shape[2] <= checks.attention.SPLIT_ROWS
            for split in {False, few}:
                checks.run_attention(inputs, q, split, None)


def run_sample(dtype: torch.dtype) -> None:
    op = checks.sample_block
    for vocabulary in checks.VOCABULARIES:
        for temperature, guided in ((0.0, False), (1.3, True)):
            inputs = reference.sample_inputs(
                2, 3, vocabulary, dtype, "cpu", 11, temperature=temperature, guided=guided
            )
            moved = {name: value.cuda() for name, value in vars(inputs).items()}
            checks.run_sample(reference.SampleInputs(**moved), op.CHUNK, op.WARPS)


def run_tokenwise(dtype: torch.dtype) -> None:
    for width in checks.NORM_WIDTHS:
        x, delta, weight = (torch.randn(s, width).to("cuda", dtype) for s in (ROWS, ROWS, 1))
        residual, out = torch.empty_like(x), torch.empty_like(x)
        checks.rms_norm.launch(x, delta, weight, residual, out, 1e-5)
        checks.rms_norm.launch(x, None, weight, None, out, 1e-5)
    for width in checks.FFN_WIDTHS:
        gate_up = torch.randn(ROWS, 2 * width).to("cuda", dtype)
        checks.swiglu.launch(gate_up, torch.empty_like(gate_up[:, :width].contiguous()))
    for heads, kv_heads, head_dim in ((28, 4, 128), (4, 2, 64), (3, 3, 64)):
        qkv = torch.randn(2, 33, (heads + 2 * kv_heads) * head_dim).to("cuda", dtype)
        angles = [torch.rand(2, 33, head_dim // 2).cuda() for _ in range(2)]
        outputs = [
            torch.empty(2, count, 33, head_dim, dtype=dtype, device="cuda")
            for count in (heads, kv_heads, kv_heads)
        ]
        for grid in (checks.rope.FEW, checks.rope.MANY):
            checks.rope.launch(qkv, *angles, *outputs, grid)


def run_window(dtype: torch.dtype) -> None:
    for case in window_checks.CASES:
        for head_dim in (64, 128):
            inputs = window_checks.operands(case, dtype, head_dim, 0)
            few = inputs["q_w"].shape[2] <= window_checks.kernel.SPLIT_ROWS
            for split in {False, few}:
                window_checks.run_window(inputs, split)
            kept = [torch.stack([inputs[name]] * 2) for name in ("k", "v")]
            fresh = [torch.stack([inputs[name]] * 2) for name in ("k_w", "v_w")]
            window_checks.write.launch(*fresh, inputs["window_columns"], *kept)


def run_quantising(dtype: torch.dtype) -> None:
    def outputs(width: int) -> tuple[Tensor, Tensor]:
        values = torch.empty(ROWS, width, dtype=fp8.E4M3, device="cuda")
        return values, torch.empty(ROWS, width // fp8.GROUP, device="cuda")

    eps = torch.tensor([1e-5]).cuda()
    for width in fp8_checks.NORM_WIDTHS:
        x, weight = (torch.randn(s, width).to("cuda", dtype) for s in (ROWS, 1))
        fp8_checks.rms_norm_quant.launch(x, weight, eps, *outputs(width))
        fp8_checks.group_quant.launch(x, *outputs(width))
    for width in (*fp8_checks.FFN_WIDTHS, fp8_checks.NORM_WIDTHS[0]):
        gate_up = torch.randn(ROWS, 2 * width).to("cuda", dtype)
        fp8_checks.swiglu_quant.launch(gate_up, *outputs(width))


def run_group_linear(dtype: torch.dtype) -> None:
    """Every rule at its largest number of rows and at odd sizes, whole and split."""
    group_linear = fp8_checks.group_linear
    width = 384
    for rule in group_linear.rules(device_sm(torch.empty(1, device="cuda"))):
        rows = min(rule.most_rows, 1000)
        columns = max(rule.least_columns, 200)
        for count in (rows, rows - 1):
            values = fp8.quantise_groups(torch.randn(count, width))
            blocks = fp8.quantise_blocks(torch.randn(columns, width))
            inputs = tuple(tensor.cuda() for tensor in (*values, *blocks))
            residual = torch.randn(count, columns).to("cuda", dtype)
            for added in (None, residual):
                for split in (False, True):
                    fp8_checks.run_linear(inputs, added, dtype, None, split)


def run_overrun(dtype: torch.dtype) -> None:
    x, weight = torch.randn(ROWS, 4096).to("cuda", dtype), torch.ones(4096).to("cuda", dtype)
    short = torch.empty(ROWS - 1, 4096, dtype=dtype, device="cuda")
    checks.rms_norm.launch(x, None, weight, None, short, 1e-5)


PARTS: dict[str, Callable[[torch.dtype], None]] = {
    "fill": run_fill,
    "reuse": run_reuse,
    "attention": run_attention,
    "sample": run_sample,
    "tokenwise": run_tokenwise,
    "window": run_window,
    "quantising": run_quantising,
    "group_linear": run_group_linear,
    "overrun": run_overrun,
}


def main() -> None:
    """Run one part; its name, dtype and SM are the arguments."""
    name, dtype, sm = sys.argv[1:]
    torch.manual_seed(0)
    with counted(int(sm)) as seen:
        PARTS[name](getattr(torch, dtype))
        torch.cuda.synchronize()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
