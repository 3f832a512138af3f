"""What a build would make, without making it: every choice, memory per profile, precisions.

Weights, caches and the K and V kept for approximate caches are exact. Activations are an estimate,
the tensors of one layer and of the head that live at the same time; TensorRT decides what it really
takes (`inspect` shows it afterwards where a GPU was there to open the plan).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from lacache_trt.artifacts import Manifest
from lacache_trt.contract import KEY_VALUE_GRAPHS, GraphSpec
from lacache_trt.engines.builder import require_fp8
from lacache_trt.engines.options import BuildOptions
from lacache_trt.engines.registry import resolve_for_build
from lacache_trt.engines.tensorrt.building import Resolved, resolve_build
from lacache_trt.engines.tensorrt.layout import plan_file
from lacache_trt.engines.tensorrt.profiles import Profile
from lacache_trt.engines.tensorrt.share_weights import dtype_name, large_weights, weight_tensors
from lacache_trt.engines.tensorrt.staging import bytes_of
from lacache_trt.gpus import find_gpus
from lacache_trt.model.config import DTYPE_BYTES, Granularity, ModelConfig
from lacache_trt.model.fp8 import (
    GROUP,
    fp8_granularity,
    fp8_linears,
    refuse_fp8_source,
    select_linears,
)
from lacache_trt.plugins.programs import PROGRAMS, require_kernels
from lacache_trt.plugins.spec import DOMAIN
from lacache_trt.prompt_file import read_prompt_file

Planned = Mapping[str, Granularity]
"""The linears that would become FP8, and who would share their scales."""
_QUANTISERS = {"gate_up": "RMSNormQuant", "down": "SwiGLUQuant", "head": "RMSNormQuant"}
_FLOAT32 = "norms, RoPE angles, softmax and its saved state, sampler"


def plan_build(bundle: Manifest, options: BuildOptions) -> dict[str, Any]:
    """The resolved build of a bundle as plain JSON types.

    Raises:
        MissingDependencyError: it could not be built here, or not for that GPU.
        EngineError: the plugins have no kernels for the GPU.
        InvalidRequestError, CapacityError: an option does not suit the bundle.
    """
    entry = resolve_for_build(options.engine, options.tensorrt.sm)
    settings = options.tensorrt
    resolved = resolve_build(bundle, entry.name, settings)
    require_fp8(bundle, replace(options, engine=entry.name), resolved.sm)
    if options.calibration is not None:
        read_prompt_file(options.calibration)
    if settings.plugins:
        require_kernels(resolved.sm)
    models = {name: ir.load(bundle.path(f"{name}.onnx")) for name in resolved.contract}
    linears = planned_linears(bundle, options)
    return {
        "engine": resolved.flavour,
        "tensorrt": str(resolved.trt.__version__),
        "sm": resolved.sm,
        "dtype": resolved.dtype,
        "weights": settings.weights,
        "fp8": _fp8(bundle, linears),
        "plugins": _plugins(models, linears) if settings.plugins else {},
        "files": [plan_file(name) for name in resolved.contract],
        "memory": memory(bundle.model, resolved, models, linears),
        "gpu_memory_bytes": _gpu_memory(resolved.sm),
        "precision": _precision(models["reuse"], linears),
        "float32_everywhere": _FLOAT32,
    }


def planned_linears(bundle: Manifest, options: BuildOptions) -> Planned:
    """The linears that the build would make FP8; what is FP8 already counts as it is.

    Raises:
        InvalidRequestError: the recipe does not suit the bundle.
    """
    if options.fp8 is None:
        return {}
    refuse_fp8_source(bundle.body)
    return dict.fromkeys(select_linears(bundle.model, options.fp8).linears, options.fp8.recipe)


def _fp8(bundle: Manifest, linears: Planned) -> dict[str, Any] | None:
    """How many linears the engine would have in FP8, and by which recipe."""
    found = linears or dict.fromkeys(
        fp8_linears(bundle.body, bundle.model), fp8_granularity(bundle.body)
    )
    return {"recipe": next(iter(found.values())), "linears": len(found)} if found else None


def memory(
    config: ModelConfig,
    resolved: Resolved,
    models: Mapping[str, ir.Model],
    linears: Planned,
) -> list[dict[str, Any]]:
    """Device bytes at the largest sizes of each profile, for one batch in flight."""
    weights = _weight_bytes(models, linears, shared=any(resolved.shared.values()))
    size = DTYPE_BYTES[resolved.dtype]
    return [
        {
            "profile": profile.to_json(),
            "weights": weights,
            **_batch_bytes(config, profile, size),
            **_kept_bytes(resolved.contract, profile),
        }
        for profile in resolved.profiles
    ]


def _batch_bytes(config: ModelConfig, profile: Profile, size: int) -> dict[str, int]:
    ranges = profile.ranges
    rows, read = ranges["B"].high, ranges["Bk"].high + ranges["R"].high
    tokens = rows * ranges["N"].high
    layer = 2 * config.hidden_size + config.qkv_size + config.query_size
    ffn = 2 * config.hidden_size + 3 * config.intermediate_size
    return {
        "caches": tokens * config.cache_bytes_per_token(size),
        "activations": tokens * max(layer, ffn) * size,
        "logits": rows * read * config.vocab_size * (size + DTYPE_BYTES["float32"]),
    }


def _kept_bytes(contract: Mapping[str, GraphSpec], profile: Profile) -> dict[str, int]:
    """K and V of all layers that approximate caches keep, and those of their widest window."""
    sizes = {name: found.high for name, found in profile.ranges.items()}
    sizes["W"] = min(sizes["W"], sizes["N"])
    reuse_kv, window = (
        sum(bytes_of(tensor, sizes) for tensor in contract[name].outputs[-2:])
        if name in contract
        else 0
        for name in KEY_VALUE_GRAPHS
    )
    return {"kept": reuse_kv, "window": window}


def _stored(name: str, tensor: ir.ExternalTensor, linears: Planned) -> dict[str, int]:
    """Bytes by dtype of a weight, as it would be stored."""
    granularity = linears.get(name.removesuffix(".weight"))
    if granularity is None:
        return {dtype_name(tensor): tensor.nbytes}
    inputs, outputs = (int(size) for size in tensor.shape.numpy())
    blocks = -(-outputs // GROUP) * -(-inputs // GROUP)
    scales = blocks if granularity == "per-group" else outputs + 1
    return {"float8_e4m3fn": inputs * outputs, "float32": scales * DTYPE_BYTES["float32"]}


def _weight_bytes(models: Mapping[str, ir.Model], linears: Planned, *, shared: bool) -> int:
    """Embedded weights lie in every plan that uses them; shared ones once (`share_weights`)."""
    embedded = {f"{name}.weight" for name, kind in linears.items() if kind == "per-channel"}
    once: dict[str, int] = {}
    total = 0
    for model in models.values():
        large = {spec.name for spec in large_weights(model)} if shared else set()
        for name, tensor in weight_tensors(model).items():
            size = sum(_stored(name, tensor, linears).values())
            if name in large - embedded:
                once[name] = size
            else:
                total += size
    return total + sum(once.values())


def _plugins(models: Mapping[str, ir.Model], linears: Planned) -> dict[str, int]:
    """Plugin nodes by op."""
    nodes: Iterable[ir.Node] = (node for model in models.values() for node in model.graph)
    found: dict[str, int] = {}
    for node in nodes:
        if node.domain == DOMAIN and node.op_type in PROGRAMS:
            found[node.op_type] = found.get(node.op_type, 0) + 1
    for linear in (name for name, kind in linears.items() if kind == "per-group"):
        for op in ("GroupLinear", _QUANTISERS.get(linear.rpartition(".")[2], "GroupQuant")):
            found[op] = found.get(op, 0) + 1
    return found


def _precision(model: ir.Model, linears: Planned) -> dict[str, dict[str, int]]:
    """Bytes of weights by dtype in every part of the model; GEMMs run in their weights' dtype."""
    parts: dict[str, dict[str, int]] = {}
    for name, tensor in weight_tensors(model).items():
        words = name.split(".")
        part = ".".join(words[:2]) if words[0] == "layers" else words[0]
        dtypes = parts.setdefault(part, {})
        for dtype, size in _stored(name, tensor, linears).items():
            dtypes[dtype] = dtypes.get(dtype, 0) + size
    return parts


def _gpu_memory(sm: int) -> int | None:
    """Memory of this machine's first GPU of that SM."""
    return next((gpu.memory_bytes for gpu in find_gpus().devices if gpu.sm == sm), None)
