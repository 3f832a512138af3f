"""Run by `test_trt_wide` in a process of its own: builds a bundle's graphs one after the other.

Prints what a test compares as JSON: for each graph the network's inputs and outputs as TensorRT has
them, whether all programs of each op are in the plan, its size; and the peak memory of the process.
Arguments: bundle, `plugins` or `plugin-free`, profile, then for each graph `GRAPH=OP,OP`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from lacache_trt.artifacts import Manifest, load_manifest
from lacache_trt.engines.tensorrt import plan as plans
from lacache_trt.engines.tensorrt.bindings import RTX, import_tensorrt
from lacache_trt.engines.tensorrt.graphs import prepare_graph
from lacache_trt.engines.tensorrt.profiles import parse_profiles
from lacache_trt.plugins.library import find_library
from lacache_trt.progress import SilentProgress

SM = 89


def main(bundle: str, variant: str, profile: str, *graphs: str) -> None:
    """Print the JSON."""
    manifest = load_manifest(Path(bundle), "bundle", hashes="sizes")
    trt = import_tensorrt(RTX)
    library = find_library() if variant == "plugins" else None
    target = plans.Target(trt, RTX, SM, library)
    found = {name: build(target, manifest, name, profile) for name in graphs}
    print(json.dumps({"graphs": found, "peak_bytes": peak_bytes()}))


def build(target: plans.Target, manifest: Manifest, name: str, profile: str) -> dict[str, Any]:
    """One graph: its network and its plan, which is dropped."""
    seen: dict[str, Any] = {}
    check = plans.check_network

    def recorded(trt: Any, network: Any, spec: Any) -> None:
        seen["inputs"] = [describe(network.get_input(i)) for i in range(network.num_inputs)]
        seen["outputs"] = [describe(network.get_output(i)) for i in range(network.num_outputs)]
        check(trt, network, spec)

    plans.check_network = recorded
    try:
        path, spec = manifest.path(f"{name}.onnx"), manifest.contract[name]
        profiles = parse_profiles((profile,), manifest.model.max_length)
        plan = plans.build_plan(target, path, spec, profiles, SilentProgress())
    finally:
        plans.check_network = check
    data = memoryview(plan)
    present: dict[str, bool] = {}
    for op, program in attached(path):
        found = re.search(re.escape(program), data) is not None
        present[op] = present.get(op, found) and found
    return {**seen, "plan_bytes": data.nbytes, "programs": present}


def attached(path: Path) -> set[tuple[str, bytes]]:
    """Ops and programs of the graph as the parser gets it; every program holds a cubin."""
    import onnx

    model = onnx.load_from_string(prepare_graph(path, SM))
    found = set()
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "program":
                found.add((node.op_type, onnx.numpy_helper.to_array(attribute.t).tobytes()))
    assert all(b"\x7fELF" in program for _, program in found)
    return found


def describe(tensor: Any) -> dict[str, Any]:
    """A network's input or output in plain types."""
    return {
        "name": tensor.name,
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "is_shape": bool(tensor.is_shape_tensor),
    }


def peak_bytes() -> int:
    """Most memory that the process had at once."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(*sys.argv[1:])
