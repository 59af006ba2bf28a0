"""`uvicorn --factory flows.service.mlflow_app:make_app`: MLflow's server behind the guard, which asks for the password.

`mlflow server` starts this application in a second process, after which the first waits. Its own logins are users in a
database, whose password is hashed anew at every request.

The root's database holds addresses of this machine's disk, by which the root's own commands go on without a server.
To clients the same files are `mlflow-artifacts:`, which they read and write through this server.

MLflow's API lets whoever may call it give an experiment any directory for its files, and read and write there. Here
files of the root's own directory are served alone, and none is deleted. What makes the server run a model's commands or
call other machines is closed.
"""

import os
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from mlflow.server import app as flask_app
from mlflow.server import handlers
from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR
from mlflow.server.fastapi_app import app
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.db.base_sql_model import Base
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.uri import is_local_uri
from sqlalchemy import Dialect, String, TypeDecorator
from starlette.types import ASGIApp

from flows.prefect_server.access import MLFLOW_PASSWORD, MLFLOW_USER
from flows.prefect_server.guard import guarded
from flows.tracking.store import ADDRESSES, settle

# Parts of a path below which nothing answers: an assistant with a shell, calls to other machines, jobs, and an
# upload that puts a run's files into EXPERIMENT/RUN/artifacts, wherever they are.
CLOSED = frozenset(
    {"assistant", "gateway", "gateway-proxy", "webhooks", "jobs", "prompt-optimization", "scorers", "upload-artifact"}
)
_SERVED = "mlflow-artifacts:"
# On a browser's first visit MLflow begins with its pages for generated text, opens the assistant, which is closed, says
# that it collects usage data, and shows its switch for that on: the server's own setting is not asked.
_FIRST_VISIT = """<head><script>
const first = {
  "mlflow.workflowType_v1": '"machine_learning"',
  "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
  "mlflow.settings.telemetry.enabled_v1": "false",
  "mlflow.telemetry.info.alert.dismissed_v1": "true",
};
for (const [key, value] of Object.entries(first)) localStorage.getItem(key) ?? localStorage.setItem(key, value);
</script>"""


def make_app() -> ASGIApp:
    """MLflow's API and pages on the store that the environment names; makes its tables if they are missing."""
    store = os.environ[BACKEND_STORE_URI_ENV_VAR]
    settle(_own_directory().parent)
    for table, name in ADDRESSES:
        column = Base.metadata.tables[table].c[name]
        column.type = ServedAddress(column.type.length)
    handlers.get_artifact_repository = own_files
    page = Path(flask_app.static_folder, "index.html").read_text(encoding="utf-8")
    flask_app.view_functions["serve"] = lambda: page.replace("<head>", _FIRST_VISIT, 1)
    handlers.initialize_backend_stores(store, store, os.environ[ARTIFACT_ROOT_ENV_VAR])
    return guarded(app, f"{os.environ[MLFLOW_USER]}:{os.environ[MLFLOW_PASSWORD]}", CLOSED)


class ServedAddress(TypeDecorator):
    """A column of addresses of files: `file:` in the database, `mlflow-artifacts:` for all that reads it here."""

    impl, cache_ok = String, True

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """Of a file below the root's directory, by any name of that; others stay."""
        if value is None or not value.startswith("file:"):
            return value
        path, ours = Path(local_file_uri_to_path(value)).resolve(), _own_directory()
        return f"{_SERVED}/{str(path)[len(str(ours)) + 1 :]}" if path.is_relative_to(ours) else value

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """The inverse."""
        if value is None or not value.startswith(f"{_SERVED}/"):
            return value
        return (_own_directory() / value.removeprefix(_SERVED).lstrip("/")).as_uri()


class OwnFiles(LocalArtifactRepository):
    """Files that are sent replace others of their name, and are never written into them: those may be second names of
    an artifact's."""

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        """Refused: nothing of the pipeline asks for it."""
        raise MlflowException("files are not deleted over HTTP", PERMISSION_DENIED)


def own_files(uri: str, *arguments: Any) -> ArtifactRepository:
    """MLflow's access to the files at an address.

    Raises:
        MlflowException: they are not below the root's directory for MLflow's files.
    """
    ours = _own_directory()
    if not (is_local_uri(uri) and Path(local_file_uri_to_path(uri)).resolve().is_relative_to(ours)):
        raise MlflowException(f"files at {uri} are not served; those below {ours} are", PERMISSION_DENIED)
    return OwnFiles(uri, *arguments)


def _own_directory() -> Path:
    """The root's directory for MLflow's files."""
    return Path(local_file_uri_to_path(os.environ[ARTIFACT_ROOT_ENV_VAR])).resolve()
