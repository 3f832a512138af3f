"""What the user may choose for a build; the defaults stand here and feed the command line."""

from __future__ import annotations

from dataclasses import dataclass, field

from lacache_trt.engines.registry import AUTO, ENGINES, TENSORRT_ENGINES
from lacache_trt.engines.tensorrt.options import TensorRTOptions
from lacache_trt.errors import InvalidRequestError
from lacache_trt.model.fp8 import Fp8Recipe

MAX_THREADS = 4096


@dataclass(frozen=True)
class BuildOptions:
    """Options of a build.

    Attributes:
        engine: tensorrt, tensorrt-rtx, cuda or onnxruntime; `auto` is TensorRT, else TensorRT-RTX.
        overwrite: replace an engine directory that stands at the output path.
        threads: threads of an engine that runs on the CPU; by default the engine decides.
        tensorrt: options that only TensorRT and TensorRT-RTX have.
        fp8: which linears become FP8, and how; None for none.
    """

    engine: str = AUTO
    overwrite: bool = False
    threads: int | None = None
    tensorrt: TensorRTOptions = field(default_factory=TensorRTOptions)
    fp8: Fp8Recipe | None = None

    def __post_init__(self) -> None:
        if self.engine != AUTO and self.engine not in ENGINES:
            raise InvalidRequestError(
                "unknown engine",
                got=self.engine,
                expected=", ".join((AUTO, *ENGINES)),
                fix="choose one of these",
            )
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
            raise InvalidRequestError(
                f"the {self.engine} engine has no TensorRT options",
                got=", ".join(self.tensorrt.changed()),
                fix=f"leave them out, or choose --engine {' or '.join(TENSORRT_ENGINES)}",
            )
        if self.fp8 is not None and not self.tensorrt.plugins:
            raise InvalidRequestError(
                "FP8 with scales per group needs the plugins",
                got="--fp8 with --no-plugins",
                expected="the plugins: standard operators cannot scale 1x128 groups at run time",
                fix="leave one of the two out",
            )
