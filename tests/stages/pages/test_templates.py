"""Templates are complete, escape their values, and are part of a wheel."""

import jinja2
import pytest
from setuptools import Distribution

from stages.pages.page import TEMPLATES, render, render_part
from tests.test_architecture import ROOT

NAMES = sorted(path.name for path in TEMPLATES.iterdir())
HOSTILE = "<script>alert(1)</script>\"' onload=x"


def test_a_wheel_has_every_file_that_is_no_module():
    distribution = Distribution()
    distribution.parse_config_files([str(ROOT / "pyproject.toml")])
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    packed = {f"{folder}/{name}" for _, folder, _, names in build.get_data_files_without_manifest() for name in names}
    needed = {
        path.relative_to(ROOT).as_posix()
        for package in ("dataset_builders", "flows", "stages", "trainer")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".css", ".j2", ".js", ".yaml")
    }
    assert {f"stages/pages/templates/{name}" for name in NAMES} < needed <= packed


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".html.j2")])
def test_only_sections_of_reports_stand_unescaped(name):
    """Only the template of sections uses `safe`: for HTML that a report holds, and for a dot between figures."""
    source = (TEMPLATES / name).read_text()
    assert source.count("| safe") == (2 if name == "sections.html.j2" else 0)
    assert "autoescape" not in source and "http" not in source.replace("http-equiv", "")


def test_what_is_put_in_is_escaped():
    parts = render_part(
        "learnt.html.j2", samples=[{"key": HOSTILE, "sources": [], "runs": [], "num_tokens": 1, "num_learnt": 1}]
    )
    assert "<script" not in parts and "&lt;script&gt;" in parts
    assert render("page.html.j2", title=HOSTILE, summary={}, sections=[]).count("<script") == 0


def test_a_name_that_was_not_given_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'title' is undefined"):
        render("page.html.j2", summary={}, sections=[])
