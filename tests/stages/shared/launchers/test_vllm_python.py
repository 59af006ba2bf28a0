"""The Python that has vLLM: found without importing it, or refused in one line."""

import pytest

from dataset_builders.errors import InputError
from stages.shared.launchers import vllm as found_vllm
from stages.shared.launchers.vllm import VLLM_PYTHON, check_vllm, find_vllm
from tests.helpers.standin import standin_python

pytestmark = pytest.mark.promise(
    "vLLM is found in this Python or in the one that ATHANOR_VLLM_PYTHON names; a wrong path, no vLLM there or an old "
    "one is one line before work starts."
)


def site(directory, version):
    (directory / "vllm").mkdir()
    (directory / "vllm" / "__init__.py").write_text("raise ImportError('it is not imported')")
    if version:
        (directory / "vllm" / "_version.py").write_text(f"__all__ = []\n__version__ = version = '{version}'\n")
    return directory


@pytest.mark.parametrize("version", ["0.24.0", "0.24.1.dev3+gabc", "0.33.0", "1.0.0"])
def test_a_named_python_is_found_by_its_files(tmp_path, monkeypatch, version):
    python = standin_python(tmp_path, site(tmp_path, version))
    monkeypatch.setenv(VLLM_PYTHON, str(python))
    assert check_vllm() == find_vllm() == (str(python), version)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda d: d / "no", "is no program; give the Python of the environment that has vLLM"),
        (lambda d: d, "is no program"),
        (lambda d: standin_python(d, d), "has no vllm; install vllm==0.24.0 there, or unset ATHANOR_VLLM_PYTHON"),
        (lambda d: standin_python(d, site(d, "0.11.2")), "has vllm 0.11.2, and 0.24 or newer is needed"),
        (lambda d: standin_python(d, site(d, None)), "has vllm of a version that it does not name"),
        (lambda d: _program(d, "#!/bin/sh\necho 'no such library' >&2; exit 127\n"), "(no such library)"),
        (lambda d: _program(d, "no program at all"), "does not run"),
    ],
)
def test_a_named_python_that_cannot_run_it_is_one_line(tmp_path, monkeypatch, prepare, words):
    monkeypatch.setenv(VLLM_PYTHON, str(prepare(tmp_path)))
    for look in (find_vllm, check_vllm):
        with pytest.raises(InputError) as error:
            look()
        assert str(error.value).startswith(f"{VLLM_PYTHON}={tmp_path}") and words in str(error.value)
        assert "\n" not in str(error.value)


def test_without_the_variable_there_may_be_none(monkeypatch):
    monkeypatch.delenv(VLLM_PYTHON, raising=False)
    monkeypatch.setattr(found_vllm, "_ORIGIN", "print('')")
    found_vllm._look.cache_clear()
    assert find_vllm() is None
    with pytest.raises(InputError, match=r"evaluate\.engine is 'vllm', which is not installed here; set ATHANOR_VLLM"):
        check_vllm()
    found_vllm._look.cache_clear()


def _program(directory, text):
    file = directory / "program"
    file.write_text(text)
    file.chmod(0o755)
    return file
