"""The optional packages by extra: which are there, and the command that adds the others."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from lacache_trt.doctor_tensorrt import Ability, install_line
from lacache_trt.gpus import GpuReport
from lacache_trt.model.fp8 import FP8_SM

_EXPORT = {
    "torch": ">=2.11",
    "transformers": ">=5.0",
    "safetensors": ">=0.5",
    "ml-dtypes": ">=0.5",
    "onnx": ">=1.21",
    "onnx-ir": ">=0.1.12",
    "onnxscript": ">=0.5",
    "onnx-graphsurgeon": ">=0.5.8",
}
_FP8 = {"nvidia-modelopt": "==0.47.0", "transformers": ">=5.0,<5.15", "requests": ">=2.31"}
_CUDA = {"torch": ">=2.11", "triton": ">=3.6,<3.7", "safetensors": ">=0.5"}
EXTRAS: dict[str, tuple[str, dict[str, str]]] = {
    "export": ("export, half-precision build", _EXPORT),
    "hub": ("export of a hub id", {"huggingface-hub": ">=1.0"}),
    "cuda": ("build --engine cuda", _CUDA),
    "fp8": ("build --fp8 --fp8-quantiser modelopt", {**_EXPORT, **_FP8}),
    "plots": ("pictures of bench policies and activations", {"matplotlib": ">=3.8"}),
}
"""What each extra of pyproject.toml is for, and its distributions with their bounds."""

_HOLDS = {">=": operator.ge, "<": operator.lt, "==": operator.eq}
_BOUND = re.compile(r"([<>=]+)([\d.]+)")
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True)
class Extra:
    """One extra.

    Attributes:
        name: as in `lacache-trt[name]`.
        used_for: what needs it.
        versions: of its distributions; None for those that are not installed.
        install: command that adds what is missing or outside its bounds; None if nothing is.
        outside: the bounds of those whose installed version is outside them.
    """

    name: str
    used_for: str
    versions: dict[str, str | None]
    install: str | None
    outside: dict[str, str] = field(default_factory=dict)


def find_extras(lookup: Callable[[str], str] = version) -> tuple[Extra, ...]:
    """Every extra with the versions that are installed; nothing is imported."""
    return tuple(
        _extra(name, used_for, bounds, lookup) for name, (used_for, bounds) in EXTRAS.items()
    )


def fp8_ability(gpu: GpuReport) -> Ability:
    """Whether one of the GPUs multiplies in FP8."""
    name = "FP8 on the GPU"
    able = [card for card in gpu.devices if card.sm >= FP8_SM]
    if able:
        return Ability(name, True, f"{able[0].name}, sm_{able[0].sm}")
    if not gpu.devices:
        return Ability(name, False, gpu.problem or "no GPU")
    card = gpu.devices[0]
    return Ability(name, False, f"{card.name} is sm_{card.sm}; FP8 needs sm_{FP8_SM} or newer")


def _extra(name: str, used_for: str, bounds: dict[str, str], lookup: Callable[[str], str]) -> Extra:
    versions = {each: _version(each, lookup) for each in bounds}
    outside = {
        each: bounds[each]
        for each, found in versions.items()
        if found and not _inside(found, bounds[each])
    }
    complete = None not in versions.values() and not outside
    install = None if complete else install_line(f'pip install "lacache-trt[{name}]"')
    return Extra(name, used_for, versions, install, outside)


def _inside(version: str, bounds: str) -> bool:
    """Whether a version is within bounds such as `>=5.0,<5.15`; its suffixes do not count."""
    found = _release(version)
    return all(_HOLDS[sign](found, _release(bound)) for sign, bound in _BOUND.findall(bounds))


def _release(text: str) -> tuple[int, ...]:
    """The numbers of `2.13.0rc1+cpu`, without zeros at the end, so that 5.0 is 5."""
    match = _NUMBERS.match(text)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _version(distribution: str, lookup: Callable[[str], str]) -> str | None:
    try:
        return lookup(distribution)
    except PackageNotFoundError:
        return None
