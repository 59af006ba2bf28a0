"""Templates are complete, escape all values, and are in a wheel."""

import re

import jinja2
import pytest
from setuptools import Distribution

from dataset_builders.contracts.boxes import Box
from stages.shared.pages.drawn_boxes import BoxLayer, drawn_boxes
from stages.shared.pages.page import TEMPLATES, render, render_part
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
    assert {f"stages/shared/pages/templates/{name}" for name in NAMES} < needed <= packed


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith(".html.j2")])
def test_nothing_stands_unescaped(name):
    source = (TEMPLATES / name).read_text()
    assert "| safe" not in source and "autoescape" not in source and "http" not in source.replace("http-equiv", "")


def test_what_is_put_in_is_escaped():
    named = [("", "", None), ("", HOSTILE, None), (HOSTILE, "", 0)]
    pieces = [{"name": name, "boxes": boxes, "place": place, "text": HOSTILE} for name, boxes, place in named]
    message = {"kind": HOSTILE, "role": HOSTILE, "pieces": pieces}
    layer = BoxLayer(name=HOSTILE, kind="true", boxes=[Box(1, 2, 3, 4, HOSTILE)])
    picture = {"source": "data:,", "is_tiny": False, "name": HOSTILE, "caption": HOSTILE}
    picture["boxes"] = drawn_boxes((9, 9), [layer])
    card = {"key": HOSTILE, "figures": [HOSTILE], "subset": HOSTILE, "pictures": [picture], "num_pictures": 1}
    parts = render_part("samples.html.j2", cards=[card | {"messages": [message]}])
    assert "<script" not in parts and "onload" in parts and not re.search(r"""["']\s*onload""", parts)


def test_a_name_that_was_not_given_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="'summary' is undefined"):
        render("page.html.j2", title="x", name="", contents="")
