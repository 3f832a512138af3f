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
from lacache_trt.plugins.attention_window import kernel as attention_window
from lacache_trt.plugins.attention_window.plugin import plugin_program as window_program
from lacache_trt.plugins.group_linear import kernel as group_linear
from lacache_trt.plugins.group_linear.plugin import plugin_program as linear_program
from lacache_trt.plugins.group_quant import kernel as group_quant
from lacache_trt.plugins.group_quant.plugin import plugin_program as quant_program
from lacache_trt.plugins.packing import PluginProgram, pack
from lacache_trt.plugins.rms_norm_quant import kernel as rms_norm_quant
from lacache_trt.plugins.rms_norm_quant.plugin import plugin_program as norm_program
from lacache_trt.plugins.sample_block import kernel as sample_block
from lacache_trt.plugins.sample_block.plugin import plugin_program as sample_program
from lacache_trt.plugins.swiglu_quant import kernel as swiglu_quant
from lacache_trt.plugins.swiglu_quant.plugin import plugin_program as swiglu_program

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


def _window_shapes(sizes: Sizes) -> Shapes:
    b, h, g, m, n, d = (sizes[name] for name in ("B", "H", "G", "M", "N", "D"))
    return {
        "q_w": (b, h, m, d),
        "k_w": (b, g, m, d),
        "v_w": (b, g, m, d),
        "k": (b, g, n, d),
        "v": (b, g, n, d),
        "window_columns": (b, m),
        "valid_from": (b,),
        "valid_to": (b,),
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


def _norm_shapes(sizes: Sizes) -> Shapes:
    width = sizes["K"]
    return {"hidden": (sizes["B"], sizes["N"], width), "weight": (width,), "eps": (1,)}


def _quant_shapes(sizes: Sizes) -> Shapes:
    return {"x": (sizes["B"], sizes["N"], sizes["K"])}


def _swiglu_shapes(sizes: Sizes) -> Shapes:
    return {"gate_up": (sizes["B"], sizes["N"], sizes["F"])}


def _linear_shapes(sizes: Sizes) -> Shapes:
    b, m, k, o = (sizes[name] for name in ("B", "M", "K", "O"))
    return {
        "quantised": (b, m, k),
        "scale": (b, m, k // 128),
        "weight": (o, k),
        "weight_scale": (-(-o // 128), k // 128),
        "like": (1,),
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


def _window_workspace(sizes: Sizes) -> int:
    names = ("B", "H", "G", "M", "N", "D")
    return attention_window.workspace_size(*(sizes[name] for name in names))


def _reuse_workspace(sizes: Sizes) -> int:
    names = ("B", "H", "G", "N", "M", "D")
    return attention_reuse.workspace_size(*(sizes[name] for name in names))


def _sample_workspace(sizes: Sizes) -> int:
    return sample_block.workspace_size(sizes["B"], sizes["M"], sizes["V"])


def _linear_workspace(sizes: Sizes) -> int:
    return group_linear.workspace_size(sizes["B"] * sizes["M"], sizes["O"], sizes["K"])


CASES = {
    case.name: case
    for case in (
        OpCase("AttentionFill", attention_fill, fill_program, _fill_shapes, "D", None),
        OpCase(
            "AttentionReuse", attention_reuse, reuse_program, _reuse_shapes, "D", _reuse_workspace
        ),
        OpCase(
            "AttentionWindow",
            attention_window,
            window_program,
            _window_shapes,
            "D",
            _window_workspace,
        ),
        OpCase(
            "Attention", attention, attention_program, _attention_shapes, "D", _attention_workspace
        ),
        OpCase("RMSNormQuant", rms_norm_quant, norm_program, _norm_shapes, "K", None),
        OpCase("SwiGLUQuant", swiglu_quant, swiglu_program, _swiglu_shapes, "F", None),
        OpCase("GroupQuant", group_quant, quant_program, _quant_shapes, "K", None),
        OpCase("GroupLinear", group_linear, linear_program, _linear_shapes, "K", _linear_workspace),
        OpCase("SampleBlock", sample_block, sample_program, _sample_shapes, "V", _sample_workspace),
    )
}
# B rows, H query heads, G key heads, M block or query rows, N columns, D head size, V ids,
# S suppressed and E excluded ids, K and F widths that are quantised (F of gate and up), O columns
# of a linear.
_NAMES = ("B", "H", "G", "M", "N", "D", "V", "S", "E", "K", "F", "O")
SIZES: tuple[Sizes, ...] = tuple(
    dict(zip(_NAMES, sizes, strict=True))
    for sizes in (
        (1, 4, 4, 8, 96, 64, 512, 1, 1, 128, 256, 130),
        (3, 8, 2, 33, 257, 64, 1000, 3, 0, 384, 768, 4096),
        (2, 32, 32, 64, 1152, 128, 126464, 2, 4, 4096, 24576, 24576),
        (4, 28, 4, 32, 2048, 128, 152064, 1, 1, 3584, 37888, 3584),
        (1, 32, 8, 320, 4160, 128, 2049, 1, 2, 640, 1280, 1),
    )
)


def launch_arguments(case: OpCase, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What the kernel module's `launch` must be given; None for a tensor that the op lacks."""
    code, defaults = case.module.launch.__code__, case.module.launch.__defaults__ or ()
    required = code.co_varnames[: code.co_argcount - len(defaults)]
    return {name: tensors.get(name) for name in required}


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
