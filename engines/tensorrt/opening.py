"""Opens the plans of an engine directory: checks first, then the plugin library, then TensorRT."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lacache_trt.artifacts import Manifest
from lacache_trt.contract import TensorSpec
from lacache_trt.engines.tensorrt.bindings import import_tensorrt
from lacache_trt.engines.tensorrt.call import Resources
from lacache_trt.engines.tensorrt.device import Device
from lacache_trt.engines.tensorrt.interrupts import interrupts_kept
from lacache_trt.engines.tensorrt.layout import WEIGHTS_FILE, graphs_of, plan_file, with_weights
from lacache_trt.engines.tensorrt.loaded import largest_scratch, open_plan
from lacache_trt.engines.tensorrt.logger import new_logger
from lacache_trt.engines.tensorrt.profiles import Profile, profiles_from_json
from lacache_trt.engines.tensorrt.staging import ALIGNMENT, bytes_of
from lacache_trt.errors import ArtifactError, CapacityError
from lacache_trt.model.safetensors_file import E4M3, FLOAT_DTYPES, read_safetensors_header
from lacache_trt.plugins.abi import abi_text
from lacache_trt.plugins.library import find_library, load_library

_CHUNK = 64 * 2**20


@dataclass(frozen=True)
class Opened:
    """The plans in TensorRT. `runtime` must outlive them.

    Attributes:
        runtime: TensorRT's runtime.
        resources: what the lanes share.
        profiles: optimisation profiles of the plans, in their order.
    """

    runtime: Any
    resources: Resources
    profiles: tuple[Profile, ...]


def import_flavour(manifest: Manifest) -> Any:
    """The Python module of the TensorRT that the manifest names."""
    return import_tensorrt(str(manifest.body["engine"]))


def check_machine(manifest: Manifest, trt: Any, device: Device) -> None:
    """Raise `ArtifactError` unless this machine is the one that the plans were built for."""
    body = manifest.body
    here = {
        f"{body['engine']} version": (body.get("tensorrt"), str(trt.__version__)),
        "GPU": (f"sm_{body.get('sm')}", f"sm_{device.sm}"),
    }
    if body.get("plugin_abi") is not None:
        here["plugin ABI"] = (body["plugin_abi"], abi_text())
    differing = {name: pair for name, pair in here.items() if pair[0] != pair[1]}
    if differing:
        raise ArtifactError(
            f"the engine was built for another {' and '.join(differing)}",
            got=", ".join(f"built for {name} {pair[0]}" for name, pair in differing.items()),
            expected=", ".join(f"{name} {pair[1]}" for name, pair in differing.items()),
            fix=f"build it again on this machine: lacache-trt build BUNDLE {manifest.directory} "
            f"--engine {body['engine']} --force",
        )


def open_plans(manifest: Manifest, trt: Any, device: Device) -> Opened:
    """Deserialise the plans and give them weights and memory. The device must be active."""
    logger = new_logger(trt)
    with interrupts_kept():
        runtime = trt.Runtime(logger)
    if manifest.body.get("plugin_abi") is not None:
        load_library(runtime.get_plugin_registry(), find_library())
    profiles = profiles_from_json(manifest.body.get("profiles"))
    weights = _shared_weights(manifest)
    graphs = graphs_of(manifest.contract)
    files = [plan_file(name) for name in graphs]
    needed = sum(manifest.path(name).stat().st_size for name in files)
    _check_fits(needed + _total(weights.values()), device)
    plans = {
        name: open_plan(
            trt,
            runtime,
            logger,
            manifest.path(plan_file(name)),
            with_weights(
                manifest.contract[name],
                tuple(weights[each] for each in _shared_names(manifest, name)),
            ),
            len(profiles),
            _absent(manifest, name),
        )
        for name in graphs
    }
    scratch_bytes = max(ALIGNMENT, largest_scratch(tuple(plans.values())))
    _check_fits(scratch_bytes, device)
    resources = Resources(
        trt=trt,
        logger=logger,
        device=device,
        profiles=profiles,
        plans=plans,
        weights=_upload(manifest, device) if weights else {},
        scratch=device.allocate(scratch_bytes),
        scratch_bytes=scratch_bytes,
    )
    return Opened(runtime, resources, profiles)


_DTYPES = {**FLOAT_DTYPES, E4M3: "float8_e4m3fn"}


def _absent(manifest: Manifest, graph: str) -> frozenset[str]:
    """Tensors that a plan of fixed sizes lacks, because they are empty."""
    absent = manifest.body.get("absent")
    names = absent.get(graph, []) if isinstance(absent, Mapping) else []
    return frozenset(str(name) for name in names)


def _shared_names(manifest: Manifest, graph: str) -> list[str]:
    shared = manifest.body.get("shared_weights")
    names = shared.get(graph, []) if isinstance(shared, Mapping) else []
    return [str(name) for name in names]


def _all_shared_names(manifest: Manifest) -> set[str]:
    graphs = graphs_of(manifest.contract)
    return {name for graph in graphs for name in _shared_names(manifest, graph)}


def _shared_weights(manifest: Manifest) -> dict[str, TensorSpec]:
    """Contract of the weights that are inputs of a plan, from the weights file itself."""
    names = _all_shared_names(manifest)
    if not names:
        return {}
    header = read_safetensors_header(manifest.path(WEIGHTS_FILE))
    if names - header.keys():
        raise ArtifactError(
            "the manifest names weights that the weights file does not hold",
            got=", ".join(sorted(names - header.keys())),
            fix="build the engine again: lacache-trt build BUNDLE OUT --force",
        )
    return {
        name: TensorSpec(name, header[name].shape, _DTYPES[header[name].dtype])
        for name in sorted(names)
    }


def _upload(manifest: Manifest, device: Device) -> dict[str, int]:
    """One device copy of every shared weight; addresses by name."""
    names = _all_shared_names(manifest)
    path = manifest.path(WEIGHTS_FILE)
    header = read_safetensors_header(path)
    addresses: dict[str, int] = {}
    with open(path, "rb") as file:
        for name in sorted(names):
            tensor = header[name]
            addresses[name] = device.allocate(tensor.nbytes)
            file.seek(tensor.offset)
            for start in range(0, tensor.nbytes, _CHUNK):
                count = min(_CHUNK, tensor.nbytes - start)
                device.load(addresses[name] + start, np.fromfile(file, np.uint8, count))
    return addresses


def _total(weights: Iterable[TensorSpec]) -> int:
    return sum(bytes_of(spec, {}) for spec in weights)


def _check_fits(needed: int, device: Device) -> None:
    free = device.free_bytes()
    if needed > free:
        raise CapacityError(
            "the engine does not fit into the device's memory",
            got=f"{free:,} bytes free",
            expected=f"{needed:,} bytes",
            fix="free memory on the device, build with --weights shared, or use a larger GPU",
        )
