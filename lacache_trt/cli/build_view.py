"""A planned build for a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lacache_trt.cli.tables import human_bytes, key_values, table

_PARTS = {
    "weights": "weights",
    "caches": "caches",
    "kept": "kept K and V",
    "window": "window K and V",
    "activations": "activations",
    "logits": "logits",
}


def show_planned(planned: Mapping[str, Any]) -> None:
    """Print what `lacache_trt.engines.tensorrt.estimate.plan_build` returned."""
    plugins, fp8 = planned["plugins"], planned["fp8"]
    key_values(
        "would be built",
        {
            "engine": f"{planned['engine']} {planned['tensorrt']}",
            "for": f"sm_{planned['sm']}",
            "dtype": planned["dtype"],
            "weights": planned["weights"],
            "FP8": f"{fp8['linears']} linears, {fp8['recipe']}" if fp8 else "none",
            "plugins": ", ".join(f"{count} {op}" for op, count in plugins.items()) or "none",
            "files": ", ".join(planned["files"]),
        },
    )
    print()
    memory = planned["memory"]
    parts = [name for name in _PARTS if any(entry[name] for entry in memory)]
    columns = ("profile", *(_PARTS[name] for name in parts), "sum")
    rows = [_memory_row(entry, parts) for entry in memory]
    table("device memory at each profile's largest sizes", columns, rows)
    total = planned["gpu_memory_bytes"]
    if total:
        print(f"memory of the GPU: {human_bytes(total)}")
    print("activations and logits are estimates; see docs/tensorrt.md")
    print()
    cells = [
        (part, ", ".join(f"{dtype} {human_bytes(size)}" for dtype, size in dtypes.items()))
        for part, dtypes in planned["precision"].items()
    ]
    table("weights and GEMMs", ("part", "precision"), cells)
    print(f"float32 in every layer: {planned['float32_everywhere']}")


def _memory_row(entry: Mapping[str, Any], parts: Sequence[str]) -> tuple[str, ...]:
    ranges = entry["profile"]
    profile = ",".join(f"{name}={':'.join(map(str, sizes))}" for name, sizes in ranges.items())
    sizes = [entry[name] for name in parts]
    return (profile, *(human_bytes(size) for size in (*sizes, sum(sizes))))
