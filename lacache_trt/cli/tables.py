"""How results look to a reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from lacache_trt.cli.output import console


def human_bytes(count: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def one_line(values: Mapping[str, object]) -> str:
    """`a 1, b 2` of a record's plain values, for a cell; nested records are left to --json."""
    shown = [
        f"{name} {_plain(value)}"
        for name, value in values.items()
        if value is not None and not isinstance(value, (Mapping, list))
    ]
    return ", ".join(shown) or "none"


def key_values(title: str, values: Mapping[str, object]) -> None:
    """A titled list of names and values."""
    out = console()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in values.items():
        grid.add_row("  " + name, str(value))
    out.print(title, style="bold", markup=False)
    _print(grid)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table with a heading line; numbers to the right."""
    grid = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    cells = [list(row) for row in rows]
    for index, name in enumerate(columns):
        numeric = bool(cells) and all(isinstance(row[index], (int, float)) for row in cells)
        grid.add_column(name, justify="right" if numeric else "left", header_style="dim")
    for row in cells:
        grid.add_row(*(_plain(cell) for cell in row))
    _print(grid)


def _print(grid: Table) -> None:
    """Print a table; a file or a pipe gets no blanks at the ends of lines."""
    out = console()
    if out.is_terminal:
        out.print(grid)
        return
    with out.capture() as captured:
        out.print(grid)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
