"""Every kernel configuration that ships compiles ahead of time, without spills, within the limits.

`compile_configuration` itself raises on spills, on scratch memory and above the shared memory of
the SM; the tests print the table (`pytest -s`) and check the properties that a launch relies on.
Each configuration is compiled once, in a pool of two processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

pytest.importorskip("triton")

import torch

from lacache_trt.errors import EngineError
from lacache_trt.plugins.attention import kernel as attention
from lacache_trt.plugins.attention_fill import kernel as attention_fill
from lacache_trt.plugins.attention_reuse import kernel as attention_reuse
from lacache_trt.plugins.group_linear import kernel as group_linear
from lacache_trt.plugins.group_quant import kernel as group_quant
from lacache_trt.plugins.rms_norm import kernel as rms_norm
from lacache_trt.plugins.rms_norm_quant import kernel as rms_norm_quant
from lacache_trt.plugins.rope import kernel as rope
from lacache_trt.plugins.sample_block import kernel as sample_block
from lacache_trt.plugins.swiglu import kernel as swiglu
from lacache_trt.plugins.swiglu_quant import kernel as swiglu_quant
from lacache_trt.plugins.triton_support import (
    Compiled,
    Configuration,
    compile_configuration,
)

SMS = (89, 90)
DTYPES = (torch.float16, torch.bfloat16)
Lister = Callable[[torch.dtype, int], list[Configuration]]
Lookup = Callable[[str, torch.dtype, int], list[Compiled]]
SHIPPING: dict[str, Lister] = {
    "attention_fill.d64": lambda dtype, sm: attention_fill.configurations(dtype, 64, sm),
    "attention_fill.d128": lambda dtype, sm: attention_fill.configurations(dtype, 128, sm),
    "attention_reuse.d64": lambda dtype, sm: attention_reuse.configurations(dtype, 64, sm),
    "attention_reuse.d128": lambda dtype, sm: attention_reuse.configurations(dtype, 128, sm),
    "attention.d64": lambda dtype, sm: attention.configurations(dtype, 64, sm),
    "attention.d128": lambda dtype, sm: attention.configurations(dtype, 128, sm),
    "sample_block.llada": lambda dtype, _: sample_block.configurations(dtype, 126464),
    "sample_block.dream": lambda dtype, _: sample_block.configurations(dtype, 152064),
    "sample_block.odd": lambda dtype, _: sample_block.configurations(dtype, 1001),
    "rms_norm.llada": lambda dtype, _: rms_norm.configurations(dtype, 4096, 1e-5),
    "rms_norm.dream": lambda dtype, _: rms_norm.configurations(dtype, 3584, 1e-6),
    "rope.d64": lambda dtype, _: rope.configurations(dtype, 64),
    "rope.d128": lambda dtype, _: rope.configurations(dtype, 128),
    "swiglu.llada": lambda dtype, _: swiglu.configurations(dtype, 12288),
    "swiglu.dream": lambda dtype, _: swiglu.configurations(dtype, 18944),
    "rms_norm_quant.llada": lambda dtype, sm: rms_norm_quant.configurations(dtype, 4096, sm),
    "rms_norm_quant.dream": lambda dtype, sm: rms_norm_quant.configurations(dtype, 3584, sm),
    "group_quant.llada": lambda dtype, sm: group_quant.configurations(dtype, 4096, sm),
    "swiglu_quant.llada": lambda dtype, sm: swiglu_quant.configurations(dtype, 12288, sm),
    "swiglu_quant.dream": lambda dtype, sm: swiglu_quant.configurations(dtype, 18944, sm),
    "group_linear": lambda dtype, sm: group_linear.configurations(dtype, sm),
    "group_linear.add": lambda dtype, sm: [
        each for each in group_linear.configurations(dtype, sm, add=True) if ".add." in each.name
    ],
}


def compile_all(name: str, dtype: torch.dtype, sm: int) -> list[Compiled]:
    """Runs in the pool, so the configurations are looked up there by name."""
    return [compile_configuration(c, sm) for c in SHIPPING[name](dtype, sm)]


@pytest.fixture(scope="module")
def compiled() -> Iterator[Lookup]:
    """Compiled configurations of a `SHIPPING` entry; all of them are under way from the start."""
    cases = [(name, dtype, sm) for name in SHIPPING for dtype in DTYPES for sm in SMS]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        pending = {case: pool.submit(compile_all, *case) for case in cases}
        yield lambda *case: pending[case].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", SHIPPING)
def test_ships(name: str, dtype: torch.dtype, sm: int, compiled: Lookup) -> None:
    for result in compiled(name, dtype, sm):
        print(result.summary())
        assert result.spills == 0
        assert result.registers <= 255
        assert result.registers * result.warps * 32 <= 65536
        assert result.entry in result.ptx
        assert len(result.cubin) < 512 * 1024


@pytest.mark.parametrize("name", ["attention_fill.d128", "attention.d128"])
def test_hopper_uses_its_matrix_units_and_wide_copies(name: str, compiled: Lookup) -> None:
    for result in compiled(name, torch.bfloat16, 90):
        if "merge" not in result.name:
            assert "wgmma.mma_async" in result.ptx
            assert "cp.async.cg.shared.global" in result.ptx


def test_linears_use_the_eight_bit_matrix_units(compiled: Lookup) -> None:
    """Chains of one group: no promotion inside it, a fresh accumulator for each."""
    for sm, instruction in ((90, "wgmma.mma_async"), (89, "mma.sync")):
        for result in compiled("group_linear", torch.bfloat16, sm):
            if "merge" not in result.name:
                assert re.search(rf"{instruction}\S*e4m3\.e4m3", result.ptx)
                assert "cp.async.cg.shared.global" in result.ptx


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize(
    "name", ["rms_norm_quant.llada", "group_quant.llada", "swiglu_quant.llada"]
)
def test_only_a_conversion_through_half_is_rounded_to_odd(
    name: str, sm: int, compiled: Lookup
) -> None:
    """Were the compiler to convert another way, the kernels would round twice or for nothing."""
    (result,), (made,) = compiled(name, torch.float16, sm), SHIPPING[name](torch.float16, sm)
    through_half = "cvt.rn.satfinite.e4m3x2.f16x2" in result.ptx
    assert through_half != ("cvt.rn.satfinite.e4m3x2.f32" in result.ptx)
    assert made.constants["VIA_HALF"] == through_half


@pytest.mark.parametrize(
    "name", ["rms_norm.llada", "rms_norm.dream", "swiglu.llada", "rope.d128", "sample_block.llada"]
)
def test_rows_are_read_in_16_byte_pieces(name: str, compiled: Lookup) -> None:
    first = compiled(name, torch.bfloat16, 90)[0]
    assert "ld.global.v4.b32" in first.ptx
    assert re.search(r"ld\.global\.b16", first.ptx) is None


def test_spills_are_refused() -> None:
    base = attention_fill.configurations(torch.bfloat16, 128, 90)[0]
    greedy = Configuration(
        base.name, base.kernel, base.arguments, {**base.constants, "ROWS": 128, "KEYS": 128}, 4, 2
    )
    with pytest.raises(EngineError, match="spills"):
        compile_configuration(greedy, 90)


def test_names_are_unique() -> None:
    for sm in SMS:
        names = [
            c.name for lister in SHIPPING.values() for dtype in DTYPES for c in lister(dtype, sm)
        ]
        assert len(names) == len(set(names))
