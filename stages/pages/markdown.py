"""Tables and foreign text in Markdown, escaped so that they cannot change the text around them."""

import re
from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; numbers have thousands separators and are right-aligned. Foreign text is escaped."""
    is_number = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
    lines = [columns, ["---:" if number else "---" for number in is_number]]
    lines += [[_cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fenced(text: str) -> str:
    """Return foreign text unchanged, in a fence that no line of it can close."""
    longest = max((len(run) for run in re.findall(r"~+", text)), default=0)
    fence = "~" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:,}"
    text = " ".join(str(value).split())
    return re.sub(r"([\\|`*_\[\]<>#~])", r"\\\1", text) or " "
