"""What the user may choose for a TensorRT build; the defaults stand here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lacache_trt.errors import InvalidRequestError


@dataclass(frozen=True)
class TensorRTOptions:
    """Options of a TensorRT build.

    Attributes:
        sm: compute capability to build for, as 89 or 90; by default this machine's GPU. Only
            TensorRT-RTX can build for a GPU that is not there.
        profiles: optimisation profiles, each as `B=1:1:4,N=64:512:2048,Bk=32`.
        plugins: False builds the portable variant: no plugin library, standard operators only.
        include: folder with TensorRT's headers, to compile the plugin library.
        timing_cache: file that keeps measured tactics between builds (TensorRT only).
    """

    sm: int | None = None
    profiles: tuple[str, ...] = ()
    plugins: bool = True
    include: Path | None = None
    timing_cache: Path | None = None

    def __post_init__(self) -> None:
        if self.sm is not None and not (type(self.sm) is int and 50 <= self.sm <= 999):
            raise InvalidRequestError(
                "sm is not a compute capability", got=repr(self.sm), expected="for example 89"
            )
