"""GPU checks of the FP8 kernels: all elements, odd sizes, every geometry and stage count.

GroupLinear is compared with float64 on the same quantised inputs within the bound that
`group_linear.kernel` derives, and must be exact where the inputs allow it (`fp8_inputs`). Outputs
and workspaces are poisoned with NaN; every launch is done three times, once with the scales of the
rows stored with M innermost, and must give the same bits. The quantising kernels are compared byte
for byte with `plugins.fp8` on equal values.
"""

from __future__ import annotations

from collections.abc import Iterator

import kernel_checks  # noqa: F401 (makes the package importable from a checkout)
import kernel_references as reference
import torch
from fp8_inputs import (
    Inputs,
    exact_inputs,
    library_scales,
    linear_bound,
    linear_truth,
    random_inputs,
    scaled_product,
)
from kernel_checks import DEVICE, poisoned
from kernel_jobs import Ledger
from torch import Tensor

from lacache_trt.plugins import fp8
from lacache_trt.plugins.group_linear import kernel as group_linear
from lacache_trt.plugins.group_linear.kernel import Geometry
from lacache_trt.plugins.group_quant import kernel as group_quant
from lacache_trt.plugins.rms_norm_quant import kernel as rms_norm_quant
from lacache_trt.plugins.swiglu_quant import kernel as swiglu_quant

# (N, K): edge blocks, one group, K that splits unevenly, LLaDA's down projection.
LINEARS = ((200, 128), (384, 640), (129, 2944), (4096, 12288))
NORM_WIDTHS = (4096, 3584, 128, 640)
FFN_WIDTHS = (12288, 18944, 128, 2944)


def linear_rows(geometry: Geometry | None, most_rows: int) -> Iterator[int]:
    """Numbers of rows around the geometry's tile, or for every rule, odd ones included."""
    tile = 128 if geometry is None else geometry.rows
    few = (16, 31, 33) if geometry is None else ()
    for rows in (1, *few, tile - 1, tile, tile + 1, 77, 383, 1153):
        if rows <= most_rows:
            yield rows


def check_linear(
    ledger: Ledger, dtype: torch.dtype, geometry: Geometry | None, most_rows: int, seeds: int = 1
) -> None:
    """One geometry, or what `choose` picks, with and without residual and workspace."""
    for columns, width in LINEARS:
        for rows in sorted(set(linear_rows(geometry, most_rows))):
            _check_exact(ledger, dtype, geometry, exact_inputs(rows, columns, width, rows))
            for seed in range(seeds):
                inputs = random_inputs(rows, columns, width, seed)
                for add in (False, True):
                    _check_product(ledger, dtype, geometry, inputs, add)


def _check_product(
    ledger: Ledger, dtype: torch.dtype, geometry: Geometry | None, inputs: Inputs, add: bool
) -> None:
    rows, columns = inputs[0].shape[0], inputs[2].shape[0]
    truth, magnitude = linear_truth(inputs)
    residual = torch.randn(rows, columns, device=DEVICE).to(dtype) if add else None
    if residual is not None:
        truth = truth + residual.double()
    bound = linear_bound(inputs, truth, magnitude, dtype)
    name = f"linear {rows}x{columns}x{inputs[0].shape[1]} add={add} {dtype}"
    for split in (False, True):
        turned = (inputs[0], inputs[1].t().contiguous().t(), *inputs[2:])
        first, *again = (
            run_linear(each, residual, dtype, geometry, split) for each in (inputs, inputs, turned)
        )
        ledger.bounded(f"{name} split={split}", first, truth, bound)
        for other in again:
            ledger.same(f"{name} split={split}, again", [first], [other])


def _check_exact(
    ledger: Ledger, dtype: torch.dtype, geometry: Geometry | None, inputs: Inputs
) -> None:
    rows, columns = inputs[0].shape[0], inputs[2].shape[0]
    truth, _ = linear_truth(inputs)
    residual = torch.randint(-8, 9, (rows, columns), device=DEVICE).to(dtype)
    for added in (None, residual):
        want = (truth if added is None else truth + added.double()).float().to(dtype)
        for split in (False, True):
            got = run_linear(inputs, added, dtype, geometry, split)
            name = f"exact {rows}x{columns}x{inputs[0].shape[1]} add={added is not None}"
            ledger.same(f"{name} split={split}", [got], [want])


def run_linear(
    inputs: Inputs, residual: Tensor | None, dtype: torch.dtype, geometry: Geometry | None,
    split: bool,
) -> Tensor:  # fmt: skip
    """The product, in place where there is a residual."""
    rows, columns = inputs[0].shape[0], inputs[2].shape[0]
    out = poisoned(rows, columns, dtype=dtype) if residual is None else residual.clone()
    size = group_linear.workspace_size(rows, columns, inputs[2].shape[1])
    if geometry is not None:
        size = max(size, group_linear.most_partial(geometry))
    workspace = poisoned(size) if split else None
    group_linear.launch(*inputs, None if residual is None else out, workspace, out, geometry)
    return out


def check_library(ledger: Ledger) -> None:
    """cuBLASLt's product with the same scales keeps the same bound; prints both worst errors."""
    for rows, columns, width in ((128, 384, 512), (36, 4096, 4096), (384, 4096, 12288)):
        inputs = random_inputs(rows, columns, width, 0)
        truth, magnitude = linear_truth(inputs)
        bound = linear_bound(inputs, truth, magnitude, torch.bfloat16)
        scale, weight_scale = library_scales(inputs)
        theirs = scaled_product((inputs[0], scale, inputs[2], weight_scale))
        ours = run_linear(inputs, None, torch.bfloat16, None, True)
        for name, got in (("cuBLASLt", theirs), ("ours", ours)):
            ledger.bounded(f"{name} {rows}x{columns}x{width}", got, truth, bound)
            error = (got.double() - truth).abs()
            print(
                f"{name:8s} {rows}x{columns}x{width}: worst {float((error / bound).max()):.3f} of "
                f"the bound, {float((error / magnitude).max()):.2e} of the magnitudes' sum, mean "
                f"{float((error / magnitude).mean()):.2e}",
                flush=True,
            )


def check_accumulator(ledger: Ledger) -> None:
    """1 + f 2^-j within a group is exact up to j = 13; prints what survives, and how it is cut."""
    powers = torch.exp2(-torch.arange(9.0, device=DEVICE))
    small = powers[:, None] * powers
    one = torch.ones(1, 1, device=DEVICE)
    residual = torch.full((9, 9), -1.0, dtype=torch.float16, device=DEVICE)
    for place in (1, 31, 32, 127):
        found = []
        for factor in (1.0, 1.5):
            x, w = torch.zeros(9, 128, device=DEVICE), torch.zeros(9, 128, device=DEVICE)
            x[:, 0], w[:, 0] = 1, 1
            x[:, place], w[:, place] = powers, factor * powers
            inputs = x.to(fp8.E4M3), one.expand(9, 1).contiguous(), w.to(fp8.E4M3), one
            found.append(run_linear(inputs, residual, torch.float16, None, False).float())
        exact = small >= 2.0**-13
        ledger.same(f"accumulator, 2nd at {place}", [found[0][exact]], [small[exact]])
        kept = small[found[0] == small].min()
        print(
            f"accumulator, 2nd product at {place}: keeps 1 + {float(kept):.3g}; of 1.5 times that "
            f"{float(found[1][small == kept].max() / kept):.2f}",
            flush=True,
        )


def check_broken(ledger: Ledger, dtype: torch.dtype) -> None:
    """A NaN or an infinity in a row makes that row NaN and leaves the others alone."""
    for rows in (5, 64, 300):
        x = torch.randn(rows, 512, device=DEVICE)
        weight = fp8.quantise_blocks(torch.randn(384, 512, device=DEVICE))
        for broken in (torch.nan, torch.inf, -torch.inf):
            damaged = x.clone()
            damaged[rows // 2, 300] = broken
            good, bad = fp8.quantise_groups(x), fp8.quantise_groups(damaged)
            want = run_linear((*good, *weight), None, dtype, None, True)
            want[rows // 2] = torch.nan
            got = run_linear((*bad, *weight), None, dtype, None, True)
            ledger.same(f"broken {broken} {rows}", [got], [want])


def check_quantising(ledger: Ledger, dtype: torch.dtype) -> None:
    """The quantising kernels: values within the bounds, bytes and scales consistent."""
    eps = torch.tensor([1e-5], device=DEVICE)
    for rows, width in zip((1153, 77, 5, 9), NORM_WIDTHS, strict=True):
        hidden = torch.randn(rows, width, device=DEVICE).to(dtype)
        hidden[rows // 2] = 0
        weight = torch.randn(width, device=DEVICE).to(dtype)
        got = _empty_groups(rows, width)
        rms_norm_quant.launch(hidden, weight, eps, *got)
        want = reference.rms_norm(hidden, weight, 1e-5)
        _check_groups(ledger, f"rms_norm_quant {rows}x{width}", want, dtype, 1.2, *got)
        again = _empty_groups(rows, width, innermost=True)
        rms_norm_quant.launch(hidden, weight, eps, *again)
        _same_groups(ledger, f"rms_norm_quant {rows}x{width}", got, again)
        group_quant.launch(hidden, *got)
        _same_groups(ledger, f"group_quant {rows}x{width}", got, fp8.quantise_groups(hidden))
    for rows, width in zip((5, 333, 64, 7), FFN_WIDTHS, strict=True):
        gate_up = torch.randn(rows, 2 * width, device=DEVICE).to(dtype) * 4
        gate_up[rows // 2] = 0
        got = _empty_groups(rows, width)
        swiglu_quant.launch(gate_up, *got)
        again = _empty_groups(rows, width, innermost=True)
        swiglu_quant.launch(gate_up, *again)
        _same_groups(ledger, f"swiglu_quant {rows}x{width}", got, again)
        want = reference.swiglu(gate_up)
        _check_groups(ledger, f"swiglu_quant {rows}x{width}", want, dtype, 1.5, *got)
    check_bytes(ledger, dtype)


def check_bytes(ledger: Ledger, dtype: torch.dtype) -> None:
    """Bytes and scales are torch's, bit for bit, where the quantised values are the same.

    GroupQuant sees every value below every largest value of its group, up to powers of two. A norm
    of rows of signs is the identity, and so is the silu of 64.
    """
    bits = 10 if dtype == torch.float16 else 7
    steps = 1 + torch.arange(1 << bits, device=DEVICE) / (1 << bits)
    values = (steps * torch.exp2(-torch.arange(0.0, 20, device=DEVICE))[:, None]).flatten()
    values = torch.cat([values, -values, values.new_zeros(-2 * len(values) % 127)]).view(-1, 127)
    for some in steps.split(64):
        rows = (
            values[None].expand(len(some), -1, -1).clamp(-some[:, None, None], some[:, None, None])
        )
        largest = some[:, None, None].expand(-1, len(values), 1)
        x = torch.cat([rows, largest], 2).view(-1, NORM_WIDTHS[0]).to(dtype)
        got = _empty_groups(*x.shape, innermost=True)
        group_quant.launch(x, *got)
        _same_groups(ledger, "group_quant of every value", got, fp8.quantise_groups(x))
    hidden = (torch.randint(0, 2, (64, 4096), device=DEVICE) * 2 - 1).to(dtype)
    factor = torch.logspace(-4, 3, 32, device=DEVICE).repeat_interleave(128)
    weight = (torch.randn(4096, device=DEVICE) * factor).to(dtype)
    got = _empty_groups(64, 4096)
    rms_norm_quant.launch(hidden, weight, torch.zeros(1, device=DEVICE), *got)
    _same_groups(ledger, "rms_norm_quant of signs", got, fp8.quantise_groups(hidden * weight))
    up = (torch.randn(64, 4096, device=DEVICE) * factor / 64).to(dtype)
    got = _empty_groups(64, 4096)
    swiglu_quant.launch(torch.cat([torch.full_like(up, 64), up], 1), *got)
    _same_groups(ledger, "swiglu_quant of 64", got, fp8.quantise_groups(64 * up))


def _empty_groups(rows: int, width: int, innermost: bool = False) -> tuple[Tensor, Tensor]:
    quantised = torch.full((rows, width), torch.nan, device=DEVICE).to(fp8.E4M3)
    groups = width // fp8.GROUP
    return quantised, poisoned(groups, rows).t() if innermost else poisoned(rows, groups)


def _same_groups(
    ledger: Ledger, name: str, got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]
) -> None:
    ledger.same(f"{name} scales", [got[1]], [want[1]])
    ledger.same(f"{name} bytes", [got[0].view(torch.uint8)], [want[0].view(torch.uint8)])


def _check_groups(
    ledger: Ledger, name: str, want: Tensor, dtype: torch.dtype, ulps: float, quantised: Tensor,
    scale: Tensor,
) -> None:  # fmt: skip
    """Scales within the values' rounding, values within half a step of E4M3 besides."""
    slack = ulps * torch.finfo(dtype).eps
    wanted = fp8.scales(want.unflatten(-1, (-1, fp8.GROUP)).abs().amax(-1))
    ledger.bounded(f"{name} scale", scale, wanted, (slack + 1e-6) * wanted + 1e-9)
    got = fp8.dequantise_groups(quantised, scale, torch.float64)
    step = torch.maximum(want.abs() * 2.0**-4, 2.0**-10 * scale.double().repeat_interleave(128, -1))
    tiny = 1e-6 if dtype == torch.float16 else 1e-9
    ledger.bounded(f"{name} values", got, want, step * 1.01 + 2 * slack * want.abs() + tiny)


CHECKS = {
    "group_linear": check_linear,
    "group_linear_broken": check_broken,
    "group_linear_library": check_library,
    "accumulator": check_accumulator,
    "quantising": check_quantising,
}
