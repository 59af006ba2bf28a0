"""The files of a root's MLflow over HTTP: a machine with the address and the password of `athanor up` can read them,
and the root's own files do not change."""

import os
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

import flows.tracking.tracker
from flows.service.access import use_service
from flows.tracking.publish import Publication
from flows.tracking.record import load_record
from flows.tracking.store import connect
from tests.flows.tracking.test_tracking_files import ELSEWHERE, files_of, tell
from tests.helpers.service import RunningService, clean_environment, request, running_service
from tests.helpers.tracked_run import MODEL, Nobody

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise(
        "A root that is copied or moved continues there, and a registered model loads over HTTP on another machine."
    ),
]
BEFORE, BESIDE = "before", "beside"  # the number of runs of the root
MANIFEST, LOG = "stages/convert/manifest.json", "stages/convert/logs/one.log"

# Simulates another machine's disk: a client that opens or lists anything in the root fails.
BLIND = """
import sys
root = sys.argv[1]
def refuse(event, arguments):
    if arguments and isinstance(arguments[0], str) and arguments[0].startswith(root):
        raise AssertionError(f"{event} of {arguments[0]}")
sys.addaudithook(refuse)
"""
FILES = """
import mlflow
client = mlflow.MlflowClient()
for run in client.search_runs([experiment.experiment_id for experiment in client.search_experiments()]):
    print(mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path="stages"))
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[RunningService]:
    """Run a service on a root with two runs, each with a model: one run was published into the root's database without
    a service, and one through the service, by an `athanor run` at the same time."""
    root = tmp_path_factory.mktemp("served") / "root"
    nobody = patch.object(flows.tracking.tracker, "sender_of", lambda root: Nobody())
    with patch.dict(os.environ, clean_environment(), clear=True), nobody:
        tell(root, BEFORE)
        Publication(root, BEFORE).run()
        with running_service(root) as running:
            use_service(root)
            tell(root, BESIDE)
            Publication(root, BESIDE).run()
            yield running


def elsewhere(service: RunningService, directory: Path, program: str) -> list[Path]:
    """Return the paths that a program prints on a machine that has the address and the password, but no access to the
    root."""
    env = {**service.env(), "TMPDIR": str(directory)}
    del env["PREFECT_HOME"], env["ATHANOR_ROOT"]
    command = [sys.executable, "-c", BLIND + program, str(service.root)]
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    places = [Path(line) for line in done.stdout.splitlines() if line.startswith("/")]
    assert places and all(place.is_relative_to(directory) for place in places)
    return places


def run_id_of(service: RunningService, key: str) -> str:
    learnt = load_record(service.root, key).learnt
    assert learnt.refused == {}
    return learnt.run_id


def weights_of(service: RunningService) -> Path:
    return service.root / "artifacts" / "export" / ("e" * 16) / "hf" / "model.safetensors"


@pytest.mark.parametrize("alias", ["champion", "candidate"])  # the run before the service, and the run during it
def test_another_machine_downloads_a_registered_model_that_transformers_loads(service, tmp_path, alias):
    (place,) = elsewhere(service, tmp_path, ELSEWHERE.replace("@champion", f"@{alias}"))
    assert (place / "model.safetensors").read_bytes() == weights_of(service).read_bytes()


def test_another_machine_lists_and_downloads_the_files_of_every_run(service, tmp_path):
    places = elsewhere(service, tmp_path, FILES)
    assert len(places) == 2
    for place in places:
        assert (place.parent / MANIFEST).is_file() and (place / "train" / "metrics.jsonl").is_file()


def test_nothing_is_doubled_on_the_roots_disk(service):
    copies = [*(service.root / "mlflow-artifacts").rglob("model.safetensors")]
    assert len(copies) == 2 and all(copy.samefile(weights_of(service)) for copy in copies)
    log = service.root / "artifacts" / "convert" / ("c" * 16) / "logs" / "one.log"
    for key in (BEFORE, BESIDE):
        assert (service.root / "mlflow-artifacts" / run_id_of(service, key) / "artifacts" / LOG).samefile(log)


def test_the_database_keeps_addresses_that_a_client_without_the_service_follows(service):
    with patch.dict(os.environ, clean_environment(), clear=True):
        client = connect(service.root)
        for key in (BEFORE, BESIDE):
            run = client.get_run(run_id_of(service, key))
            assert run.info.artifact_uri.startswith((service.root / "mlflow-artifacts").as_uri())
            assert MANIFEST in files_of(client, run.info.run_id, "stages/convert")
        for version in client.search_model_versions(f"name='{MODEL}'"):
            uri = client.get_model_version_download_uri(MODEL, version.version)
            assert Path(uri.removeprefix("file://"), "hf", "model.safetensors").samefile(weights_of(service))


def ask(service: RunningService, path: str, method: str = "GET", data: bytes | None = None) -> int:
    """Return the status of MLflow's answer for a path of its files, with the password in the request."""
    files = f"{service.record.mlflow}/api/2.0/mlflow-artifacts/artifacts"
    return request(files + path, data, login=service.login, method=method)[0]


def test_a_file_that_is_sent_leaves_the_artifact_of_which_it_was_a_second_name(service):
    before = {path: path.read_bytes() for path in (service.root / "artifacts").rglob("*") if path.is_file()}
    path = f"/{run_id_of(service, BESIDE)}/artifacts/{LOG}"
    assert ask(service, path, "PUT", b"theirs") == 200
    assert (service.root / "mlflow-artifacts" / path[1:]).read_bytes() == b"theirs"
    assert {path: path.read_bytes() for path in before} == before


def test_no_path_leads_out_of_the_files(service, tmp_path):
    files, out = service.root / "mlflow-artifacts", tmp_path / "secret"
    out.write_text("canary")
    (files / "link").symlink_to(tmp_path)
    ways = ("/../mlflow.db", "/%2e%2e/mlflow.db", "/..%2Fmlflow.db", "/%252e%252e/mlflow.db", f"/{out}", f"/%2F{out}")
    for way in (*ways, "/link/secret"):
        for method, data in (("GET", None), ("PUT", b"theirs"), ("DELETE", None)):
            assert ask(service, way, method, data) >= 300, (method, way)
    assert ask(service, "?path=../service") >= 400 and ask(service, "?path=link") >= 400
    assert out.read_text() == "canary" and [*tmp_path.iterdir()] == [out]


@pytest.mark.parametrize("path", ["/models", "/."])
def test_nobody_deletes_files(service, path):
    before = sorted((service.root / "mlflow-artifacts").rglob("*"))
    assert ask(service, path, "DELETE") >= 400
    assert sorted((service.root / "mlflow-artifacts").rglob("*")) == before


def test_an_address_that_leads_out_is_not_followed(service, tmp_path):
    client = f"{service.record.mlflow}/api/2.0/mlflow"
    for number, address in enumerate((f"mlflow-artifacts:/../../{tmp_path}", "mlflow-artifacts:/../service")):
        made = service.ask(f"{client}/experiments/create", {"name": f"out {number}", "artifact_location": address})
        run = service.ask(f"{client}/runs/create", made)["run"]["info"]
        with pytest.raises(urllib.error.HTTPError):
            service.ask(f"{client}/artifacts/list?run_id={run['run_id']}")
