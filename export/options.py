"""What the user may choose for an export; the defaults stand here and feed the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from lacache_trt.contract import BASE_GRAPHS, KEY_VALUE_GRAPHS
from lacache_trt.errors import InvalidRequestError
from lacache_trt.model.config import DTYPES, Dtype

Validate = Literal["auto", "full", "slice", "off"]
CacheKinds = Literal["exact", "exact,kv"]
OPSET = 23


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        dtype: dtype of the graphs and weights; by default the checkpoint's.
        opset: ONNX opset of the graphs.
        max_length: longest canvas, prompt and generated part; by default the model's own.
        revision: commit, tag or branch of a hub model; it is pinned in the manifest.
        cache: kinds of caches that the bundle has graphs for: `exact`, or `exact,kv` for the
            approximate ones too (`cache="prefix"` and `"dual"`). Each graph is a small file over
            the same weights.
        validate: compare the graphs with the model; `full` runs all layers, `slice` the first and
            last layer and the head, `auto` takes full where it fits into memory.
        overwrite: replace a bundle that stands at the output path.
    """

    dtype: Dtype | None = None
    opset: int = OPSET
    max_length: int | None = None
    revision: str | None = None
    cache: CacheKinds = "exact,kv"
    validate: Validate = "auto"
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InvalidRequestError(
                "unknown dtype",
                got=self.dtype,
                expected=", ".join(DTYPES),
                fix="choose one of these, or leave it out to keep the checkpoint's",
            )
        if type(self.opset) is not int or self.opset != OPSET:
            raise InvalidRequestError(
                "unsupported opset", got=repr(self.opset), expected=f"{OPSET}", fix="leave it out"
            )
        if self.max_length is not None and not _is_length(self.max_length):
            raise InvalidRequestError(
                "max_length (--max-seq-len) is not a sensible length",
                got=repr(self.max_length),
                expected="a positive integer below 2^31",
                fix="leave it out to take the checkpoint's",
            )
        if self.revision is not None and not (isinstance(self.revision, str) and self.revision):
            raise InvalidRequestError(
                "revision is not text",
                got=repr(self.revision),
                expected="a commit, tag or branch",
                fix="leave it out for the newest",
            )
        if self.cache not in get_args(CacheKinds):
            raise InvalidRequestError(
                "unknown kinds of caches",
                got=repr(self.cache),
                expected=" or ".join(get_args(CacheKinds)),
                fix="leave it out for all",
            )
        if self.validate not in get_args(Validate):
            raise InvalidRequestError(
                "unknown validation",
                got=self.validate,
                expected=", ".join(get_args(Validate)),
                fix="choose one of these",
            )

    @property
    def graphs(self) -> tuple[str, ...]:
        """Names of the graphs that the bundle gets."""
        return BASE_GRAPHS + (KEY_VALUE_GRAPHS if self.cache == "exact,kv" else ())


def _is_length(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31
