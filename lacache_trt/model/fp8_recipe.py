"""What the user asks of the FP8 quantisation; the defaults stand here and feed the command line."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from lacache_trt.errors import InvalidRequestError
from lacache_trt.model.config import Granularity
from lacache_trt.validation import check_choice

Scope = Literal["ffn", "linears", "all"]
ScaleRule = Literal["max", "mse"]
Quantiser = Literal["builtin", "modelopt"]
_CHOICES = {"scope": Scope, "recipe": Granularity, "scales": ScaleRule, "quantiser": Quantiser}


@dataclass(frozen=True)
class Fp8Recipe:
    """What to quantise and how.

    Attributes:
        scope: ffn (gate-up and down), linears (all projections of a layer too), all (the head too).
        layers: as 1-31 or 2,4-6; by default all but layer 0.
        exclude: patterns of linears to leave out, as layers.5.down or *.attn_out.
        recipe: per-group (inputs 1x128, weights 128x128) needs the plugins; per-channel (weights by
            output, inputs by --calibration) needs none, and is for TensorRT and ONNX Runtime.
        scales: max, or mse, which searches each weight scale for the smallest squared error.
        quantiser: builtin, or modelopt, which takes the largest magnitudes from NVIDIA ModelOpt.
    """

    scope: Scope = "ffn"
    layers: str | None = None
    exclude: tuple[str, ...] = ()
    recipe: Granularity = "per-group"
    scales: ScaleRule = "max"
    quantiser: Quantiser = "builtin"

    def __post_init__(self) -> None:
        _check_types(self.layers, self.exclude)
        for name, kind in _CHOICES.items():
            check_choice(f"FP8 {name}", getattr(self, name), get_args(kind))
        if self.layers is not None:
            layer_ranges(self.layers)

    def to_json(self) -> dict[str, Any]:
        """Plain types only."""
        return {**asdict(self), "exclude": list(self.exclude)}


def layer_ranges(text: str) -> list[tuple[int, int]]:
    """The inclusive ranges of a text such as `1-31` or `2,4-6`."""
    ranges = []
    for part in text.split(","):
        ends = [end.strip() for end in part.split("-")]
        numbers = [int(end) for end in ends if end.isascii() and end.isdecimal() and len(end) < 6]
        if len(numbers) != len(ends) or len(ends) > 2 or numbers[0] > numbers[-1]:
            raise InvalidRequestError(
                "these are not layers",
                got=repr(text),
                expected="numbers and ranges, as 1-31 or 2,4-6",
                fix="correct --fp8-layers",
            )
        ranges.append((numbers[0], numbers[-1]))
    return ranges


def _check_types(layers: object, exclude: object) -> None:
    if layers is not None and not isinstance(layers, str):
        raise InvalidRequestError(
            "FP8 layers are not text", got=repr(layers), expected="a str such as 1-31, or None"
        )
    if not isinstance(exclude, tuple) or not all(isinstance(each, str) for each in exclude):
        raise InvalidRequestError(
            "FP8 exclude is not a tuple of patterns",
            got=repr(exclude),
            expected='a tuple of str such as ("*.down",)',
        )
