"""What the user may choose for a TensorRT build; the defaults stand here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from lacache_trt.errors import InvalidRequestError

WEIGHTS = ("embedded", "shared")
CACHES = ("exact", "exact,kv")
LEGACY_VERSION = "8.5"
_FLAGS = {"profiles": "--profile", "plugins": "--no-plugins"}


@dataclass(frozen=True)
class TensorRTOptions:
    """Options of a TensorRT build.

    Attributes:
        sm: compute capability to build for, as 89 or 90; by default this machine's GPU. Only
            TensorRT-RTX can build for a GPU that is not there.
        profiles: optimisation profile, as B=1:1:4,N=64:512:2048,Bk=32; may be given several times.
        weights: embedded in each plan, or shared: one device copy for all plans of the directory.
        cache: exact, or exact,kv to build the plans of the approximate caches too. Each of the two
            holds the weights once more unless they are shared.
        plugins: --no-plugins builds the portable variant, standard operators only.
        include: folder with TensorRT's headers, to compile the plugin library.
        timing_cache: file that keeps measured tactics between builds (not with TensorRT-RTX).
        trt_version: 8.5 is the legacy target, with fixed sizes; by default the version installed.
    """

    sm: int | None = None
    profiles: tuple[str, ...] = ()
    weights: Literal["embedded", "shared"] = "embedded"
    cache: Literal["exact", "exact,kv"] = "exact"
    plugins: bool = True
    include: Path | None = None
    timing_cache: Path | None = None
    trt_version: str | None = None

    def __post_init__(self) -> None:
        if self.sm is not None and not (type(self.sm) is int and 50 <= self.sm <= 999):
            raise InvalidRequestError(
                "sm is not a compute capability", got=repr(self.sm), expected="for example 89"
            )
        if self.weights not in WEIGHTS:
            raise InvalidRequestError(
                "unknown place for the weights", got=self.weights, expected=" or ".join(WEIGHTS)
            )
        if self.cache not in CACHES:
            raise InvalidRequestError(
                "unknown kinds of caches", got=self.cache, expected=" or ".join(CACHES)
            )
        if self.trt_version not in (None, LEGACY_VERSION):
            raise InvalidRequestError(
                "trt_version is only for the legacy target",
                got=self.trt_version,
                expected=LEGACY_VERSION,
                fix="leave it out to build with the TensorRT that is installed",
            )

    def changed(self) -> list[str]:
        """The flags of the options that are not at their defaults, as they are typed."""
        names = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        return [_FLAGS.get(name, "--" + name.replace("_", "-")) for name in names]
