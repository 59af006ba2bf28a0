"""`athanor up`: what it refuses before it starts anything, and how other commands find a running or dead service."""

import os
import shutil
import socket
from pathlib import Path

import filelock
import psutil
import pytest

from flows.cli.main import main, make_parser
from flows.service.access import use_service
from flows.service.programs import parse_limits
from flows.tracking.servers import (
    ServiceRecord,
    is_free,
    read_record,
    read_service,
    reserve_ports,
    service_dir,
    write_record,
)
from tests.helpers.object_store import free_port
from tests.helpers.small_run import error_line

LOGINS = (
    *("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"),
    *("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"),
)


@pytest.fixture(autouse=True)
def own_environment():
    """Restore after each test the environment that use_service changes."""
    before = dict(os.environ)
    for name in ("PREFECT_API_URL", "PREFECT_UI_URL", "MLFLOW_TRACKING_URI", *LOGINS):
        os.environ.pop(name, None)
    os.environ.pop("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def record(tmp_path) -> ServiceRecord:
    """Return the record of a service whose process is the test's own."""
    service_dir(tmp_path).mkdir(parents=True)
    return ServiceRecord(
        pid=os.getpid(),
        pid_started=psutil.Process().create_time(),
        host=socket.gethostname(),
        root=str(tmp_path),
        prefect_api="http://127.0.0.1:4299/api",
        prefect_ui="http://127.0.0.1:4299",
        mlflow="http://127.0.0.1:5099",
        started="2026-01-01T00:00:00+00:00",
        ready=True,
    )


def test_a_running_service_is_used_and_what_the_person_set_is_kept(tmp_path, record, monkeypatch):
    write_record(tmp_path, record)
    assert use_service(tmp_path) == record
    assert os.environ["PREFECT_API_URL"] == record.prefect_api
    assert os.environ["MLFLOW_TRACKING_URI"] == record.mlflow
    monkeypatch.setenv("PREFECT_API_URL", "http://mine/api")
    use_service(tmp_path)
    assert os.environ["PREFECT_API_URL"] == "http://mine/api"


def test_commands_know_the_password_by_themselves_and_tell_it_to_nobody_else(tmp_path, record, monkeypatch):
    (service_dir(tmp_path) / "password").write_text("athanor:made\n")
    write_record(tmp_path, record)
    monkeypatch.setenv("PREFECT_API_URL", "http://mine/api")
    use_service(tmp_path)
    assert "PREFECT_API_AUTH_STRING" not in os.environ, "another server's business"
    assert os.environ["MLFLOW_TRACKING_USERNAME"] == "athanor" and os.environ["MLFLOW_TRACKING_PASSWORD"] == "made"
    monkeypatch.delenv("PREFECT_API_URL")
    use_service(tmp_path)
    assert os.environ["PREFECT_API_AUTH_STRING"] == "athanor:made"


@pytest.mark.parametrize("command", ["run", "sweep", "sync"])
def test_who_may_not_read_the_password_gets_one_line(tmp_path, record, capsys, monkeypatch, command):
    write_record(tmp_path, record)
    password = service_dir(tmp_path) / "password"
    password.write_text("athanor:made\n")

    def unreadable(path, *arguments, **options):
        if path == password:
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *arguments, **options)

    read_text = Path.read_text  # root may read every file, so the mode would make no difference
    monkeypatch.setattr(Path, "read_text", unreadable)
    assert main([command, "--root", str(tmp_path)]) == 2
    line = error_line(capsys)
    assert f"{password} may be read by user {os.getuid()} alone" in line and "set PREFECT_API_AUTH_STRING" in line


@pytest.mark.parametrize(
    "change",
    [{"pid": 2**22 + 1}, {"pid_started": 1.0}, {"host": "another"}, {"ready": False}],
    ids=["no such process", "another process", "another machine", "still starting"],
)
def test_what_does_not_live_is_not_used(tmp_path, record, change):
    write_record(tmp_path, record.model_copy(update=change))
    assert read_service(tmp_path) is None and use_service(tmp_path) is None
    assert "PREFECT_API_URL" not in os.environ


def test_a_copy_of_a_served_root_is_a_root_of_its_own_and_one_line_says_so(tmp_path, record, capsys):
    original, copy = tmp_path / "original", tmp_path / "copy"
    service_dir(original).mkdir(parents=True)
    write_record(original, record.model_copy(update={"root": str(original)}))
    shutil.copytree(original, copy)
    (tmp_path / "link").symlink_to(original)
    assert use_service(copy) is None and read_record(copy) is None and "PREFECT_API_URL" not in os.environ
    assert read_service(tmp_path / "link") is not None, "the same root by another name"
    assert main(["run", "no-such-recipe", "--root", str(copy)]) == 2
    told, refused = capsys.readouterr().err.splitlines()
    assert "no-such-recipe" in refused and "PREFECT_API_URL" not in os.environ
    assert told.startswith(f"athanor: --root {copy} is a copy of {original}, which process {os.getpid()} serves; ")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
def test_a_broken_record_is_none(tmp_path, text):
    service_dir(tmp_path).mkdir(parents=True)
    (service_dir(tmp_path) / "service.json").write_text(text)
    assert read_record(tmp_path) is None


def test_run_and_sweep_look_for_a_service_and_plan_does_not(tmp_path, record, capsys):
    write_record(tmp_path, record)
    assert main(["plan", "no-such-recipe", "--root", str(tmp_path)]) == 2
    assert "PREFECT_API_URL" not in os.environ
    assert main(["run", "no-such-recipe", "--root", str(tmp_path)]) == 2
    assert os.environ["PREFECT_API_URL"] == record.prefect_api
    capsys.readouterr()


def test_a_second_service_on_a_root_is_refused_by_the_lock_alone(tmp_path, record, capsys):
    write_record(tmp_path, record)
    with filelock.FileLock(service_dir(tmp_path) / "service.lock"):
        assert main(["up", "--root", str(tmp_path)]) == 2
        line = error_line(capsys)
        assert f"process {os.getpid()}" in line and record.prefect_ui in line and record.mlflow in line
        (service_dir(tmp_path) / "service.json").unlink()
        assert main(["up", "--root", str(tmp_path)]) == 2
        assert "is starting or stopping" in error_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "here"], "--host here is not an IP address"),
        (["--limit", "gpu"], "--limit gpu is not NAME=SLOTS"),
        (["--limit", "gpu=0"], "--limit gpu=0 is not NAME=SLOTS"),
    ],
)
def test_wrong_options_are_one_line_and_nothing_starts(tmp_path, capsys, arguments, words):
    assert main(["up", "--root", str(tmp_path), *arguments]) == 2
    assert words in error_line(capsys)
    assert not (service_dir(tmp_path) / "service.json").exists()


def test_limits_are_names_with_slots():
    assert parse_limits(["gpu-host=2", "slurm:a=b=3"]) == {"gpu-host": 2, "slurm:a=b": 3}


def test_ports_stay_the_same_and_are_nobody_elses(tmp_path, monkeypatch):
    monkeypatch.setattr("flows.tracking.servers.DEFAULT_PORTS", {"prefect": free_port(), "mlflow": free_port()})
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    theirs.mkdir()
    with reserve_ports(mine, "127.0.0.1") as first, reserve_ports(theirs, "127.0.0.1") as other:
        assert not set(first.values()) & set(other.values())
    with reserve_ports(mine, "127.0.0.1") as second:
        assert second == first
    with socket.create_server(("127.0.0.1", first["mlflow"])):
        assert not is_free("127.0.0.1", first["mlflow"])
        with reserve_ports(mine, "127.0.0.1") as third:
            assert third["prefect"] == first["prefect"] and third["mlflow"] != first["mlflow"]


def test_plan_takes_a_launcher(capsys):
    parse = make_parser().parse_args
    assert parse(["plan"]).launcher is None and parse(["plan", "--launcher", "slurm"]).launcher == "slurm"
    with pytest.raises(SystemExit):
        parse(["plan", "--launcher", "abacus"])
    with pytest.raises(SystemExit):
        parse(["up", "--max-runs", "0"])
    capsys.readouterr()
