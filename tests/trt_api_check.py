"""Run by `test_trt_api` in a process of its own: what the engines use of TensorRT exists as used.

Nothing is executed. Arguments: the module, `tensorrt_bindings` or `tensorrt_rtx_bindings`.
"""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Any

# Class -> method -> names of its arguments in order, as the engines pass them.
METHODS = {
    "Runtime": {
        "deserialize_cuda_engine": ("serialized_engine",),
        "get_plugin_registry": (),
    },
    "IPluginRegistry": {"load_library": ("plugin_path",)},
    "ICudaEngine": {
        "create_execution_context": ("strategy",),
        "create_engine_inspector": (),
        "get_tensor_name": ("index",),
        "get_tensor_mode": ("name",),
        "get_tensor_dtype": ("name",),
        "get_tensor_shape": ("name",),
    },
    "EngineInspector": {"get_engine_information": ("format",)},
    "IExecutionContext": {
        "set_optimization_profile_async": ("profile_index", "stream_handle"),
        "set_device_memory": ("memory", "size"),
        "set_input_shape": ("name", "shape"),
        "set_tensor_address": ("name", "memory"),
        "infer_shapes": (),
        "execute_async_v3": ("stream_handle",),
    },
    "Builder": {
        "create_network": ("flags",),
        "create_builder_config": (),
        "create_optimization_profile": (),
        "build_serialized_network": ("network", "config"),
        "get_plugin_registry": (),
    },
    "IBuilderConfig": {
        "add_optimization_profile": ("profile",),
        "create_timing_cache": ("serialized_timing_cache",),
        "set_timing_cache": ("cache", "ignore_mismatch"),
    },
    "IOptimizationProfile": {"set_shape": ("input", "min", "opt", "max")},
    "OnnxParser": {"parse": ("model", "path"), "get_error": ("index",)},
}
PROPERTIES = {
    "ICudaEngine": ("num_io_tensors", "num_optimization_profiles", "device_memory_size_v2"),
    "IBuilderConfig": ("profiling_verbosity", "progress_monitor"),
    "IPluginRegistry": ("all_creators",),
    "OnnxParser": ("num_errors",),
}
ENUMERATIONS = {
    "ExecutionContextAllocationStrategy": ("USER_MANAGED",),
    "TensorIOMode": ("INPUT", "OUTPUT"),
    "DataType": ("FLOAT", "HALF", "BF16", "INT32", "INT64", "BOOL"),
    "LayerInformationFormat": ("JSON",),
    "ProfilingVerbosity": ("DETAILED",),
}
# TensorRT-RTX has no timing cache worth keeping, and more that is used only there.
ONLY_RTX = {
    "IExecutionContext": {"is_stream_capturable": ("stream",)},
    "IBuilderConfig": {"set_compute_capability": ("compute_capability", "index")},
}


def main(name: str) -> None:
    """Print what is missing, then `ok` if nothing is."""
    trt = import_module(name)
    problems = []
    for table in (METHODS, ONLY_RTX if "rtx" in name else {}):
        for kind, methods in table.items():
            for method, arguments in methods.items():
                problems += _method_problems(trt, kind, method, arguments)
    for kind, names in (*PROPERTIES.items(), *ENUMERATIONS.items()):
        problems += [f"{kind}.{each}" for each in names if not hasattr(getattr(trt, kind), each)]
    if "rtx" in name and not hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        problems.append("BuilderFlag.REQUIRE_USER_ALLOCATION")
    for mode in ("INPUT", "OUTPUT"):
        _require_text(getattr(trt.TensorIOMode, mode), f"TensorIOMode.{mode}")
    print("\n".join(problems) or "ok")


def _method_problems(trt: Any, kind: str, method: str, arguments: tuple[str, ...]) -> list[str]:
    found = getattr(getattr(trt, kind), method, None)
    if found is None:
        return [f"{kind}.{method} is missing"]
    signatures = re.findall(rf"{method}\(self[^)]*?(?:, (.*?))?\) ->", found.__doc__ or "")
    lists = [re.findall(r"(?:^|, )(\w+):", signature) for signature in signatures]
    if not any(tuple(names[: len(arguments)]) == arguments for names in lists):
        return [f"{kind}.{method}{arguments}: {signatures}"]
    return []


def _require_text(value: Any, text: str) -> None:
    """Plans are compared with the manifest by these spellings."""
    if str(value) != text:
        raise ValueError(f"{value} is not {text}")


if __name__ == "__main__":
    main(sys.argv[1])
