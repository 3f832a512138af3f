"""Which engine can have which FP8 linears, and which of them need a calibration."""

from __future__ import annotations

from pathlib import Path

from lacache_trt.engines.tensorrt.options import LEGACY_VERSION, TensorRTOptions
from lacache_trt.errors import InvalidRequestError
from lacache_trt.model.config import Granularity
from lacache_trt.model.fp8_recipe import Fp8Recipe

PER_CHANNEL = "--fp8-recipe per-channel --calibration FILE.jsonl"


def check_recipe(granularity: Granularity, engine: str, tensorrt: TensorRTOptions) -> None:
    """Raise `InvalidRequestError` if an engine cannot have FP8 linears of this kind.

    Per group needs our plugins. Per channel is for runtimes that fuse standard operators: there is
    no kernel of it in the cuda engine, and TensorRT 8.5 has no FP8 type.
    """
    if granularity == "per-group" and not tensorrt.plugins:
        raise InvalidRequestError(
            "FP8 with scales per group needs the plugins",
            got="--no-plugins",
            expected="the plugins: standard operators cannot scale 1x128 groups at run time",
            fix=f"leave --no-plugins out, or quantise with static scales: {PER_CHANNEL}",
        )
    if granularity == "per-group":
        return
    reasons = {
        "--engine cuda": engine == "cuda",
        f"--trt-version {LEGACY_VERSION}, which has no FP8 type": tensorrt.trt_version is not None,
    }
    refused = [reason for reason, holds in reasons.items() if holds]
    if refused:
        raise InvalidRequestError(
            "FP8 with scales per channel is for TensorRT without plugins and for ONNX Runtime",
            got=refused[0],
            expected="--engine tensorrt, tensorrt-rtx or onnxruntime",
            fix="use --fp8-recipe per-group, on the unquantised bundle",
        )


def check_calibration(recipe: Fp8Recipe | None, calibration: Path | None) -> None:
    """Raise `InvalidRequestError` unless a calibration is there exactly where one is needed."""
    needed = recipe is not None and recipe.recipe == "per-channel"
    if needed and calibration is None:
        raise InvalidRequestError(
            "FP8 with scales per channel needs a calibration: the inputs have static scales",
            got="--fp8-recipe per-channel without --calibration",
            expected='a file of prompts, a JSON line each: a string, token ids or {"prompt": ...}',
            fix="add --calibration FILE.jsonl",
        )
    if calibration is not None and not needed:
        raise InvalidRequestError(
            "nothing here needs a calibration",
            got=f"--calibration {calibration}"
            + (" with --fp8-recipe per-group" if recipe is not None else " without --fp8"),
            expected="it with --fp8 --fp8-recipe per-channel; scales per group are measured as "
            "the engine runs",
            fix="leave --calibration out",
        )
