"""The commit of the running code, if it is in a git checkout."""

import re
import subprocess

from flows.pipeline.mlflow_run import source_version


def _git(directory, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, "-C", str(directory), *arguments], check=True, capture_output=True)


def test_clean_then_dirty(tmp_path):
    _git(tmp_path, "init")
    (tmp_path / "file").write_text("1")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-m", "first")
    version = source_version(tmp_path)
    assert re.fullmatch("[0-9a-f]{40}", version["commit"]) and version["dirty"] == "false"
    (tmp_path / "file").write_text("2")
    assert source_version(tmp_path) == {**version, "dirty": "true"}


def test_outside_a_checkout(tmp_path):
    assert source_version(tmp_path) == {}
