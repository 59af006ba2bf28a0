"""The tables of the documents that the code knows: `python -m tests.helpers.document_tables` writes them.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. What the command line, a recipe or a builder's options
say of themselves is not written a second time.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from dataset_builders.readers.box_places import BoxOptions
from dataset_builders.readers.image_refs import ImageRefOptions
from dataset_builders.sources.registry import BUILDERS, get_builder
from flows.cli.commands import purpose_of
from flows.cli.main import make_parser
from flows.pipeline.config import PipelineConfig
from flows.pipeline.recipe import known_recipes

DOCS = Path(__file__).parents[2] / "docs"
PAGES = tuple(DOCS / name for name in ("commands.md", "data-formats.md", "recipes.md", "settings.md"))
_TABLE = re.compile(r"<!-- table: (.+?) -->\n.*?<!-- end -->", re.DOTALL)
_COMMON = {"--help", "--root", "--debug"}  # options of every command


def table_names() -> set[str]:
    return {"commands", "recipes", "settings", *(f"options of {name}" for name in BUILDERS)}


def with_tables(page: str) -> str:
    """Return the text of a page with all its tables made anew."""
    return _TABLE.sub(lambda found: f"<!-- table: {found[1]} -->\n\n{_table(found[1])}\n<!-- end -->", page)


def _table(name: str) -> str:
    if name == "commands":
        return _rows("command | what it does", ((f"`{usage}`", text) for usage, text in _commands()))
    if name == "recipes":
        return _rows("recipe | what it is", ((f"`{name}`", _plain(purpose_of(name))) for name in known_recipes()))
    if name == "settings":
        return _rows("setting | default | what it is", _settings(PipelineConfig, ""))
    return _rows("option | default | what it sets", _options(name.removeprefix("options of ")))


def _rows(head: str, rows: Iterator[tuple[str, ...]]) -> str:
    columns = head.split(" | ")
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ["---"] * len(columns), *rows))


def _commands() -> Iterator[tuple[str, str]]:
    """Yield how each command is written, and what it does."""
    parser = make_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help for action in commands._choices_actions}
    for name, command in commands.choices.items():
        arguments = [_argument(action) for action in command._actions if not _COMMON & {*action.option_strings}]
        yield " ".join(["athanor", name, *sorted(arguments, key=lambda text: "--" in text)]), _plain(helps[name])


def _argument(action: argparse.Action) -> str:
    """Return an argument of a command, in brackets if it may be left out."""
    value = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else action.dest.upper())
    if action.nargs == "+" and action.option_strings:
        return f"[{action.option_strings[0]} {value} ...]"
    if action.option_strings:
        return f"[{action.option_strings[0]}]" if action.nargs == 0 else f"[{action.option_strings[0]} {value}]"
    return {"?": f"[{value}]", "+": f"{value} [{value} ...]"}.get(action.nargs, value)


def _options(builder: str) -> Iterator[tuple[str, str, str]]:
    """Yield the options of a builder. What several builders have in common is described at the first."""
    for name, field in get_builder(builder).options.model_fields.items():
        default = "required" if field.default is PydanticUndefined else f"`{json.dumps(field.default)}`"
        is_told = name in (ImageRefOptions.model_fields | BoxOptions.model_fields) and builder != "openai_messages"
        text = "as for [`openai_messages`](#openai_messages)" if is_told else _plain(field.description)
        yield f"`{name}`", default, text


def _settings(model: type[BaseModel], section: str) -> Iterator[tuple[str, str, str]]:
    """Yield the fields of a config and of the configs in it."""
    for name, field in model.model_fields.items():
        inner, dotted = [*models_in(field.annotation)], f"{section}{name}"
        if field.description:
            default = "" if field.is_required() or inner else f"`{json.dumps(field.get_default(), default=str)}`"
            yield f"`{dotted}`", default, _plain(field.description)
        shown: set[tuple[str, ...]] = set()  # two kinds of one section share fields
        for each in inner:
            rows = [row for row in _settings(each, f"{dotted}.") if row not in shown]
            shown |= {*rows}
            yield from rows


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def _plain(text: str) -> str:
    """Return a text in which Markdown sees no markup."""
    return re.sub(r"([*|\\])", r"\\\1", text).replace("<", "&lt;")


def main() -> None:
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))


if __name__ == "__main__":
    main()
