"""On a GPU: the plugin library's own launch code against the Triton launch, bit for bit.

LACACHE_TRT_TEST_PAYLOAD names a folder made by `plugin_payload.py` on another machine; without it
the library and the cubins are compiled here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from native_entry import NativeEntry, NativeFailure
from plugin_cases import (
    CASES,
    SIZES,
    OpCase,
    Sizes,
    case_id,
    every_case,
    launch_arguments,
    packed,
)
from plugin_payload import DTYPES, program_name
from torch import Tensor

from lacache_trt.plugins import library
from lacache_trt.plugins.packing import PluginProgram

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
PAYLOAD = os.environ.get("LACACHE_TRT_TEST_PAYLOAD")
POSITIVE = ("fa_sum", "temperature", "cfg_scale", "eps")
Tensors = dict[str, Tensor]


def gpu_sm() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


@pytest.fixture(scope="module")
def entry() -> NativeEntry:
    torch.zeros(1, device="cuda")
    path = Path(PAYLOAD) / library.LIBRARY_NAME if PAYLOAD else library.build_library()
    return NativeEntry(path)


def program_bytes(case: OpCase, dtype: torch.dtype, sizes: Sizes, sm: int) -> bytes:
    if PAYLOAD:
        return (Path(PAYLOAD) / program_name(case, dtype, sizes, sm)).read_bytes()
    return packed(case, dtype, sizes, sm)


def make_inputs(case: OpCase, program: PluginProgram, sizes: Sizes) -> Tensors:
    """Random inputs with a different valid range and block in every row."""
    generator = torch.Generator("cuda").manual_seed(1)
    shapes, length, block = case.shapes(sizes), sizes["N"], sizes["M"]
    rows = torch.arange(sizes["B"], device="cuda", dtype=torch.int32)
    first = rows * 7 % max(1, length - block - 8)
    columns = torch.arange(block, device="cuda", dtype=torch.int32)
    special = {
        "valid_from": rows * 3 % 5,
        "valid_to": length - rows % 4,
        "block_columns": first[:, None] + columns,
        "guide_row": rows * 0,
        "seed": rows * 77 - 3,
        "step": rows + 5,
    }
    tensors: Tensors = {}
    for rule in program.inputs:
        shape = shapes[rule.name]
        if rule.name in special:
            value = special[rule.name]
        elif rule.dtype == torch.int32:
            value = torch.randint(0, 60, shape, device="cuda", generator=generator)
        else:
            value = torch.randn(shape, device="cuda", generator=generator).abs()
            value = value if rule.name in POSITIVE else value - 0.8
        tensors[rule.name] = value.to(rule.dtype).contiguous()
    return tensors


def make_outputs(case: OpCase, program: PluginProgram, sizes: Sizes) -> Tensors:
    """Poisoned outputs and workspace."""
    shapes = case.shapes(sizes)
    outputs = {
        rule.name: torch.full(
            [size.evaluate(shapes) for size in rule.shape],
            -7 if rule.dtype == torch.int32 else torch.nan,
            device="cuda",
        ).to(rule.dtype)
        for rule in program.outputs
    }
    elements = max(1, program.workspace.evaluate(shapes) // 4)
    outputs["workspace"] = torch.full((elements,), torch.nan, device="cuda")
    return outputs


def native_launch(
    entry: NativeEntry, blob: bytes, program: PluginProgram, inputs: Tensors, outputs: Tensors
) -> Callable[[], None]:
    shapes = [tuple(inputs[rule.name].shape) for rule in program.inputs]

    def run() -> None:
        entry.enqueue(
            blob,
            shapes,
            [inputs[rule.name].data_ptr() for rule in program.inputs],
            [outputs[rule.name].data_ptr() for rule in program.outputs],
            outputs["workspace"].data_ptr(),
            torch.cuda.current_stream().cuda_stream,
        )

    return run


def same_bits(program: PluginProgram, left: Tensors, right: Tensors) -> None:
    for rule in program.outputs:
        a, b = (each[rule.name].contiguous().view(torch.uint8) for each in (left, right))
        different = (a != b).nonzero()
        assert not len(different), f"{rule.name} differs first at byte {different[0].tolist()}"


@pytest.mark.parametrize("dtype", DTYPES, ids=case_id)
@pytest.mark.parametrize(("case", "sizes"), list(every_case()), ids=case_id)
def test_native_launch_equals_the_triton_launch(
    entry: NativeEntry, case: OpCase, sizes: Sizes, dtype: torch.dtype
) -> None:
    program = case.plugin_program(dtype, sizes, gpu_sm())
    blob = program_bytes(case, dtype, sizes, gpu_sm())
    inputs = make_inputs(case, program, sizes)
    expected = make_outputs(case, program, sizes)
    case.module.launch(**launch_arguments(case, inputs | expected))

    eager = make_outputs(case, program, sizes)
    native_launch(entry, blob, program, inputs, eager)()
    torch.cuda.synchronize()
    same_bits(program, expected, eager)

    captured = make_outputs(case, program, sizes)
    launch = native_launch(entry, blob, program, inputs, captured)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(2):
        for rule in program.outputs:
            captured[rule.name].view(torch.uint8).fill_(0)
        graph.replay()
        torch.cuda.synchronize()
        same_bits(program, expected, captured)


def test_a_captured_graph_follows_the_block(entry: NativeEntry) -> None:
    """The block lies in device memory: changing it there changes what a replay computes."""
    case, sizes, dtype = CASES["AttentionReuse"], SIZES[1], torch.float16
    program = case.plugin_program(dtype, sizes, gpu_sm())
    blob = program_bytes(case, dtype, sizes, gpu_sm())
    inputs = make_inputs(case, program, sizes)
    outputs = make_outputs(case, program, sizes)
    launch = native_launch(entry, blob, program, inputs, outputs)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    inputs["block_columns"] += 11
    graph.replay()
    torch.cuda.synchronize()
    replayed = {name: tensor.clone() for name, tensor in outputs.items()}
    launch()
    torch.cuda.synchronize()
    same_bits(program, outputs, replayed)


def test_a_program_for_another_gpu_is_refused(entry: NativeEntry) -> None:
    foreign = 89 if gpu_sm() != 89 else 90
    blob = program_bytes(CASES["AttentionFill"], torch.float16, SIZES[0], foreign)
    with pytest.raises(NativeFailure, match=r"sm_\d+.*lacache-trt build BUNDLE OUT --force"):
        entry.prepare(blob)


def test_threads_may_launch_at_once(entry: NativeEntry) -> None:
    from concurrent.futures import ThreadPoolExecutor

    case, sizes, dtype = CASES["Attention"], SIZES[1], torch.float16
    program = case.plugin_program(dtype, sizes, gpu_sm())
    blob = program_bytes(case, dtype, sizes, gpu_sm())
    inputs = make_inputs(case, program, sizes)
    expected = make_outputs(case, program, sizes)
    native_launch(entry, blob, program, inputs, expected)()
    torch.cuda.synchronize()

    def work(_: int) -> Tensors:
        outputs = make_outputs(case, program, sizes)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            for _ in range(20):
                native_launch(entry, blob, program, inputs, outputs)()
            torch.cuda.current_stream().synchronize()
        return outputs

    with ThreadPoolExecutor(8) as pool:
        for outputs in pool.map(work, range(16)):
            same_bits(program, expected, outputs)
