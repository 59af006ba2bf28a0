"""A root is private to its owner: made so, closed with one line of output, or reported if it cannot be closed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dataset_builders.errors import InputError
from flows.cli.main import main
from flows.service.access import make_private_root
from tests.helpers.own_data import csv_paths, draw_rows

pytestmark = pytest.mark.promise(
    "A page of another origin, another user of the machine, and somebody with the password run no command."
)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


@pytest.mark.parametrize("umask", [0, 0o022])
def test_a_root_is_made_for_its_owner_alone(tmp_path, umask):
    before = os.umask(umask)
    try:
        assert make_private_root(tmp_path / "a" / "root") is None
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "a" / "root") == 0o700


@pytest.mark.parametrize(("before", "after"), [(0o755, 0o700), (0o777, 0o700), (0o2770, 0o2700), (0o550, 0o500)])
def test_an_existing_root_is_tightened_once_and_a_line_says_so(tmp_path, before, after):
    tmp_path.chmod(before)
    line = make_private_root(tmp_path)
    assert f"--root {tmp_path} was open to other users (mode {before:o}); it is now its owner's alone" in line
    assert mode_of(tmp_path) == after and make_private_root(tmp_path) is None


def test_a_directory_for_everybody_stays_as_it_is(tmp_path):
    tmp_path.chmod(0o1777)
    assert make_private_root(tmp_path) is None and mode_of(tmp_path) == 0o1777


def test_a_root_of_another_user_is_told_and_used(tmp_path, monkeypatch):
    tmp_path.chmod(0o775)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    assert f"belongs to user {os.getuid()}, who alone can close it: chmod 700" in make_private_root(tmp_path)


@pytest.mark.parametrize("root", ["/proc", "/proc/root-of-athanor"])
def test_a_root_that_cannot_be_written_is_one_line(root, capsys):
    with pytest.raises(InputError):
        make_private_root(Path(root))
    assert main(["run", "--root", root]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"athanor: --root {root} cannot be written (") and line.endswith("; choose another root")


@pytest.mark.parametrize("words", [["up", "--limit", "gpus"], ["init", "/nowhere"], ["run", "/nowhere.yaml"]])
def test_a_refused_command_leaves_no_root(words, tmp_path):
    assert main([*words, "--root", str(tmp_path / "root")]) == 2 and not (tmp_path / "root").exists()
    (tmp_path / "root").mkdir()  # by its owner
    assert main([*words, "--root", str(tmp_path / "root")]) == 2 and (tmp_path / "root").exists()


def test_a_root_beside_the_data_is_no_data(tmp_path, capsys):
    csv_paths(tmp_path, draw_rows(0, 40))
    root = tmp_path / "kept"
    for number in range(2):  # the first command writes into the root
        out = tmp_path.parent / f"{tmp_path.name}-{number}.yaml"
        assert main(["init", str(tmp_path), "--root", str(root), "--out", str(out)]) == 0
        (root / "digests.json").write_text("[]")
        assert "look at: columns that are not used: id\n\n" in capsys.readouterr().out  # and nothing else
    assert main(["init", str(root), "--root", str(tmp_path / "other"), "--out", str(tmp_path / "b.yaml")]) == 2
    assert f"raw data {root} is the --root of athanor; give the data, or another --root" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["flows", "flows.service.engine"])
def test_every_process_of_a_flow_makes_private_files(module, tmp_path):
    """This holds even if no earlier process had a umask: in Compose's worker, a flow run's engine and a server."""
    code = f"import os; os.umask(0o022); import {module}; open('file', 'w').close(); os.mkdir('folder')"
    path = {"PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, **path}, check=True)
    assert (mode_of(tmp_path / "file"), mode_of(tmp_path / "folder")) == (0o600, 0o700)
