"""Run by `test_trt_build` in a process of its own: the plugin library in TensorRT 11.4's bindings.

The lean runtime stands in for the full library, so nothing can be built or executed here; what is
checked is that the library loads, registers and makes plugins out of sound programs only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorrt_bindings as trt
import torch

from lacache_trt.engines.tensorrt.interrupts import Interrupts
from lacache_trt.engines.tensorrt.logger import new_logger
from lacache_trt.engines.tensorrt.monitor import new_monitor
from lacache_trt.plugins.library import load_library
from lacache_trt.plugins.packing import FIELD
from lacache_trt.plugins.programs import PROGRAMS, packed_program
from lacache_trt.progress import SilentProgress


def main(library: Path) -> None:
    """Print `ok` at the end."""
    new_logger(trt)
    new_monitor(trt, SilentProgress(), "fill", Interrupts())
    registry = trt.get_plugin_registry()
    load_library(registry, library)
    load_library(registry, library)
    creators = {
        creator.name: creator
        for creator in registry.all_creators
        if creator.plugin_namespace == "lacache"
    }
    assert creators.keys() >= PROGRAMS.keys(), creators.keys()
    for op in PROGRAMS:
        _check_creator(creators[op], op)
    print("ok")


def _check_creator(creator: object, op: str) -> None:
    blob = packed_program(op, torch.bfloat16, 128, 90)
    other = packed_program("SampleBlock" if op == "Attention" else "Attention", torch.half, 64, 90)
    for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME):
        assert _create(creator, blob, phase) is not None
        for refused in (blob[:-8], b"\0" * 64, other):
            assert _create(creator, refused, phase) is None
    plugin = _create(creator, blob, trt.TensorRTPhase.BUILD)
    core = plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
    assert (core.plugin_name, core.plugin_namespace, core.plugin_version) == (op, "lacache", "1")


def _create(creator: object, data: bytes, phase: object) -> object:
    field = trt.PluginField(FIELD, np.frombuffer(data, np.int8), trt.PluginFieldType.INT8)
    return creator.create_plugin("node", trt.PluginFieldCollection([field]), phase)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
