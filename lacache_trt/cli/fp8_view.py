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
            **_calibration(section.get("calibration")),
        },
    )
    print()
    facts = section["facts"]
    columns = ["linear", "signal to error of the weights"]
    rows = [[name, _decibels(facts.get(name))] for name in linears]
    if "calibration" in section:
        columns.append("largest input")
        rows = [[*row, _largest(facts.get(row[0]))] for row in rows]
    table("FP8 linears", columns, rows)
    if "fp8_gemms" in found:
        print()
        choices = [
            (str(each["k"]), str(each["n"]), str(each["m_up_to"]), each["implementation"])
            for each in found["fp8_gemms"]
        ]
        table("FP8 kernels", ("in", "out", "rows up to", "implementation"), choices)


def _calibration(facts: Mapping[str, Any] | None) -> dict[str, str]:
    """What static scales were measured on; nothing for other recipes."""
    if facts is None:
        return {}
    text = f"{facts['prompts']} prompts, {facts['tokens']} tokens, {facts['gen_length']} more each"
    return {"calibration": f"{text} (sha256 {facts['sha256'][:12]})"}


def _decibels(facts: object) -> str:
    value = facts.get("sqnr_db") if isinstance(facts, Mapping) else None
    return f"{value:.1f} dB" if isinstance(value, float) else "exact"


def _largest(facts: object) -> str:
    value = facts.get("input_amax") if isinstance(facts, Mapping) else None
    return f"{value:.4g}" if isinstance(value, float) else "unknown"
