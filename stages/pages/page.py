"""Pages and cards from templates/, which also contains CSS and JS; a page is one file that loads nothing.

`.html.j2` templates escape every value except `Markup`: the HTML of another template, or a drawn curve.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from stages.pages.histogram import bars
from stages.pages.markdown import fenced, table

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: object) -> str:
    """Return the text of a card or page, from a file of templates/.

    Raises:
        jinja2.UndefinedError: the template uses a value that is not given.
    """
    text = _ENVIRONMENT.get_template(template).render(values)
    return text.encode("utf-8", "replace").decode()  # JSON may contain half a surrogate pair, a file may not


def render_part(template: str, **values: object) -> Markup:
    """Return the HTML of a part of a page, for another template."""
    return Markup(render(template, **values))


def show_value(value: object) -> str:
    """Return a value as text for people: 12,345; 0.1235; yes."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        if float(value).is_integer() and abs(value) < 1e15:
            return f"{int(value):,}"
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 image, 2 images."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _numeric_columns(rows: Sequence[Sequence[object]]) -> list[bool]:
    """Return, for each column of a table, whether all its cells are numbers or empty."""
    return [
        all(isinstance(cell, (int, float)) and not isinstance(cell, bool) for cell in column if cell is not None)
        for column in zip(*rows)
    ]


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES),
    autoescape=lambda name: name is not None and name.endswith(".html.j2"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {"bars": bars, "counted": counted, "numeric_columns": _numeric_columns, "shown": show_value}
_ENVIRONMENT.globals |= {"fenced": fenced, "table": table, "zip": zip}
