"""Builds the plan of one graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lacache_trt.contract import GraphSpec, TensorSpec
from lacache_trt.engines.tensorrt.bindings import RTX
from lacache_trt.engines.tensorrt.graphs import prepare_graph
from lacache_trt.engines.tensorrt.interrupts import Interrupts, interrupts_kept
from lacache_trt.engines.tensorrt.layout import TYPES
from lacache_trt.engines.tensorrt.logger import new_logger
from lacache_trt.engines.tensorrt.monitor import new_monitor
from lacache_trt.engines.tensorrt.profiles import Profile
from lacache_trt.errors import EngineError, MissingDependencyError, VerificationError
from lacache_trt.plugins.library import load_library
from lacache_trt.progress import Progress


@dataclass(frozen=True)
class Target:
    """What to build for.

    Attributes:
        trt: the Python module.
        flavour: `tensorrt` or `tensorrt-rtx`.
        sm: compute capability.
        library: the plugin library, or None for the plugin-free variant.
        timing_cache: file of measured tactics.
        share_weights: the large weights are inputs of the network.
    """

    trt: Any
    flavour: str
    sm: int
    library: Path | None
    timing_cache: Path | None = None
    share_weights: bool = False


def build_plan(
    target: Target,
    path: Path,
    spec: GraphSpec,
    profiles: Sequence[Profile],
    progress: Progress,
) -> Any:
    """Parse the graph at `path` and build it; the plan is TensorRT's own buffer, not a copy.

    Raises:
        EngineError: the parser or the builder failed; the error holds TensorRT's last messages.
        VerificationError: the parsed network is not what the contract says.
    """
    plugin_sm = target.sm if target.library is not None else None
    data = prepare_graph(path, plugin_sm, target.share_weights)
    with interrupts_kept() as interrupts:  # TensorRT's objects end inside, as they may log
        return _build(target, data, path, spec, profiles, progress, interrupts)


def _build(
    target: Target,
    data: bytes,
    path: Path,
    spec: GraphSpec,
    profiles: Sequence[Profile],
    progress: Progress,
    interrupts: Interrupts,
) -> Any:
    trt, logger = target.trt, new_logger(target.trt, interrupts)
    builder = _checked(trt.Builder(logger), "TensorRT gives no builder", logger)
    if target.library is not None:
        load_library(builder.get_plugin_registry(), target.library)
    network = builder.create_network(_network_flags(trt))
    _parse(trt, network, logger, data, path)
    check_network(trt, network, spec)
    config = builder.create_builder_config()
    _set_target(trt, config, target)
    _add_profiles(builder, config, spec, profiles)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    monitor = new_monitor(trt, progress, path.stem, interrupts)
    config.progress_monitor = monitor
    cache = _use_timing_cache(config, target)
    interrupts.check()
    plan = builder.build_serialized_network(network, config)
    interrupts.check()
    _checked(plan, f"TensorRT could not build the graph {spec.name!r}", logger)
    _save_timing_cache(cache, target)
    return plan


def check_network(trt: Any, network: Any, spec: GraphSpec) -> None:
    """Names, types and shapes as in the contract, and no input that the host has to know.

    A block index that became a shape would be frozen in a captured CUDA graph.
    """
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    for tensors, specs in ((inputs, spec.inputs), (outputs, spec.outputs)):
        got = [_described(tensor) for tensor in tensors]
        expected = [_expected(trt, tensor) for tensor in specs]
        if got != expected:
            raise VerificationError(
                f"the network of {spec.name!r} is not what the contract says",
                got=[item for item in got if item not in expected],
                expected=[item for item in expected if item not in got],
                fix="this is a defect of the toolkit; please report it",
            )
    shapes = [tensor.name for tensor in inputs if tensor.is_shape_tensor]
    if shapes:
        raise VerificationError(
            f"inputs of {spec.name!r} became shape tensors, which a CUDA graph would freeze",
            got=", ".join(shapes),
        )


def _described(tensor: Any) -> tuple[str, str, tuple[int, ...]]:
    return tensor.name, str(tensor.dtype), tuple(tensor.shape)


def _expected(trt: Any, tensor: TensorSpec) -> tuple[str, str, tuple[int, ...]]:
    shape = tuple(-1 if isinstance(dim, str) else dim for dim in tensor.shape)
    return tensor.name, str(getattr(trt.DataType, TYPES[tensor.dtype])), shape


def _network_flags(trt: Any) -> int:
    """Strongly typed; TensorRT 11 and later know nothing else and may drop the flag."""
    strongly_typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if strongly_typed is None else 1 << int(strongly_typed)


def _parse(trt: Any, network: Any, logger: Any, data: bytes, path: Path) -> None:
    parser = trt.OnnxParser(network, logger)
    # The path tells the parser where the external weights lie.
    if not parser.parse(data, str(path)):
        errors = [str(parser.get_error(index)) for index in range(parser.num_errors)]
        raise EngineError(
            f"TensorRT's parser refused {path.name}", got="\n".join(errors) or logger.last_errors()
        )


def _set_target(trt: Any, config: Any, target: Target) -> None:
    if target.flavour != RTX:
        return
    # Without it, TensorRT-RTX allocates while it enqueues, which no stream capture survives.
    config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    name = f"SM{target.sm}"
    capability = getattr(trt.ComputeCapability, name, None)
    if capability is None:
        known = [each for each in dir(trt.ComputeCapability) if each.startswith("SM")]
        raise MissingDependencyError(
            f"TensorRT-RTX {trt.__version__} cannot build for sm_{target.sm}",
            expected=", ".join(known),
            fix="--engine tensorrt supports data-centre GPUs such as H100 (sm_90)",
        )
    config.num_compute_capabilities = 1
    config.set_compute_capability(capability, 0)


def _add_profiles(builder: Any, config: Any, spec: GraphSpec, profiles: Sequence[Profile]) -> None:
    for profile in profiles:
        optimisation = builder.create_optimization_profile()
        for name, shapes in profile.shapes(spec).items():
            optimisation.set_shape(name, *shapes)
        if config.add_optimization_profile(optimisation) < 0:
            raise EngineError("TensorRT refused an optimisation profile", got=profile.to_json())


def _use_timing_cache(config: Any, target: Target) -> Any:
    """TensorRT-RTX measures nothing at build time, so it has no such cache."""
    if target.flavour == RTX or target.timing_cache is None:
        return None
    path = target.timing_cache
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def _save_timing_cache(cache: Any, target: Target) -> None:
    if cache is not None and target.timing_cache is not None:
        target.timing_cache.parent.mkdir(parents=True, exist_ok=True)
        target.timing_cache.write_bytes(bytes(cache.serialize()))


def _checked(value: Any, what: str, logger: Any) -> Any:
    if value is None:
        raise EngineError(what, got=logger.last_errors() or "no message from TensorRT")
    return value
