"""Builds plans with TensorRT 8.5 from lowered graphs.

8.5 chooses precisions by itself unless it is told: the types of the exported graph become
constraints on every layer, so that norms, RoPE and softmax states stay float32 in a float16 plan.
TF32 is off: a float32 plan computes in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lacache_trt.contract import GraphSpec, TensorSpec
from lacache_trt.engines.tensorrt.interrupts import Interrupts, interrupts_kept
from lacache_trt.engines.tensorrt.layout import TYPES, with_weights
from lacache_trt.engines.tensorrt.legacy_api import LegacyRegistry
from lacache_trt.engines.tensorrt.legacy_graph import LoweredGraph
from lacache_trt.engines.tensorrt.logger import new_logger
from lacache_trt.errors import EngineError, VerificationError
from lacache_trt.plugins.library import load_library

_FLOATS = ("float32", "float16")
# Layers without arithmetic, or whose types are given by what they are.
_FREE = ("CONSTANT", "SHAPE", "PLUGIN_V2", "IDENTITY")
# cuDNN is not needed: the graphs have no convolutions.
TACTICS = ("CUBLAS", "CUBLAS_LT", "EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS")
# Without those that are compiled while they are timed.
QUICK_TACTICS = ("CUBLAS", "CUBLAS_LT")
WORKSPACE_BYTES = 1 << 30
_LOG = logging.getLogger("lacache_trt.tensorrt")


@dataclass(frozen=True)
class LegacyTarget:
    """What to build with.

    Attributes:
        trt: the module `tensorrt` 8.5.
        library: the plugin library, compiled with 8.5's headers.
        timing_cache: file of measured tactics; another GPU's or TensorRT's is not used.
        same_gpu_model: take the file from another GPU too; the caller knows that it is alike.
        constraints: `obey` fails where a layer has no kernel in its type, `prefer` takes another.
        tactics: where kernels may come from.
        heuristic: let TensorRT time only the kernels that it expects to be good.
    """

    trt: Any
    library: Path
    timing_cache: Path | None = None
    constraints: Literal["obey", "prefer"] = "obey"
    tactics: tuple[str, ...] = TACTICS
    heuristic: bool = False
    same_gpu_model: bool = False


def build_legacy_plan(
    target: LegacyTarget, graph: LoweredGraph, path: Path, spec: GraphSpec, sizes: Mapping[str, int]
) -> Any:
    """The plan of a lowered graph, as TensorRT's own buffer.

    Args:
        target: what to build with.
        graph: the lowered graph.
        path: where its model lies or would lie; the weights file is looked for beside it.
        spec: the graph's contract, without shared weights.
        sizes: value of each symbol.

    Raises:
        EngineError: the parser or the builder failed; the error holds TensorRT's last messages.
        VerificationError: the parsed network is not what the contract says.
    """
    with interrupts_kept() as interrupts:  # TensorRT's objects end inside, as they may log
        return _build(target, graph, path, spec, sizes, interrupts)


def _build(
    target: LegacyTarget,
    graph: LoweredGraph,
    path: Path,
    spec: GraphSpec,
    sizes: Mapping[str, int],
    interrupts: Interrupts,
) -> Any:
    trt, logger = target.trt, new_logger(target.trt, interrupts)
    load_library(LegacyRegistry(trt.get_plugin_registry()), target.library)
    builder = _builder(trt, logger)
    explicit_batch = 1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH)
    network = builder.create_network(explicit_batch)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(graph.data, str(path)):
        errors = [str(parser.get_error(index)) for index in range(parser.num_errors)]
        raise EngineError(
            f"TensorRT's parser refused {path.name}", got="\n".join(errors) or logger.last_errors()
        )
    check_network(trt, network, graph, with_weights(spec, graph.shared), sizes)
    constrain(trt, network, graph.types)
    config = configure(target, builder, graph)
    cache = use_timing_cache(target, config)
    interrupts.check()
    plan = builder.build_serialized_network(network, config)  # 8.5 cannot be cancelled in it
    interrupts.check()
    _checked(plan, f"TensorRT could not build the graph {spec.name!r}", logger)
    if target.timing_cache is not None:
        _write_whole(target.timing_cache, bytes(cache.serialize()))
    return plan


def check_network(
    trt: Any, network: Any, graph: LoweredGraph, spec: GraphSpec, sizes: Mapping[str, int]
) -> None:
    """Names, types and shapes as in the contract at these sizes; what is empty is not there."""
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    for tensors, specs in ((inputs, spec.inputs), (outputs, spec.outputs)):
        got = [(tensor.name, str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]
        expected = [_at(trt, each, sizes) for each in specs if each.name not in graph.absent]
        if got != expected:
            raise VerificationError(
                f"the network of {spec.name!r} is not what the contract says",
                got=[item for item in got if item not in expected],
                expected=[item for item in expected if item not in got],
                fix="this is a defect of the toolkit; please report it",
            )


def constrain(trt: Any, network: Any, types: Mapping[str, str]) -> None:
    """Give every layer with floating-point outputs the precision that the graph has there."""
    kinds = {"float32": trt.DataType.FLOAT, "float16": trt.DataType.HALF}
    free = tuple(getattr(trt.LayerType, name) for name in _FREE)
    known = {name: kinds[kind] for name, kind in types.items() if kind in _FLOATS}
    for layer in (network.get_layer(index) for index in range(network.num_layers)):
        if layer.type in free:
            continue
        for index in range(layer.num_outputs):
            kind = _output_kind(layer, index, known, types)
            if kind is not None:
                layer.set_output_type(index, kind)
                layer.precision = kind


def _output_kind(layer: Any, index: int, known: dict[str, Any], types: Mapping[str, str]) -> Any:
    """Type of an output: the graph's, or for a layer that the parser added, its first input's."""
    output = layer.get_output(index)
    if output.name in types:
        return known.get(output.name)
    source = layer.get_input(0)
    kind = known.get(source.name) if source is not None else None
    if kind is not None:
        known[output.name] = kind
    return kind


def _builder(trt: Any, logger: Any) -> Any:
    try:
        return trt.Builder(logger)
    except TypeError as error:  # what the bindings make of a null pointer
        raise EngineError(
            "TensorRT gives no builder", got=logger.last_errors() or error, fix="check the driver"
        ) from error


def configure(target: LegacyTarget, builder: Any, graph: LoweredGraph) -> Any:
    """The builder's configuration for a graph."""
    trt = target.trt
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.clear_flag(trt.BuilderFlag.TF32)
    if "float16" in graph.types.values():
        config.set_flag(trt.BuilderFlag.FP16)
    config.set_flag(getattr(trt.BuilderFlag, f"{target.constraints.upper()}_PRECISION_CONSTRAINTS"))
    if target.heuristic:
        config.set_flag(trt.BuilderFlag.ENABLE_TACTIC_HEURISTIC)
    config.set_tactic_sources(
        sum(1 << int(getattr(trt.TacticSource, name)) for name in target.tactics)
    )
    # Without a limit a kernel may ask for the whole GPU's memory, while timed and in the plan.
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
    return config


def use_timing_cache(target: LegacyTarget, config: Any) -> Any:
    """Attach the measured tactics of earlier builds; if they do not suit this machine, new ones."""
    path = target.timing_cache
    if path is None:
        return None
    known = path.read_bytes() if path.is_file() else b""
    cache = config.create_timing_cache(known)  # None for a damaged file
    # A cache bears the id of its GPU: without `ignore_mismatch` it is no good for the next alike.
    ways = (False, True) if target.same_gpu_model else (False,)
    if not any(_attach(config, cache, ignore) for ignore in ways):
        _LOG.warning("%s is damaged or of another GPU or TensorRT; it is begun anew", path)
        cache = config.create_timing_cache(b"")
        _attach(config, cache, False)
    return cache


def _attach(config: Any, cache: Any, ignore_mismatch: bool) -> bool:
    if cache is None:
        return False
    taken = config.set_timing_cache(cache, ignore_mismatch=ignore_mismatch)
    return bool(taken) or config.get_timing_cache() is not None


def _write_whole(path: Path, data: bytes) -> None:
    """All or nothing: a process that is stopped leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.fresh")
    fresh.write_bytes(data)
    fresh.replace(path)


def _at(trt: Any, tensor: TensorSpec, sizes: Mapping[str, int]) -> tuple[str, str, tuple[int, ...]]:
    shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape)
    return tensor.name, str(getattr(trt.DataType, TYPES[tensor.dtype])), shape


def _checked(value: Any, what: str, logger: Any) -> Any:
    if value is None:
        raise EngineError(what, got=logger.last_errors() or "no message from TensorRT")
    return value
