"""What the user may choose for a build; the defaults stand here and feed the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lacache_trt.engines.fp8_recipes import check_calibration, check_recipe
from lacache_trt.engines.registry import AUTO, ENGINES, TENSORRT_ENGINES
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.errors import InvalidRequestError
from lacache_trt.model.fp8 import Fp8Recipe
from lacache_trt.validation import check_choice

MAX_THREADS = 4096
_TENSORRT = " and ".join(TENSORRT_ENGINES)
# What an engine runs that has no plugins, for those who want to build without them.
_WITHOUT_PLUGINS = {
    "onnxruntime": "it runs standard operators alone, with --fp8 too",
    "cuda": "it runs its own kernels, with --fp8 too",
}


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build.

    Attributes:
        engine: `tensorrt`, tensorrt-rtx, cuda or onnxruntime; auto is TensorRT, else TensorRT-RTX.
        overwrite: replace an engine directory that stands at the output path.
        threads: threads of an engine that runs on the CPU; by default the engine decides.
        tensorrt: options that only TensorRT and TensorRT-RTX have.
        fp8: which linears become FP8, and how; None for none.
        calibration: file of prompts, a JSON line each, for FP8 with scales per channel.
    """

    engine: str = AUTO
    overwrite: bool = False
    threads: int | None = None
    tensorrt: TensorRTOptions = field(default_factory=TensorRTOptions)
    fp8: Fp8Recipe | None = None
    calibration: Path | None = None

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, (AUTO, *ENGINES))
        if self.threads is not None and not (
            type(self.threads) is int and 0 < self.threads <= MAX_THREADS
        ):
            raise InvalidRequestError(
                "threads is not a sensible number",
                got=repr(self.threads),
                expected=f"1 to {MAX_THREADS}",
                fix="leave it out and the engine decides",
            )
        if self.engine not in (AUTO, *TENSORRT_ENGINES) and self.tensorrt != TensorRTOptions():
            raise _without_tensorrt(self.engine, self.tensorrt)
        if self.fp8 is not None:
            check_recipe(self.fp8.recipe, self.engine, self.tensorrt)
        check_calibration(self.fp8, self.calibration)


def _without_tensorrt(engine: str, options: TensorRTOptions) -> InvalidRequestError:
    """The error of a build that is given options which only TensorRT has."""
    given = ", ".join(options.changed())
    reason = _WITHOUT_PLUGINS.get(engine) if not options.plugins else None
    return InvalidRequestError(
        f"the {engine} engine does not take {given}",
        got=f"--engine {engine} {given}",
        fix=f"leave {given} out: {reason or f'only {_TENSORRT} have such flags'}",
    )
