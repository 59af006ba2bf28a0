"""Names that trainer/ imports are found, or missed, in a wheel of a library without running it."""

import zipfile

import pytest

from tests.helpers.newest_release import LIBRARIES, imported, main

DEEP = """
try:
    import fast
except ImportError:
    fast = None
if fast:
    under = 1
else:
    under, over = 2, 3
"""
FILES = {
    "lib/__init__.py": "from .core import *\nfrom . import tools as instruments\n",
    "lib/core.py": "from lib.deep import under\ndef kept(): ...\nclass Kept: ...\nVALUE: int = 1\n",
    "lib/deep.py": DEEP,
    "lib/tools/__init__.py": "def __getattr__(name): ...\n",
    "lib/tools/part.py": "",
    "lib/native.cpython-312-x86_64-linux-gnu.so": "",
}
USES = """
import lib.native
from lib import instruments, kept, under
from lib.core import Kept, VALUE, lost
from lib.deep import fast, over
from lib.tools import anything, part
from lib.gone import more
import other.thing
"""


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "file.py").write_text(USES)
    with zipfile.ZipFile(tmp_path / "lib-2.0-py3-none-any.whl", "w") as packed:
        for name, text in FILES.items():
            packed.writestr(name, text)
    monkeypatch.setitem(LIBRARIES, "lib", "lib")
    monkeypatch.setattr(
        "tests.helpers.newest_release.imported", lambda package: imported(package, tmp_path / "trainer")
    )
    return tmp_path / "lib-2.0-py3-none-any.whl"


def test_the_names_that_a_release_lacks_are_listed_with_their_files(wheel, capsys):
    assert main([str(wheel)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "lib 2.0: 12 names are imported, 2 of them are gone",
        "  lib.core:lost, imported by trainer/file.py",
        "  lib.gone:more, imported by trainer/file.py",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("numpy", "numpy is none of megatron-core"),
        ("numpy-1.0-py3-none-any.whl", "numpy-1.0-py3-none-any.whl is none of"),
        ("torch-9.0-cp312.whl", "torch-9.0-cp312.whl does not exist"),
    ],
)
def test_what_is_no_release_of_a_library_is_refused_before_anything_is_fetched(name, words, capsys):
    with pytest.raises(SystemExit):
        main([name])
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_every_import_of_the_trainer_is_counted():
    assert len(imported("megatron")) > 50 and all(
        module.startswith("megatron.core") for module, _ in imported("megatron")
    )
