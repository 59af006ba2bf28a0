"""A library of another version is refused or reported in one line, and the versions of our pins pass."""

import logging
import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from dataset_builders.errors import InputError
from dataset_builders.known_version import check_version
from tests.test_architecture import MODULES, ROOT

KNOWN = re.compile(r'^KNOWN = "(.+)"$', re.MULTILINE)
CHECKED = re.compile(r'^check_version\(\s*"(.+?)"', re.MULTILINE)
LINE = "pytest {version}: a.b was written for {known}; with another version all is lost; install pytest{known}, "
LINE += "or run the module's tests and change its KNOWN"


def test_another_version_is_one_line(caplog):
    line = LINE.format(version=pytest.__version__, known="<1")
    with pytest.raises(InputError) as refused:
        check_version("pytest", "<1", "a.b", "all is lost", refuses=True)
    with caplog.at_level(logging.WARNING):
        check_version("pytest", "<1", "a.b", "all is lost", refuses=False)
        check_version("pytest", ">1", "a.b", "all is lost", refuses=False)
    assert str(refused.value) == line and caplog.messages == [line]


def test_what_the_project_installs_is_known():
    """A module may not be stricter than pyproject.toml, and must know the versions of both constraints files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *extras["gpu"], *extras["flash"]]
    wanted = {requirement.name: requirement.specifier for requirement in map(Requirement, texts)}
    pins = re.findall(r"^([\w.-]+)==(\S+)", "".join(path.read_text() for path in ROOT.glob("constraints*.txt")), re.M)
    known = {}
    for text in [path.read_text() for path in MODULES]:
        if (found := KNOWN.search(text)) and (package := CHECKED.search(text)):
            known[package[1]] = SpecifierSet(found[1])
    assert known == {package: wanted[package] for package in known}
    assert [
        version for name, version in pins if not known.get(canonicalize_name(name), SpecifierSet()).contains(version)
    ] == []
    assert known.keys() == {"prefect", "mlflow", "torch", "megatron-core", "transformer-engine", "flash-attn-4"}
