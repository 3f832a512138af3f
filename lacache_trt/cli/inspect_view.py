"""An inspection for a reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lacache_trt.cli.fp8_view import show_fp8
from lacache_trt.cli.tables import human_bytes, key_values, one_line, table


def show_inspection(found: Mapping[str, Any]) -> None:
    """Print what `lacache_trt.inspection.inspect_path` returned."""
    key_values(f"{found['kind']} {found['path']}", _summary(found))
    print()
    key_values("model", _architecture(found["architecture"]))
    if "cut" in found:
        print()
        key_values("rows that are computed", found["cut"])
    print()
    sizes = [(name, human_bytes(size)) for name, size in found["files"].items()]
    table("files", ("file", "size"), sizes)
    if "fp8" in found:
        print()
        show_fp8(found)
    if "profiles" in found:
        print()
        names = list(found["profiles"][0]) if found["profiles"] else []
        rows = [[":".join(map(str, each[name])) for name in names] for each in found["profiles"]]
        table("profiles (smallest:tuned:largest)", names, rows)
    for name, graph in found.get("contract", {}).items():
        print()
        table(f"graph {name}", ("", "tensor", "shape", "dtype"), _tensor_rows(graph))


def _summary(found: Mapping[str, Any]) -> dict[str, object]:
    summary: dict[str, object] = {
        "size": human_bytes(found["total_bytes"]),
        "parameters": f"{found['parameters']:,}",
        "cache per token": human_bytes(found["cache_bytes_per_token"]),
        "cache of a full canvas": human_bytes(found["cache_bytes_full_length"]),
    }
    for name in (
        "engine",
        "device",
        "dtype",
        "opset",
        "revision",
        "tensors",
        "tensorrt",
        "cuda",
        "weights",
        "checked",
    ):
        if found.get(name) is not None:
            summary[name] = found[name]
    if "plugin_abi" in found:
        summary["plugin ABI"] = found["plugin_abi"] or "no plugins"
    for name in ("source", "bundle", "validation", "versions"):
        if isinstance(found.get(name), Mapping) and one_line(found[name]) != "none":
            summary[name] = one_line(found[name])
    if "toolkit_version" in found:
        summary["written by"] = f"lacache-trt {found['toolkit_version']}"
    return summary


def _architecture(model: Mapping[str, Any]) -> dict[str, object]:
    flags = [name for name in ("qkv_bias", "tied_head", "logit_shift") if model[name]]
    return {
        "family": model["family"],
        "layers": model["num_layers"],
        "hidden, FFN": f"{model['hidden_size']}, {model['intermediate_size']}",
        "heads": f"{model['num_heads']} query, {model['num_kv_heads']} key and value, "
        f"dimension {model['head_dim']}",
        "vocabulary": f"{model['vocab_size']:,} (mask {model['mask_id']}, end {model['eos_ids']})",
        "longest canvas": model["max_length"],
        "flags": ", ".join(flags) or "none",
    }


def _tensor_rows(graph: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = []
    for side, tensors in (("in", graph["inputs"]), ("out", graph["outputs"])):
        for tensor in tensors:
            shape = "[" + ", ".join(map(str, tensor["shape"])) + "]"
            rows.append((side, tensor["name"], shape, tensor["dtype"]))
    return rows
