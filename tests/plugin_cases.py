"""Shapes, tensors and programs of every op, for the tests of the plugin library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lacache_trt.plugins.attention import kernel as attention
from lacache_trt.plugins.attention.plugin import plugin_program as attention_program
from lacache_trt.plugins.attention_fill import kernel as attention_fill
from lacache_trt.plugins.attention_fill.plugin import plugin_program as fill_program
from lacache_trt.plugins.attention_reuse import kernel as attention_reuse
from lacache_trt.plugins.attention_reuse.plugin import plugin_program as reuse_program
from lacache_trt.plugins.packing import PluginProgram, pack
from lacache_trt.plugins.sample_block import kernel as sample_block
from lacache_trt.plugins.sample_block.plugin import plugin_program as sample_program

Sizes = Mapping[str, int]
Shapes = dict[str, tuple[int, ...]]


def _attention_shapes(sizes: Sizes) -> Shapes:
    b, h, g, m, n, d = (sizes[name] for name in ("B", "H", "G", "M", "N", "D"))
    return {
        "q": (b, h, m, d),
        "k": (b, g, n, d),
        "v": (b, g, n, d),
        "valid_from": (b,),
        "valid_to": (b,),
    }


def _fill_shapes(sizes: Sizes) -> Shapes:
    return {
        **_attention_shapes({**sizes, "M": sizes["N"]}),
        "block_columns": (sizes["B"], sizes["M"]),
    }


def _reuse_shapes(sizes: Sizes) -> Shapes:
    b, h, g, m, n, d = (sizes[name] for name in ("B", "H", "G", "M", "N", "D"))
    return {
        "q_c": (b, h, m, d),
        "k_c": (b, g, m, d),
        "v_c": (b, g, m, d),
        "q": (b, h, n, d),
        "k": (b, g, n, d),
        "v": (b, g, n, d),
        "fa_max": (b, h, n),
        "fa_sum": (b, h, n),
        "fa_acc": (b, h, n, d),
        "valid_from": (b,),
        "valid_to": (b,),
        "block_columns": (b, m),
    }


def _sample_shapes(sizes: Sizes) -> Shapes:
    b, m, v, s, e = (sizes[name] for name in ("B", "M", "V", "S", "E"))
    rows = dict.fromkeys(("temperature", "seed", "step", "guide_row", "cfg_scale"), (b,))
    return {
        "logits": (b, m, v),
        "positions": (b, m),
        **rows,
        "suppress_ids": (b, s),
        "confidence_exclude_ids": (b, e),
    }


@dataclass(frozen=True)
class OpCase:
    """One op: its program, its kernel module and the shapes of its inputs."""

    name: str
    module: Any
    program: Callable[[torch.dtype, int, int], PluginProgram]
    shapes: Callable[[Sizes], Shapes]
    width: str  # the size that the program is made for
    workspace: Callable[[Sizes], int] | None

    def plugin_program(self, dtype: torch.dtype, sizes: Sizes, sm: int) -> PluginProgram:
        """The program for these sizes."""
        return self.program(dtype, sizes[self.width], sm)


def _attention_workspace(sizes: Sizes) -> int:
    names = ("B", "H", "G", "M", "N", "D")
    return attention.workspace_size(*(sizes[name] for name in names))


def _reuse_workspace(sizes: Sizes) -> int:
    names = ("B", "H", "G", "N", "M", "D")
    return attention_reuse.workspace_size(*(sizes[name] for name in names))


def _sample_workspace(sizes: Sizes) -> int:
    return sample_block.workspace_size(sizes["B"], sizes["M"], sizes["V"])


CASES = {
    case.name: case
    for case in (
        OpCase("AttentionFill", attention_fill, fill_program, _fill_shapes, "D", None),
        OpCase(
            "AttentionReuse", attention_reuse, reuse_program, _reuse_shapes, "D", _reuse_workspace
        ),
        OpCase(
            "Attention", attention, attention_program, _attention_shapes, "D", _attention_workspace
        ),
        OpCase("SampleBlock", sample_block, sample_program, _sample_shapes, "V", _sample_workspace),
    )
}
# B rows, H query heads, G key heads, M block or query rows, N columns, D head size, V ids.
SIZES: tuple[Sizes, ...] = (
    {"B": 1, "H": 4, "G": 4, "M": 8, "N": 96, "D": 64, "V": 512, "S": 1, "E": 1},
    {"B": 3, "H": 8, "G": 2, "M": 33, "N": 257, "D": 64, "V": 1000, "S": 3, "E": 0},
    {"B": 2, "H": 32, "G": 32, "M": 64, "N": 1152, "D": 128, "V": 126464, "S": 2, "E": 4},
    {"B": 4, "H": 28, "G": 4, "M": 32, "N": 2048, "D": 128, "V": 152064, "S": 1, "E": 1},
    {"B": 1, "H": 32, "G": 8, "M": 320, "N": 4160, "D": 128, "V": 2049, "S": 1, "E": 2},
)


class Recorder:
    """Stands in for a jitted kernel and keeps how it was launched."""

    def __init__(self, kernel: Any, log: list[tuple[str, tuple[int, ...], dict[str, Any]]]) -> None:
        self._kernel = kernel
        self._log = log

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            named = dict(zip(self._kernel.arg_names, arguments, strict=False))
            self._log.append((self._kernel.__name__, grid, {**named, **constants}))

        return launch


def meta_tensors(shapes: Shapes, dtypes: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Tensors without storage."""
    return {
        name: torch.empty(shape, dtype=dtypes[name], device="meta")
        for name, shape in shapes.items()
    }


def every_case() -> Iterator[tuple[OpCase, Sizes]]:
    """Each op at each size."""
    for case in CASES.values():
        for sizes in SIZES:
            yield case, sizes


def shape_list(program: PluginProgram, shapes: Shapes) -> Sequence[Sequence[int]]:
    """Input shapes in the program's order."""
    return [shapes[rule.name] for rule in program.inputs]


_packed: dict[tuple[Any, ...], bytes] = {}


def packed(case: OpCase, dtype: torch.dtype, sizes: Sizes, sm: int) -> bytes:
    """The program's bytes, made once per test run."""
    key = (case.name, dtype, sizes[case.width], sm)
    if key not in _packed:
        _packed[key] = pack(case.plugin_program(dtype, sizes, sm), sm)
    return _packed[key]


def case_id(value: object) -> str:
    if isinstance(value, OpCase):
        return value.name
    if isinstance(value, dict):
        return "-".join(f"{name}{size}" for name, size in value.items())
    return str(value)
