"""`uvicorn --factory flows.service.mlflow_app:make_app`: MLflow's server behind the guard, which asks for the password.

`mlflow server` starts this application in a second process, after which the first waits. Its own logins are users in a
database, whose password is hashed anew at every request.

MLflow's API lets whoever may call it give an experiment any directory for its files, and read and write there. Here
files of the root's own directory are served alone. What makes the server run a model's commands or call other machines
is closed.
"""

import os
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from mlflow.server import handlers
from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR
from mlflow.server.fastapi_app import app
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.uri import is_local_uri
from starlette.types import ASGIApp

from flows.prefect_server.access import MLFLOW_PASSWORD, MLFLOW_USER
from flows.prefect_server.guard import guarded
from flows.tracking.store import settle

# Parts of a path below which nothing answers: an assistant with a shell, calls to other machines, jobs.
CLOSED = frozenset({"assistant", "gateway", "gateway-proxy", "webhooks", "jobs", "prompt-optimization", "scorers"})


def make_app() -> ASGIApp:
    """MLflow's API and pages on the store that the environment names; makes its tables if they are missing."""
    store = os.environ[BACKEND_STORE_URI_ENV_VAR]
    settle(_own_directory().parent)
    handlers.get_artifact_repository = own_files
    handlers.initialize_backend_stores(store, store, os.environ[ARTIFACT_ROOT_ENV_VAR])
    return guarded(app, f"{os.environ[MLFLOW_USER]}:{os.environ[MLFLOW_PASSWORD]}", CLOSED)


def own_files(uri: str, *arguments: Any) -> ArtifactRepository:
    """MLflow's access to the files at an address.

    Raises:
        MlflowException: they are not below the root's directory for MLflow's files.
    """
    ours = _own_directory()
    if not (is_local_uri(uri) and Path(local_file_uri_to_path(uri)).resolve().is_relative_to(ours)):
        raise MlflowException(f"files at {uri} are not served; those below {ours} are", PERMISSION_DENIED)
    return get_artifact_repository(uri, *arguments)


def _own_directory() -> Path:
    """The root's directory for MLflow's files."""
    return Path(local_file_uri_to_path(os.environ[ARTIFACT_ROOT_ENV_VAR])).resolve()
