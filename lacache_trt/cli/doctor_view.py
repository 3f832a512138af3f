"""A machine report for a reader."""

from __future__ import annotations

from rich.text import Text

from lacache_trt.cli.output import console
from lacache_trt.cli.tables import human_bytes, key_values, table
from lacache_trt.doctor import Ability, MachineReport


def show_report(report: MachineReport) -> None:
    """Print what `lacache_trt.doctor.examine` found."""
    key_values("machine", _machine(report))
    print()
    rows = [(item.name, item.version or "-", item.used_for) for item in report.packages]
    table("packages", ("package", "version", "used for"), rows)
    print()
    out = console()
    out.print("abilities", style="bold")
    for ability in report.abilities:
        out.print(_ability_line(ability))
        if ability.fix:
            out.print(Text(f"      {ability.fix}", style="yellow"), soft_wrap=True)


def _machine(report: MachineReport) -> dict[str, object]:
    gpu = report.gpu
    cards = [
        f"{card.name}, compute capability {card.compute_capability}, "
        f"{human_bytes(card.memory_bytes)}"
        for card in gpu.devices
    ]
    free, total = report.free_memory_bytes, report.memory_bytes
    memory = f"{human_bytes(free)} free of {human_bytes(total)}" if free and total else "unknown"
    return {
        "lacache-trt": report.toolkit_version,
        "python": report.python,
        "system": report.system,
        "cpus": report.cpus,
        "memory": memory,
        "disk": f"{human_bytes(report.free_disk_bytes)} free here",
        "gpu": "; ".join(cards) or gpu.problem,
        "driver": f"{gpu.driver or 'unknown'}, CUDA {gpu.cuda}" if gpu.cuda else "-",
        **{name: path or "-" for name, path in report.compilers.items()},
    }


def _ability_line(ability: Ability) -> Text:
    mark, style = ("✓", "green") if ability.works else ("✗", "red")
    line = Text(f"  {mark} ", style=style)
    line.append(f"{ability.name:<20}", style="default")
    line.append(ability.reason, style="dim")
    return line
