"""The names of served models, and what the server prints about its password."""

from pathlib import Path

import pytest

from flows.serve.run_server import sources_of, tell_login

pytestmark = pytest.mark.promise(
    "`athanor serve` gives many users at once the answers of one alone, to OpenAI's own client too; hang-ups "
    "and failures harm nobody else."
)


def test_names_are_those_of_hub_artifact_or_directory_and_differ(tmp_path):
    artifact, plain, adapter = tmp_path / "release" / "0123456789abcdef" / "hf", tmp_path / "mine", tmp_path / "lora"
    for directory in (artifact, plain, adapter):
        directory.mkdir(parents=True)
    (artifact.parent / "manifest.json").write_text("{}")
    assert [source.name for source in sources_of([str(artifact), str(plain)], None)] == ["release-01234567", "mine"]
    both = sources_of([str(plain), str(plain)], adapter)
    assert [(source.name, source.adapter_dir) for source in both] == [("mine", None), ("mine+lora", adapter)]
    assert [source.name for source in sources_of([str(plain), str(plain)], None)] == ["mine", "mine-2"]


def test_the_password_is_printed_on_a_terminal_only():
    path = Path("/root/service/serve-password")
    assert "word" in tell_login("athanor:word", path, True)
    assert "word" not in tell_login("athanor:word", path, False).replace("password", "")
    assert "word" not in tell_login("athanor:word", None, True).replace("password", "")
