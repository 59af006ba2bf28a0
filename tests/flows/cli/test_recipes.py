"""Commands that need no root: the list of recipes, and the version."""

import importlib.metadata

import pytest

from flows.cli.main import main
from flows.pipeline.recipe import known_recipes


def test_recipes_are_listed_with_what_they_do(capsys, tmp_path):
    assert main(["recipes", "--root", str(tmp_path / "root")]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(rows) == known_recipes()
    assert "digits" in rows["embedded"]
    assert all(purpose.endswith(".") for purpose in rows.values()) and not (tmp_path / "root").exists()


def test_the_version_is_that_of_the_installed_distribution(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"athanor {importlib.metadata.version('athanor-vlm')}\n"
