"""Attention kernels under Triton's interpreter; run by `test_kernels_interpreter.py`.

Tiles are small so that small shapes meet every case: ragged ends, blocks inside and across tiles,
empty runs, grouped heads, rows whose block and valid range differ.
"""

from __future__ import annotations

import interpreter_repair  # noqa: F401
import kernel_references as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import AttentionInputs, AttentionShape
from torch import Tensor

from lacache_trt.plugins.attention import kernel as attention
from lacache_trt.plugins.attention_fill import kernel as fill
from lacache_trt.plugins.attention_reuse import kernel as reuse
from lacache_trt.plugins.triton_support import Tiles

SMALL = Tiles(16, 16, 1, 1)
DTYPES = (torch.float32, torch.float16)
SHAPES = {
    "plain": AttentionShape(2, 2, 40, 64, 8, ((0, 40),), (16,)),
    "block_across_tiles": AttentionShape(2, 1, 37, 64, 7, ((0, 37), (5, 30)), (11, 23)),
    "block_first": AttentionShape(1, 1, 33, 64, 5, ((0, 33),), (0,)),
    "block_last": AttentionShape(1, 1, 33, 64, 5, ((2, 33),), (28,)),
    "no_outside_keys": AttentionShape(2, 2, 18, 64, 6, ((7, 13), (0, 18)), (7, 1)),
    "whole_canvas": AttentionShape(2, 1, 20, 64, 20, ((0, 20), (3, 19)), (0, 0)),
    "block_of_one": AttentionShape(4, 2, 21, 128, 1, ((0, 21), (4, 21), (20, 21)), (20, 4, 20)),
    "block_partly_padding": AttentionShape(2, 2, 30, 64, 9, ((6, 30), (0, 25)), (2, 20)),
    "grouped_eight": AttentionShape(8, 1, 24, 64, 5, ((1, 24),), (9,)),
}


def state_of(inputs: AttentionInputs, tiles: Tiles = SMALL) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel's state, poisoned beforehand."""
    state = [torch.full(inputs.q.shape[:3], torch.nan) for _ in range(2)]
    state.append(torch.full(inputs.q.shape, torch.nan))
    fill.launch(
        inputs.q, inputs.k, inputs.v, inputs.valid_from, inputs.valid_to, inputs.block_columns,
        *state, tiles=tiles,
    )  # fmt: skip
    return state[0], state[1], state[2]


def reused(inputs: AttentionInputs, state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The kernel's output of one step."""
    batch, heads, length, head_dim = inputs.q.shape
    block = inputs.q_c.shape[2]
    size = reuse.workspace_size(batch, heads, inputs.k.shape[1], length, block, head_dim)
    out = torch.full((batch, length, heads * head_dim), torch.nan, dtype=inputs.q.dtype)
    reuse.launch(
        inputs.q_c, inputs.k_c, inputs.v_c, inputs.q, inputs.k, inputs.v, *state,
        inputs.valid_from, inputs.valid_to, inputs.block_columns,
        torch.full((size,), torch.nan), out, tiles=SMALL, block_keys=16,
    )  # fmt: skip
    return out


def outside_rows(inputs: AttentionInputs) -> Tensor:
    """Bool [B, 1, N]: rows whose state is defined."""
    columns = torch.arange(inputs.q.shape[2])
    inside = (inputs.block_columns[:, :, None] == columns).any(1)
    return ~inside[:, None, :]


def check_state(inputs: AttentionInputs, tiles: Tiles = SMALL) -> None:
    maximum, total, acc = state_of(inputs, tiles)
    want_maximum, want_total, want_acc = reference.attention_state(inputs)
    rows = outside_rows(inputs).expand_as(maximum)
    eps = torch.finfo(inputs.q.dtype).eps
    torch.testing.assert_close(maximum[rows].double(), want_maximum[rows], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total[rows].double(), want_total[rows], rtol=2e-5, atol=1e-6)
    error = (acc[rows].double() - want_acc[rows]).abs()
    bound = (eps + 2e-5) * want_total[rows] * inputs.v.double().abs().max() + 1e-6
    assert bool((error <= bound[:, None]).all()), error.max()


def check_output(inputs: AttentionInputs, out: Tensor, want: Tensor) -> None:
    eps = torch.finfo(inputs.q.dtype).eps
    largest = max(float(v.double().abs().max()) for v in (inputs.v, inputs.v_c))
    error = (out.double() - want).abs().max()
    assert error <= (1.5 * eps + 2e-5) * largest, error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_fill_and_reuse(name: str, dtype: torch.dtype) -> None:
    inputs = reference.attention_inputs(SHAPES[name], dtype, "cpu", seed=len(name), scale=2.0)
    check_state(inputs)
    out = reused(inputs, state_of(inputs))
    check_output(inputs, out, reference.attention_reuse(inputs))


def test_reuse_never_reads_the_stale_block() -> None:
    inputs = reference.attention_inputs(SHAPES["block_across_tiles"], torch.float32, "cpu", 3)
    state = state_of(inputs)
    out = reused(inputs, state)
    for b, columns in enumerate(inputs.block_columns.tolist()):
        inputs.k[b, :, columns] = torch.nan
        inputs.v[b, :, columns] = torch.nan
        inputs.q[b, :, columns] = torch.nan
        for part in state:
            part[b, :, columns] = torch.nan
    assert torch.equal(out, reused(inputs, state))


def test_reuse_splits_the_keys() -> None:
    shape = AttentionShape(1, 1, 600, 64, 4, ((0, 600), (70, 599)), (299, 0))
    assert reuse.chunks_for(600, 4, 1, 1, reuse.BLOCK_ROWS) == 3
    inputs = reference.attention_inputs(shape, torch.float16, "cpu", seed=5, scale=2.0)
    out = reused(inputs, reference_state(inputs))
    check_output(inputs, out, reference.attention_reuse(inputs))


def reference_state(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    maximum, total, acc = reference.attention_state(inputs)
    return maximum.float(), total.float(), acc.float()


def run_attention(
    inputs: AttentionInputs, q: Tensor, *, split: bool, tiles: Tiles = SMALL
) -> Tensor:
    batch, heads, count, head_dim = q.shape
    size = attention.workspace_size(
        batch, heads, inputs.k.shape[1], count, inputs.k.shape[2], head_dim
    )
    out = torch.full((batch, count, heads * head_dim), torch.nan, dtype=q.dtype)
    # the interpreter's small tiles make more query tiles, never more chunks than the workspace has
    workspace = torch.full((size,), torch.nan) if split else None
    attention.launch(
        q, inputs.k, inputs.v, inputs.valid_from, inputs.valid_to, workspace, out, tiles=tiles
    )
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_attention(name: str, split: bool, dtype: torch.dtype) -> None:
    inputs = reference.attention_inputs(SHAPES[name], dtype, "cpu", seed=len(name), scale=2.0)
    q = inputs.q_c if split else inputs.q
    want = reference.attention(q, inputs.k, inputs.v, inputs.valid_from, inputs.valid_to)
    check_output(inputs, run_attention(inputs, q, split=split), want)


def test_attention_split_over_chunks_and_an_empty_range() -> None:
    shape = AttentionShape(2, 1, 530, 64, 3, ((0, 530), (300, 310), (9, 9)), (0, 0, 0))
    inputs = reference.attention_inputs(shape, torch.float32, "cpu", seed=1)
    want = reference.attention(inputs.q_c, inputs.k, inputs.v, inputs.valid_from, inputs.valid_to)
    check_output(inputs, run_attention(inputs, inputs.q_c, split=True), want)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 50))
    block = data.draw(st.integers(1, length))
    group = data.draw(st.sampled_from([1, 2, 3]))
    kv_heads = data.draw(st.sampled_from([1, 2]))
    rows = data.draw(st.integers(1, 2))
    valid, starts = [], []
    for _ in range(rows):
        low = data.draw(st.integers(0, length - 1))
        valid.append((low, data.draw(st.integers(low + 1, length))))
        starts.append(data.draw(st.integers(0, length - block)))
    shape = AttentionShape(
        group * kv_heads, kv_heads, length, 64, block, tuple(valid), tuple(starts)
    )
    inputs = reference.attention_inputs(shape, torch.float32, "cpu", seed=length)
    check_state(inputs)
    check_output(inputs, reused(inputs, state_of(inputs)), reference.attention_reuse(inputs))


def test_a_batch_equals_its_rows() -> None:
    shape = SHAPES["block_of_one"]
    inputs = reference.attention_inputs(shape, torch.float16, "cpu", seed=2)
    together = reused(inputs, state_of(inputs))
    for b in range(len(shape.starts)):
        alone = AttentionInputs(*(tensor[b : b + 1].clone() for tensor in vars(inputs).values()))
        assert torch.equal(together[b], reused(alone, state_of(alone))[0])
