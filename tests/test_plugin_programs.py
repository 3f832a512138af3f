"""Each op's program against its kernel module: what the plugin launches is what `launch` does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from native_entry import NativeEntry
from plugin_cases import (
    CASES,
    SIZES,
    OpCase,
    Recorder,
    Sizes,
    case_id,
    every_case,
    launch_arguments,
    meta_tensors,
    packed,
    shape_list,
)

from lacache_trt.plugins import library, triton_support
from lacache_trt.plugins.attention import split
from lacache_trt.plugins.attention.op import ATTENTION
from lacache_trt.plugins.attention_fill.op import ATTENTION_FILL
from lacache_trt.plugins.attention_reuse.op import ATTENTION_REUSE
from lacache_trt.plugins.attention_window.op import ATTENTION_WINDOW
from lacache_trt.plugins.group_linear.op import GROUP_LINEAR
from lacache_trt.plugins.group_quant.op import GROUP_QUANT
from lacache_trt.plugins.packing import PluginProgram
from lacache_trt.plugins.rms_norm_quant.op import RMS_NORM_QUANT
from lacache_trt.plugins.sample_block.op import SAMPLE_BLOCK
from lacache_trt.plugins.swiglu_quant.op import SWIGLU_QUANT

SMS = (89, 90)
SPECS = {
    spec.name: spec
    for spec in (
        ATTENTION,
        ATTENTION_FILL,
        ATTENTION_REUSE,
        ATTENTION_WINDOW,
        GROUP_LINEAR,
        GROUP_QUANT,
        RMS_NORM_QUANT,
        SAMPLE_BLOCK,
        SWIGLU_QUANT,
    )
}


@pytest.fixture(scope="module")
def entry() -> NativeEntry:
    return NativeEntry(library.build_library())


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize(("case", "sizes"), list(every_case()), ids=case_id)
def test_program_launches_what_the_kernel_module_launches(
    entry: NativeEntry, monkeypatch: pytest.MonkeyPatch, case: OpCase, sizes: Sizes, sm: int
) -> None:
    dtype = torch.bfloat16
    program = case.plugin_program(dtype, sizes, sm)
    shapes = case.shapes(sizes)
    described = entry.describe(packed(case, dtype, sizes, sm), shape_list(program, shapes))

    log = _record(monkeypatch, case, program, sizes, sm)
    assert len(described.launches) == len(log)
    for launch, (kernel, grid, arguments) in zip(described.launches, log, strict=True):
        configuration = program.launches[launch.index].configuration
        assert launch.kernel == kernel == configuration.kernel.__name__
        assert launch.grid == (*grid, 1, 1)[:3]
        assert launch.threads == 32 * arguments["num_warps"] == 32 * configuration.warps
        assert configuration.stages == arguments["num_stages"]
        assert {name: arguments[name] for name in configuration.constants} == dict(
            configuration.constants
        )
        names = [name for name, kind in configuration.arguments.items() if kind == "i32"]
        assert launch.scalars == tuple(arguments[name] for name in names)
        _check_pointers(program, launch.index, arguments)


def _record(
    monkeypatch: pytest.MonkeyPatch, case: OpCase, program: PluginProgram, sizes: Sizes, sm: int
) -> list[tuple[str, tuple[int, ...], dict[str, Any]]]:
    """Run the kernel module's `launch` on tensors without storage and log its launches."""
    log: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []
    monkeypatch.setattr(triton_support, "device_sm", lambda tensor: sm)
    for module in (case.module, split):
        if hasattr(module, "device_sm"):
            monkeypatch.setattr(module, "device_sm", lambda tensor: sm)
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), log))
    shapes = case.shapes(sizes)
    tensors = meta_tensors(shapes, {rule.name: rule.dtype for rule in program.inputs})
    for rule in program.outputs:
        shape = [size.evaluate(shapes) for size in rule.shape]
        tensors[rule.name] = torch.empty(shape, dtype=rule.dtype, device="meta")
    elements = program.workspace.evaluate(shapes) // 4
    tensors["workspace"] = torch.empty(elements, dtype=torch.float32, device="meta")
    for name, tensor in tensors.items():
        tensor.tensor_name = name  # type: ignore[attr-defined]
    case.module.launch(**launch_arguments(case, tensors))
    return log


def _check_pointers(program: PluginProgram, index: int, arguments: dict[str, Any]) -> None:
    launch = program.launches[index]
    for name, kind in launch.configuration.arguments.items():
        if kind != "i32":
            assert arguments[name].tensor_name == launch.tensors.get(name, name)


@pytest.mark.parametrize(("case", "sizes"), list(every_case()), ids=case_id)
def test_outputs_are_those_of_the_op(entry: NativeEntry, case: OpCase, sizes: Sizes) -> None:
    spec = SPECS[case.name]
    program = case.plugin_program(torch.float16, sizes, 90)
    assert tuple(rule.name for rule in program.inputs) == spec.inputs
    assert tuple(rule.name for rule in program.outputs) == spec.outputs
    shapes = case.shapes(sizes)
    tensors = meta_tensors(shapes, {rule.name: rule.dtype for rule in program.inputs})
    expected = spec.output_specs(*tensors.values())
    for rule, (dtype, shape) in zip(program.outputs, expected, strict=True):
        assert rule.dtype == dtype
        assert tuple(size.evaluate(shapes) for size in rule.shape) == tuple(shape)
    described = entry.describe(packed(case, torch.float16, sizes, 90), shape_list(program, shapes))
    assert [shape for _, shape in described.outputs] == [tuple(shape) for _, shape in expected]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.workspace])
def test_workspace_of_the_largest_shape_covers_every_smaller_one(name: str) -> None:
    case = CASES[name]
    generator = random.Random(11)
    for _ in range(300):
        largest = {
            **generator.choice(SIZES),
            "B": generator.randrange(1, 9),
            "M": generator.randrange(1, 200),
            "N": generator.randrange(200, 5000),
        }
        smaller = {
            **largest,
            **{key: generator.randrange(1, largest[key] + 1) for key in ("B", "M", "N")},
        }
        for sm in SMS:
            workspace = case.plugin_program(torch.float16, largest, sm).workspace
            granted = workspace.evaluate(case.shapes(largest))
            assert case.workspace is not None
            assert granted >= 4 * case.workspace(smaller)
            assert granted >= workspace.evaluate(case.shapes(smaller))
