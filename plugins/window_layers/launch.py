"""Host side of the persistent kernel over layers: tables of the weights, workspaces, launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lacache_trt.plugins.triton_support import LOG2_E, ceil_div, next_power_of_two

ROWS = 32
"""Rows of a window that the kernel serves."""
HEAD = 128
TILE_KEYS = 64
COLUMNS = 128
WARPS = 8
MOST_FACTORS = 64
FIRST = 4
"""Steps of a product that a program keeps in registers before it begins."""
IN_FLIGHT = 8
EARLY_IN_FLIGHT = 3
"""Copies of half a tile under way at once, in a product and before it (chosen on an H200)."""


@dataclass(frozen=True)
class LayerSizes:
    """Sizes that the layers of a stack share.

    Attributes:
        hidden: D, width of the residual stream.
        query: Hq * 128.
        key_value: Hkv * 128.
        intermediate: F, width of the FFN.
        fp8: gate_up and down are E4M3 with scales per group.
        bias: the fused projection has a bias.
        eps: of both norms.
    """

    hidden: int
    query: int
    key_value: int
    intermediate: int
    fp8: bool
    bias: bool
    eps: float

    def products(self) -> list[tuple[int, int]]:
        """(tiles of columns, steps of a tile) of qkv, attn_out, gate_up and down."""
        ffn = 128 if self.fp8 else 64
        return [
            ((self.query + 2 * self.key_value) // COLUMNS, self.hidden // 64),
            (self.hidden // COLUMNS, self.query // 64),
            (2 * self.intermediate // COLUMNS, self.hidden // ffn),
            (self.hidden // COLUMNS, self.intermediate // ffn),
        ]

    def partial_elements(self, programs: int) -> int:
        """Float32 elements for the partial sums of the largest product."""
        counts = (most_parts(tiles, programs) * tiles for tiles, _ in self.products())
        return max(counts) * ROWS * COLUMNS


def most_parts(tiles: int, programs: int) -> int:
    """Programs that share a tile of columns of a product, at most."""
    return ceil_div(programs, tiles) + 1


def programs_for(sizes: LayerSizes, multiprocessors: int) -> int:
    """Programs of the grid: one per multiprocessor, with at least four steps of each product."""
    return min(multiprocessors, *(tiles * steps // FIRST for tiles, steps in sizes.products()))


def chunks(sizes: LayerSizes, programs: int) -> int:
    """Parts of the cached columns per query head, one program each."""
    return programs // (sizes.query // HEAD)


def serves(sizes: LayerSizes, multiprocessors: int) -> bool:
    """Whether the kernel can run layers of these sizes on a device of so many multiprocessors."""
    widths = (sizes.hidden, sizes.query, sizes.key_value, sizes.intermediate)
    if any(width % COLUMNS for width in widths) or sizes.query % sizes.key_value:
        return False
    if any(steps < FIRST for _, steps in sizes.products()):
        return False
    programs = programs_for(sizes, multiprocessors)
    scaled = [tiles * steps for tiles, steps in sizes.products()[2:]] if sizes.fp8 else []
    few_scales = all(ceil_div(total, programs) <= MOST_FACTORS for total in scaled)
    return few_scales and sizes.query // HEAD <= programs


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer: 16-bit ones [K, N], E4M3 ones [N, K] with scales [N / 128, K / 128]."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    attn_out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    gate_up_scale: Tensor | None
    down: Tensor
    down_scale: Tensor | None


class LayerStack:
    """Consecutive layers of equal sizes on a device, ready to be launched."""

    def __init__(
        self, sizes: LayerSizes, layers: Sequence[LayerWeights], multiprocessors: int
    ) -> None:
        self.sizes, self.layers = sizes, tuple(layers)
        self.programs = programs_for(sizes, multiprocessors)
        device = layers[0].qkv.device
        addresses = [
            [
                0 if tensor is None else tensor.data_ptr()
                for tensor in (
                    layer.attn_norm, layer.ffn_norm, layer.qkv_bias,
                    layer.gate_up_scale, layer.down_scale,
                )
            ]
            for layer in layers
        ]  # fmt: skip
        self._table = torch.tensor(addresses, dtype=torch.int64, device=device)
        kinds = ("qkv", "attn_out", "gate_up", "down")
        boxes = {kind: spanning_box([getattr(layer, kind) for layer in layers]) for kind in kinds}
        self._boxes = [boxes[kind][0] for kind in kinds]
        found = {kind: places for kind, (_, places) in boxes.items()}
        rows = [[found[kind][i] for kind in kinds] for i in range(len(layers))]
        self._places = torch.tensor(rows, dtype=torch.int32, device=device)

    def launch(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        window_columns: Tensor,
        valid_from: Tensor,
        valid_to: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Run the layers on `hidden` [1, W, D] in place.

        cos and sin float32 [1, W, 64]; window_columns int32 [1, W]; keys and values [layers, 1,
        Hkv, N, 128] are read outside the window's columns and written there. All contiguous.
        """
        from lacache_trt.plugins.window_layers.kernel import window_layers_kernel

        sizes, rows, length = self.sizes, hidden.shape[1], keys.shape[3]
        cached = (box(tensor.view(-1, HEAD), TILE_KEYS) for tensor in (keys, values))
        window_layers_kernel[(self.programs,)](
            self._table, self._places, *self._boxes, *cached,
            keys, values, hidden, cos, sin, window_columns, valid_from, valid_to,
            *activations(sizes, hidden), *workspaces(sizes, hidden, self.programs),
            len(self.layers), length, rows,
            **constants(sizes, self.programs), num_warps=WARPS, launch_cooperative_grid=True,
        )  # fmt: skip


def activations(sizes: LayerSizes, like: Tensor) -> list[object]:
    """Inputs of the four products and their boxes, boxes of the FFN's scales, and these."""
    ffn = torch.float8_e4m3fn if sizes.fp8 else like.dtype
    kinds = (
        (sizes.hidden, like.dtype), (sizes.query, like.dtype),
        (sizes.hidden, ffn), (sizes.intermediate, ffn),
    )  # fmt: skip
    x = [like.new_empty(ROWS, width, dtype=dtype) for width, dtype in kinds]
    scales = [
        like.new_empty(width // 128, ROWS, dtype=torch.float32)
        for width in (sizes.hidden, sizes.intermediate)
    ]
    boxes = [box(tensor, ROWS) for tensor in x]
    return [*x, *boxes, *(scale_box(scale) for scale in scales), *scales]


def workspaces(sizes: LayerSizes, like: Tensor, programs: int) -> list[Tensor]:
    """Partial sums, sums of squares, states of the attention, and the grid's counter."""
    states = sizes.query // HEAD * (chunks(sizes, programs) + 1)
    shapes = (
        (sizes.partial_elements(programs),), (sizes.hidden // 128, ROWS),
        (states, ROWS, HEAD), (states, ROWS), (states, ROWS),
    )  # fmt: skip
    floats = [like.new_empty(shape, dtype=torch.float32) for shape in shapes]
    return [*floats, like.new_zeros(1, dtype=torch.int32)]


def constants(sizes: LayerSizes, programs: int) -> dict[str, object]:
    """The kernel's constants."""
    return {
        "D": sizes.hidden,
        "Q": sizes.query,
        "KV": sizes.key_value,
        "F": sizes.intermediate,
        "FP8": sizes.fp8,
        "BIAS": sizes.bias,
        "EPS": sizes.eps,
        "SCALE": HEAD**-0.5 * LOG2_E,
        "LANES": next_power_of_two(sizes.hidden // 128),
        "CHUNKS": chunks(sizes, programs),
        "PROGRAMS": programs,
        "IN_FLIGHT": IN_FLIGHT,
        "EARLY": EARLY_IN_FLIGHT,
    }


def box(tensor: Tensor, rows: int) -> object:
    """A descriptor of a matrix as bytes, in boxes of so many rows by 128 bytes."""
    flat = tensor.view(torch.int8)
    return _descriptor(flat, list(flat.shape), flat.shape[1], rows)


def scale_box(scale: Tensor) -> object:
    """A descriptor of float32 [groups, 32] as bytes, in boxes of one group."""
    from lacache_trt.plugins.window_layers.stream import ROW_SCALES

    flat = scale.view(torch.int8)
    return _descriptor(flat, list(flat.shape), flat.shape[1], 1, ROW_SCALES.value)


def spanning_box(tensors: Sequence[Tensor]) -> tuple[object, list[tuple[int, int]]]:
    """One descriptor over matrices of equal shape anywhere in memory, and each's (row, byte).

    Its rows lie as far apart as theirs and are twice as long, so that a matrix may begin anywhere
    in a row. Memory between the matrices is never touched.
    """
    stride = tensors[0].shape[1] * tensors[0].element_size()
    base = min(tensors, key=lambda tensor: tensor.data_ptr())
    places = [divmod(tensor.data_ptr() - base.data_ptr(), stride) for tensor in tensors]
    rows = max(row for row, _ in places) + tensors[0].shape[0] + 1
    return _descriptor(base.view(torch.int8), [rows, 2 * stride], stride, TILE_KEYS), places


def _descriptor(
    base: Tensor, shape: list[int], stride: int, rows: int, layout: object = None
) -> object:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from lacache_trt.plugins.window_layers.stream import BYTE_TILE

    return TensorDescriptor(base, shape, [stride, 1], [rows, 128], layout or BYTE_TILE.value)
