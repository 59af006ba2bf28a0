"""MLflow's private parts are as `flows/libraries/mlflow_private.py` and `flows/service/mlflow_app.py` expect them."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.libraries.mlflow_private import ADDRESSES, TEXTS, server_variables
from tests.helpers.private_parts import changed, differing, fail_if_changed, unmentioned

REGISTRY = "mlflow.store.artifact.artifact_repository_registry"
RECORDED = {
    f"{REGISTRY}:_artifact_repository_registry.get_artifact_repository": [
        *("artifact_uri", "tracking_uri=None", "registry_uri=None"),
    ],
    "mlflow.server.handlers:initialize_backend_stores": [
        *("backend_store_uri=None", "registry_store_uri=None", "default_artifact_root=None"),
        *("workspace_store_uri=None", "read_replica_backend_store_uri=None"),
    ],
    "mlflow.server.fastapi_app:app": None,
    "mlflow.store.tracking.dbmodels.models:SqlRun.to_mlflow_entity": ["self"],
}
# Columns that could hold the address of a file, and hold none of a root's files.
OTHER_ADDRESSES = {
    *("webhooks.url", "mcp_server_versions.source", "mcp_access_endpoints.url"),
    *("workspaces.default_artifact_root", "workspaces.trace_archival_location", "evaluation_dataset_records.source"),
}


def changes() -> Iterator[str]:
    yield from changed(RECORDED)
    import mlflow.server
    from mlflow.environment_variables import _MLFLOW_SGI_NAME
    from mlflow.server import constants
    from mlflow.store.db.base_sql_model import Base
    from mlflow.store.tracking import sqlalchemy_store as sql

    columns = {f"{table.name}.{column.name}" for table in Base.metadata.tables.values() for column in table.c}
    like_addresses = {name for name in columns if re.search(r"\..*(uri|url|location|source|_root)$", name)}
    addresses, texts = ({f"{table}.{column}" for table, column in places} for places in (ADDRESSES, TEXTS))
    recorded = addresses | OTHER_ADDRESSES | {"datasets.dataset_source"}
    yield from differing("the columns of addresses", like_addresses, recorded)
    yield from differing("the columns of texts", columns & texts, texts)
    opener = importlib.import_module(REGISTRY).get_artifact_repository
    yield from unmentioned(opener, "_artifact_repository_registry", "get_artifact_repository")
    folders = [Path(mlflow.server.__path__[0]), Path(sql.__file__).parent]
    texts_of = {path.name: path.read_text() for folder in folders for path in folder.rglob("*.py")}
    direct = {name for name, text in texts_of.items() if re.search(r"ArtifactRepository\(", text)}
    yield from differing("the files of MLflow's server that open files without the registry", direct, set())
    variables = {value for value in vars(constants).values() if isinstance(value, str)} | {_MLFLOW_SGI_NAME.name}
    needed = server_variables("", "").keys()
    yield from differing("the variables of the server", variables & needed, needed)
    yield from differing("the pages of the server", mlflow.server.app.view_functions.keys() & {"serve"}, {"serve"})


@pytest.mark.full
def test_mlflows_private_parts():
    fail_if_changed("mlflow", __name__)
