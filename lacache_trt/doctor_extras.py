"""The optional packages by extra: which are there, and the command that adds the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from lacache_trt.doctor_tensorrt import Ability, install_line
from lacache_trt.gpus import GpuReport
from lacache_trt.model.fp8 import FP8_SM

_EXPORT = (
    "torch",
    "transformers",
    "safetensors",
    "ml-dtypes",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnx-graphsurgeon",
)
EXTRAS = {
    "export": ("export, half-precision build", _EXPORT),
    "hub": ("export of a hub id", ("huggingface-hub",)),
    "cuda": ("build --engine cuda", ("torch", "triton", "safetensors")),
    "fp8": ("build --fp8 --fp8-quantiser modelopt", (*_EXPORT, "nvidia-modelopt", "requests")),
    "plots": ("pictures of bench policies and activations", ("matplotlib",)),
}
"""What each extra of pyproject.toml is for, and its distributions."""


@dataclass(frozen=True)
class Extra:
    """One extra.

    Attributes:
        name: as in `lacache-trt[name]`.
        used_for: what needs it.
        versions: of its distributions; None for those that are not installed.
        install: command that adds what is missing; None if nothing is.
    """

    name: str
    used_for: str
    versions: dict[str, str | None]
    install: str | None


def find_extras(lookup: Callable[[str], str] = version) -> tuple[Extra, ...]:
    """Every extra with the versions that are installed; nothing is imported."""
    return tuple(
        _extra(name, used_for, distributions, lookup)
        for name, (used_for, distributions) in EXTRAS.items()
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


def _extra(
    name: str, used_for: str, distributions: tuple[str, ...], lookup: Callable[[str], str]
) -> Extra:
    versions = {each: _version(each, lookup) for each in distributions}
    complete = None not in versions.values()
    install = None if complete else install_line(f'pip install "lacache-trt[{name}]"')
    return Extra(name, used_for, versions, install)


def _version(distribution: str, lookup: Callable[[str], str]) -> str | None:
    try:
        return lookup(distribution)
    except PackageNotFoundError:
        return None
