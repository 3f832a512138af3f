"""The engines by name: where each lives and what it needs. Nothing here imports an engine."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from lacache_trt.errors import MissingDependencyError

AUTO = "auto"


@dataclass(frozen=True)
class EngineEntry:
    """One engine.

    Attributes:
        name: what `--engine` and the manifest say.
        module: module with the engine's `build` and `load` functions.
        description: one line for help and `doctor`.
        requires: import names of the packages it needs.
        install: command that installs them.
        implemented: False for an engine that is planned but not there yet.
    """

    name: str
    module: str
    description: str
    requires: tuple[str, ...]
    install: str
    implemented: bool = True

    def missing(self) -> tuple[str, ...]:
        """Required packages that are not installed."""
        return tuple(name for name in self.requires if not _installed(name))


_ENTRIES = (
    EngineEntry(
        name="tensorrt",
        module="lacache_trt.engines.tensorrt",
        description="TensorRT 10.15 or newer on an NVIDIA GPU",
        requires=("tensorrt",),
        install="pip install tensorrt-cu13",
        implemented=False,
    ),
    EngineEntry(
        name="tensorrt-rtx",
        module="lacache_trt.engines.tensorrt_rtx",
        description="TensorRT for RTX, on GeForce RTX, RTX PRO and L40S GPUs",
        requires=("tensorrt_rtx",),
        install="pip install tensorrt-rtx",
        implemented=False,
    ),
    EngineEntry(
        name="cuda",
        module="lacache_trt.engines.cuda",
        description="PyTorch with Triton kernels and CUDA graphs on an NVIDIA GPU",
        requires=("torch", "triton"),
        install='pip install "lacache-trt[cuda]"',
    ),
    EngineEntry(
        name="onnxruntime",
        module="lacache_trt.engines.onnxruntime",
        description="ONNX Runtime on the CPU, runs anywhere",
        requires=("onnxruntime",),
        install="pip install onnxruntime",
    ),
)
ENGINES = {entry.name: entry for entry in _ENTRIES}
_AUTO_ORDER = ("tensorrt", "tensorrt-rtx")


def resolve(name: str) -> EngineEntry:
    """The engine to build: a named one, or TensorRT, else TensorRT-RTX for `auto`.

    Raises:
        MissingDependencyError: it is not usable here. Another engine is never put in its place.
    """
    if name == AUTO:
        for candidate in _AUTO_ORDER:
            entry = ENGINES[candidate]
            if entry.implemented and not entry.missing():
                return entry
        raise _no_tensorrt()
    entry = ENGINES[name]
    if not entry.implemented:
        usable = [other.name for other in _ENTRIES if other.implemented]
        raise MissingDependencyError(
            f"the {name} engine is not part of this version",
            expected=f"--engine {' or '.join(usable)}",
        )
    missing = entry.missing()
    if missing:
        raise MissingDependencyError(
            f"the {name} engine needs packages that are not installed",
            got=f"missing {', '.join(missing)}",
            fix=entry.install,
        )
    return entry


def _no_tensorrt() -> MissingDependencyError:
    others = [
        entry.name for entry in _ENTRIES if entry.name not in _AUTO_ORDER and entry.implemented
    ]
    planned = [name for name in _AUTO_ORDER if not ENGINES[name].implemented]
    if len(planned) == len(_AUTO_ORDER):
        got = f"this version has no {' or '.join(planned)} engine yet"
        fix = f"choose another engine: --engine {' or '.join(others)}"
    else:
        got = "neither TensorRT nor TensorRT-RTX can be used on this machine"
        fix = f"{ENGINES['tensorrt'].install}, or choose --engine {' or '.join(others)}"
    return MissingDependencyError(
        "--engine auto builds for TensorRT, or else for TensorRT-RTX", got=got, fix=fix
    )


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False
