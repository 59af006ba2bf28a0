"""Tables for people: drawn by rich on a terminal, plain aligned columns otherwise."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dataset_builders.errors import printable
from flows.resources.terminal import raw_stdout


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], is_terminal: bool) -> None:
    """Print rows under their column heads. A column of numbers is aligned to the right."""
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(columns))]
    if is_terminal:
        table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, pad_edge=True)
        for column, is_right in zip(columns, right):
            table.add_column(column, justify="right" if is_right else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(printable, row))
        Console(file=raw_stdout(), markup=False).print(table)
        return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows)]
    print(f"\n{title}")
    for row in (columns, *rows):
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right)]
        print(("  " + "  ".join(cells)).rstrip())


def bytes_text(number: float) -> str:
    """Return a number of bytes with three digits and its unit, for example 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def _is_number(cell: str) -> bool:
    return cell.replace(",", "").replace(".", "", 1).replace("-", "", 1).replace("%", "").isdigit() or cell == ""
