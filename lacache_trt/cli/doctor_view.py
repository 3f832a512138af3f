"""A machine report for a reader."""

from __future__ import annotations

from rich.text import Text

from lacache_trt.cli.output import console
from lacache_trt.cli.tables import human_bytes, key_values, table
from lacache_trt.doctor import Ability, MachineReport
from lacache_trt.doctor_extras import Extra


def show_report(report: MachineReport) -> None:
    """Print what `lacache_trt.doctor.examine` found."""
    key_values("machine", _machine(report))
    print()
    rows = [(item.name, item.version or "-", item.used_for) for item in report.packages]
    table("packages", ("package", "version", "used for"), rows)
    print()
    out = console()
    out.print("extras", style="bold")
    for extra in report.extras:
        out.print(_extra_line(extra), soft_wrap=True)
        if extra.install:
            out.print(Text(f"      {extra.install}", style="yellow"), soft_wrap=True)
    print()
    out.print("abilities", style="bold")
    for ability in report.abilities:
        out.print(_ability_line(ability), soft_wrap=True)
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


def _extra_line(extra: Extra) -> Text:
    missing = [name for name, version in extra.versions.items() if version is None]
    found = [f"{name} {version}" for name, version in extra.versions.items() if version]
    parts = [f"missing {', '.join(missing)}"] if missing else []
    parts += [
        f"{name} {extra.versions[name]} is outside {bounds}, which was tested"
        for name, bounds in extra.outside.items()
    ]
    parts += [f"installed {', '.join(found)}"] if found else []
    good = not missing and not extra.outside
    return _line(good, extra.name, f"{extra.used_for}: {'; '.join(parts)}")


def _ability_line(ability: Ability) -> Text:
    return _line(ability.works, ability.name, ability.reason)


def _line(good: bool, name: str, words: str) -> Text:
    mark, style = ("✓", "green") if good else ("✗", "red")
    line = Text(f"  {mark} ", style=style)
    line.append(f"{name:<20}", style="default")
    line.append(words, style="dim")
    return line
