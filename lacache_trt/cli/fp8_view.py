"""What is FP8 in a bundle or an engine, for a reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lacache_trt.cli.tables import key_values, table


def show_fp8(found: Mapping[str, Any]) -> None:
    """Print the recipe, what it selects layer by layer, and the kernels that were chosen."""
    section = found["fp8"]
    recipe, linears = section["recipe"], section["linears"]
    layers = {name.split(".")[1] for name in linears if name.startswith("layers.")}
    key_values(
        "FP8",
        {
            "scope": recipe["scope"],
            "recipe": f"{recipe['recipe']}, scales {recipe['scales']} ({recipe['quantiser']})",
            "linears": f"{len(linears)} in {len(layers)} of "
            f"{found['architecture']['num_layers']} layers",
            "left out by a pattern": ", ".join(section["excluded"]) or "none",
            "do not fit": ", ".join(section["unfit"]) or "none",
        },
    )
    print()
    rows = [(name, _decibels(section["facts"].get(name))) for name in linears]
    table("FP8 linears", ("linear", "signal to error of the weights"), rows)
    if "fp8_gemms" in found:
        print()
        choices = [
            (str(each["k"]), str(each["n"]), str(each["m_up_to"]), each["implementation"])
            for each in found["fp8_gemms"]
        ]
        table("FP8 kernels", ("in", "out", "rows up to", "implementation"), choices)


def _decibels(facts: object) -> str:
    value = facts.get("sqnr_db") if isinstance(facts, Mapping) else None
    return f"{value:.1f} dB" if isinstance(value, float) else "exact"
