"""Checkpoints whose linears are FP8 already: E4M3 with one float32 scale per 128 x 128 block.

Two layouts, both with weights [out, in] and value * scale for dequantising:
    DeepSeek   quant_method fp8, weight_block_size [128, 128]; scales `X.weight_scale_inv`
               [out / 128, in / 128], rounded up
    ModelOpt   quant_method modelopt, quant_algo fp8_pb_wo; scales `X.weight_scale`
               [out / 128, 1, in / 128, 1]
The exporter dequantises, so a bundle is the same whatever it came from. Quantising such a bundle
again gives the same E4M3 values, since a block's largest one is 448 and its scale is found again
to the precision of the bundle's dtype.
Sources: DeepSeek-V3's weight notes; ModelOpt 0.47's exporter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lacache_trt.errors import CheckpointError
from lacache_trt.model.safetensors_file import E4M3, StoredTensor

KEY = "quantization_config"
BLOCK = 128


@dataclass(frozen=True)
class QuantisedLayout:
    """A known layout: its name and how the name of a weight's scales ends."""

    name: str
    suffix: str


DEEPSEEK = QuantisedLayout("DeepSeek", "_scale_inv")
MODELOPT = QuantisedLayout("ModelOpt", "_scale")


def take_layout(raw: Mapping[str, Any]) -> tuple[dict[str, Any], QuantisedLayout | None]:
    """config.json without the section on quantisation if the layout is known, and the layout."""
    section = raw.get(KEY)
    layout = _known(section) if isinstance(section, dict) else None
    return {key: raw[key] for key in raw if layout is None or key != KEY}, layout


def _known(section: Mapping[str, Any]) -> QuantisedLayout | None:
    method = section.get("quant_method")
    if method == "fp8" and section.get("weight_block_size") == [BLOCK, BLOCK]:
        return DEEPSEEK if section.get("fmt", "e4m3") == "e4m3" else None
    if method == "modelopt" and str(section.get("quant_algo")).lower() == "fp8_pb_wo":
        return MODELOPT
    return None


def split_scales(
    tensors: Mapping[str, StoredTensor], layout: QuantisedLayout | None
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The tensors without scales, and the scales by the name of their weight.

    Raises:
        CheckpointError: an FP8 weight has no scales that fit it.
    """
    if layout is None:
        return dict(tensors), {}
    quantised = {name: tensor for name, tensor in tensors.items() if tensor.dtype == E4M3}
    scales = {
        name: tensors[name + layout.suffix] for name in quantised if name + layout.suffix in tensors
    }
    wrong = [
        f"{name} {list(tensor.shape)} has {_described(scales.get(name))}"
        for name, tensor in quantised.items()
        if name not in scales or not _fits(tensor, scales[name])
    ]
    if wrong:
        raise CheckpointError(
            f"FP8 weights lack the scales of {layout.name}'s layout",
            got="; ".join(wrong[:8]),
            expected=f"F32 scales of 128 x 128 blocks under the weight's name and {layout.suffix}",
            fix="download the checkpoint again, or export it from its 16-bit original",
        )
    taken = {name + layout.suffix for name in scales}
    return {name: tensor for name, tensor in tensors.items() if name not in taken}, scales


def _fits(weight: StoredTensor, scale: StoredTensor) -> bool:
    blocks = tuple(-(-size // BLOCK) for size in weight.shape)
    if scale.dtype != "F32" or len(blocks) != 2:
        return False
    return scale.shape in (blocks, (blocks[0], 1, blocks[1], 1))


def _described(scale: StoredTensor | None) -> str:
    return "none" if scale is None else f"{scale.dtype} {list(scale.shape)}"
