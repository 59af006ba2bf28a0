"""Tables and foreign text in Markdown, harmless to the text around them."""

import re
from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; numbers have thousands separators and are right-aligned. Foreign text is made harmless."""
    is_number = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(columns))]
    lines = [columns, ["---:" if number else "---" for number in is_number]]
    lines += [[_cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fenced(text: str) -> str:
    """Foreign text as it is, in a fence that nothing in it closes."""
    longest = max((len(run) for run in re.findall(r"~+", text)), default=0)
    fence = "~" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:,}"
    text = " ".join(str(value).split())
    return re.sub(r"([\\|`*_\[\]<>#~])", r"\\\1", text) or " "
