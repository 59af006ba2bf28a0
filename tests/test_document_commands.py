"""Each `athanor ...` line of the README and of docs/ is accepted by the command.

Athanor's own parser reads the line. The recipe of `run`, `plan` and `sweep` is loaded with its `--set`.
Lines that need no data or model of the reader's are executed.
"""

import argparse
import re
import shlex
from pathlib import Path

import pytest
import yaml

from dataset_builders.sources.registry import BUILDERS, get_builder
from flows.cli.check import check_points, recipe_of
from flows.cli.main import COMMANDS, main, make_parser
from tests.helpers.own_data import csv_paths, draw_rows

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
OWN_DATA = ROOT / "docs" / "your-data-on-a-gpu.md"
_FENCE = re.compile(r"^( *)```[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`(athanor [^`]+)`")
_OPTIONAL = re.compile(r"\s\[(?:[A-Z]{2}|--)|\.\.\.")  # in a line that shows the syntax: `athanor run [RECIPE]`
SETTINGS = {"run", "plan", "sweep"}
RUN_AT_ONCE = {"recipes", "doctor", "--version"}


def commands_of(page: Path) -> list[str]:
    """Return the lines of a page's code that start with `athanor`, without comments, with continued lines joined."""
    text = page.read_text()
    blocks = [block.replace("\\\n", " ") for _, block in _FENCE.findall(text)]
    lines = [line.strip().removeprefix(".venv/bin/") for block in blocks for line in block.splitlines()]
    inline = _INLINE.findall(_FENCE.sub("", text).replace("\n", " "))
    return [line for line in (*lines, *inline) if line.startswith("athanor ")]


def examples() -> list[tuple[str, str]]:
    """Yield (name of a page, command), each command once."""
    found = {command: page.name for page in PAGES for command in commands_of(page)}
    return [(page, command) for command, page in found.items()]


EXAMPLES = examples()
LINES = [(page, command) for page, command in EXAMPLES if not _OPTIONAL.search(command)]
USAGES = [command for _, command in EXAMPLES if _OPTIONAL.search(command)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Make the working directory, with the recipe of the page about own data and a reader's DATA."""
    csv_paths(tmp_path / "DATA", draw_rows(seed=0, number=40))
    (recipe,) = re.findall(r"^```yaml title=\"my\.yaml\"\n(.*?)^```", OWN_DATA.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my.yaml").write_text(recipe)
    (tmp_path / "infra").symlink_to(ROOT / "infra")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)[1:]


def parsed(command: str) -> argparse.Namespace:
    return make_parser().parse_args(words_of(command))


def test_there_are_examples_of_every_command():
    named = {words_of(command)[0] for _, command in EXAMPLES}
    assert named - {"--version"} == COMMANDS.keys()
    assert len(LINES) > 40 and len(USAGES) > 5


@pytest.mark.parametrize(("page", "command"), LINES)
def test_the_command_accepts_the_line(page, command, here):
    words = words_of(command)
    if len(words) == 1:  # the name of a command in a sentence
        assert words[0] in (*COMMANDS, "--version")
        return
    args = parsed(command)
    if args.command == "sweep":
        check_points(args)
    elif args.command in SETTINGS:
        recipe_of(args)


@pytest.mark.parametrize("usage", USAGES)
def test_the_command_has_the_options_of_the_line(usage):
    name = words_of(usage.replace("[", " ").replace("]", " "))[0]
    (choices,) = (action.choices for action in make_parser()._actions if isinstance(action.choices, dict))
    known = {option for action in choices[name]._actions for option in action.option_strings}
    assert set(re.findall(r"--[a-z-]+", usage)) <= known


def runs_at_once(command: str) -> bool:
    """Whether a line needs no data or model of the reader's: it prints, inspects DATA, or plans the default recipe."""
    words = words_of(command)
    if words[0] != "plan":
        return words[0] in RUN_AT_ONCE or words[:2] == ["init", "DATA"]
    args = parsed(command)
    embedded = args.recipe == "embedded"
    return embedded and not any(text.startswith(("data=", "start_adapter=")) for text in args.overrides)


EXECUTED = [command for _, command in LINES if runs_at_once(command)]


@pytest.mark.parametrize("command", EXECUTED)
def test_the_line_runs(command, here, capsys, monkeypatch):
    monkeypatch.setenv("PREFECT_HOME", str(here / "prefect"))
    (here / "my.yaml").unlink()  # init writes it
    try:
        status = main(words_of(command))
    except SystemExit as end:  # raised by --version
        status = end.code
    assert status == 0, capsys.readouterr().err
    assert capsys.readouterr().out


def test_lines_of_several_kinds_are_executed():
    assert {words_of(command)[0] for command in EXECUTED} == {"plan", "init", *RUN_AT_ONCE} and len(EXECUTED) >= 10


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_printed(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"athanor {command}" in capsys.readouterr().out


def test_every_builder_has_a_section_whose_options_it_accepts():
    page = (ROOT / "docs" / "data-formats.md").read_text()
    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL))
    assert sections.keys() == BUILDERS.keys()
    for name, section in sections.items():
        (text,) = re.findall(r"^```yaml\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        convert = yaml.safe_load(text)["convert"]
        assert convert["builder"] == name
        get_builder(name).options.model_validate(convert["options"])
