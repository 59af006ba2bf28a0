"""`uvicorn --factory flows.service.mlflow_app:make_app`: MLflow's server behind the guard, which checks the password.

`mlflow server` is not used: it starts the application in a second process while the first one only waits. Its logins
are users in a database, whose passwords are hashed again at every request.

The root's database stores addresses on this machine's disk, so that commands on the root work without a server. Clients
of this server see the same files under `mlflow-artifacts:`, and read and write them through the server.

Whoever may call MLflow's API may set any directory for the files of an experiment, and read and write in it. This
application serves only files in the root's own directory, and deletes none. Endpoints that make the server run a
model's commands or call other machines are closed. Parts of MLflow 3.17.2 are replaced for this: the types of the
columns of addresses, the opener of every file, the order of a run's metrics, and the first page. They are compared with
the installed MLflow in `tests/flows/libraries/test_mlflow_private.py`.

Links of Prefect's and MLflow's pages open the pages of the root's artifacts in a browser, which this server serves too:

/reports/<stage>/<fingerprint>/report.html      the file of that name in the artifact's directory
/metrics                                        the numbers of `prometheus.py`
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import PERMISSION_DENIED
from mlflow.server import app as flask_app
from mlflow.server import handlers
from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR
from mlflow.server.fastapi_app import app
from mlflow.store.artifact import artifact_repository_registry
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository
from mlflow.store.db.base_sql_model import Base
from mlflow.store.tracking.dbmodels.models import SqlRun
from mlflow.utils.file_utils import local_file_uri_to_path
from mlflow.utils.uri import is_local_uri
from sqlalchemy import Dialect, String, TypeDecorator
from starlette.responses import FileResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from dataset_builders.known_version import check_version
from flows.libraries.mlflow_private import ADDRESSES, KNOWN, first_view
from flows.service.access import MLFLOW_PASSWORD, MLFLOW_USER
from flows.service.guard import guarded
from flows.service.prometheus import with_numbers
from flows.tracking.store import make_tables, migrate

check_version("mlflow", KNOWN, __name__, "the server could give out or change any file of this machine", refuses=True)

# A path with one of these segments is answered with 404: an assistant with a shell, calls to other machines, jobs, and
# an upload that ignores where a run's files are and puts them into EXPERIMENT/RUN/artifacts.
CLOSED = frozenset(
    {"assistant", "gateway", "gateway-proxy", "webhooks", "jobs", "prompt-optimization", "scorers", "upload-artifact"}
)
_SERVED = "mlflow-artifacts:"
# At a browser's first visit, MLflow shows its pages for generated text and opens the assistant, which is closed here.
# It also announces that it collects usage data, and shows the switch for that as on, whatever the server's setting is.
# Where a browser has no state of an experiment's or a run's page yet, the page gets the one of `first_view`, and an
# experiment opens on its charts. The button of the assistant is hidden. In a narrow window the side bar, which would
# take half of it, is folded.
_FIRST_VISIT = """<head><style>[data-assistant-ui] { display: none !important; }</style><script>
const first = {
  "mlflow.workflowType_v1": '"machine_learning"',
  "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true",
  "mlflow.settings.telemetry.enabled_v1": "false",
  "mlflow.telemetry.info.alert.dismissed_v1": "true",
};
for (const [key, value] of Object.entries(first)) localStorage.getItem(key) ?? localStorage.setItem(key, value);
const views = [
  [/^MLflowLocalStorage-[^-]+-ExperimentPage-\\["[0-9]+"\\]-/, JSON.stringify(EXPERIMENT)],
  [/^MLflowLocalStorage-[^-]+-RunPage-[0-9a-f]{32}-model-/, JSON.stringify(RUN)],
];
const stored = Storage.prototype.getItem;
Storage.prototype.getItem = function (key) {
  return stored.call(this, key) ?? views.find(([name]) => name.test(key))?.[1] ?? null;
};
const opening = /(#\\/experiments\\/[0-9]+)(?:\\/runs)?$/;
const charts = (hash) => hash.replace(opening, "$1/runs?compareRunsMode=CHART");
addEventListener("click", (event) => {
  const link = event.target.closest("a[href]");
  const isPlain = !(event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey);
  if (!link || !isPlain || charts(link.hash) === link.hash) return;
  event.preventDefault();
  event.stopPropagation();
  location.hash = charts(link.hash);
}, true);
if (charts(location.hash) !== location.hash) history.replaceState(null, "", charts(location.hash));
if (innerWidth < 700) {
  const fold = new MutationObserver(() => {
    const button = document.querySelector('[data-component-id="mlflow_header.toggle_sidebar_button"]');
    if (button) { fold.disconnect(); button.click(); }
  });
  fold.observe(document, { childList: true, subtree: true });
}
</script>"""


# A run's page and the compare page list metrics in the order of the answer; compare begins with the first.
_FIRST_METRICS = (
    *("score", "score_low", "score_high", "gain", "gain_low", "gain_high"),
    *("heldout_loss", "loss", "tokens_per_second"),
)
_LAST_METRICS = ("timing/", "usage/")

_PAGE = re.compile(r"/reports/(?P<place>[a-z0-9_]+/[0-9a-f]{16})/(?P<name>[a-z_]+\.html)")
# A page shows texts of raw data. So it may run its own scripts, but has no origin and calls no server.
_HEADERS = {"Content-Security-Policy": "sandbox allow-scripts; connect-src 'none'"}


def make_app() -> ASGIApp:
    """Return MLflow's API and pages on the store that the environment names. Make its tables if they are missing."""
    store = os.environ[BACKEND_STORE_URI_ENV_VAR]
    make_tables(_own_directory().parent)
    migrate(_own_directory().parent)
    for table, name in ADDRESSES:
        column = Base.metadata.tables[table].c[name]
        column.type = ServedAddress(column.type.length)
    # MLflow's handlers, its store and its pages for prompts open files by it.
    artifact_repository_registry._artifact_repository_registry.get_artifact_repository = own_files
    replace_run_reader(SqlRun)
    page = Path(flask_app.static_folder, "index.html").read_text(encoding="utf-8")
    first_visit = _FIRST_VISIT.replace("EXPERIMENT", json.dumps(first_view())).replace(
        "RUN", json.dumps(first_view(True))
    )
    flask_app.view_functions["serve"] = lambda: page.replace("<head>", first_visit, 1)
    handlers.initialize_backend_stores(store, store, os.environ[ARTIFACT_ROOT_ENV_VAR])
    root = _own_directory().parent
    own_pages = with_numbers(with_reports(app, root), root)
    return guarded(own_pages, f"{os.environ[MLFLOW_USER]}:{os.environ[MLFLOW_PASSWORD]}", CLOSED)


def with_reports(app: ASGIApp, root: Path) -> ASGIApp:
    """Return an application that also serves the pages at the top of the artifacts' directories, and no other file."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/reports/"):
            await app(scope, receive, send)
            return
        match = _PAGE.fullmatch(scope["path"])
        path = root / "artifacts" / match["place"] / match["name"] if match else None
        if path is None or not path.is_file():
            await PlainTextResponse("there is no such page\n", 404)(scope, receive, send)
        else:
            await FileResponse(path, headers=_HEADERS)(scope, receive, send)

    return answer


def replace_run_reader(runs: type[SqlRun]) -> None:
    """Make the table of runs give each run with its metrics in reading order: results, metrics, subsets, machine."""
    read = runs.to_mlflow_entity

    def place(metric: Any) -> tuple[int, bool, bool]:
        rank = _FIRST_METRICS.index(metric.key) if metric.key in _FIRST_METRICS else len(_FIRST_METRICS)
        return rank, metric.key.startswith(_LAST_METRICS), "/" in metric.key

    def read_in_order(run: SqlRun) -> Run:
        list.sort(run.latest_metrics, key=place)  # not the method of SQLAlchemy's list, which would note a change
        return read(run)

    runs.to_mlflow_entity = read_in_order


class ServedAddress(TypeDecorator):
    """A column of file addresses: `file:` in the database, `mlflow-artifacts:` for the code of this server."""

    impl, cache_ok = String, True

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        """Return the `mlflow-artifacts:` address of a file in the root's directory. Other addresses are unchanged."""
        if value is None or not value.startswith("file:"):
            return value
        path, ours = Path(local_file_uri_to_path(value)).resolve(), _own_directory()
        return f"{_SERVED}/{str(path)[len(str(ours)) + 1 :]}" if path.is_relative_to(ours) else value

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Return the `file:` address of an `mlflow-artifacts:` address. The inverse of `process_result_value`."""
        if value is None or not value.startswith(f"{_SERVED}/"):
            return value
        return (_own_directory() / value.removeprefix(_SERVED).lstrip("/")).as_uri()


class OwnFiles(LocalArtifactRepository):
    """MLflow's access to the root's own files.

    An uploaded file replaces a file of the same name instead of being written into it, because the existing file may be
    a hard link to a file of an artifact.
    """

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        """Refuse to delete files. The pipeline never deletes files over HTTP."""
        raise MlflowException("files are not deleted over HTTP", PERMISSION_DENIED)


def own_files(uri: str, *arguments: Any) -> ArtifactRepository:
    """Return MLflow's access to the files at an address.

    Raises:
        MlflowException: the address is not below the root's directory for MLflow's files.
    """
    ours = _own_directory()
    if not (is_local_uri(uri) and Path(local_file_uri_to_path(uri)).resolve().is_relative_to(ours)):
        raise MlflowException(f"files at {uri} are not served; those below {ours} are", PERMISSION_DENIED)
    return OwnFiles(uri, *arguments)


def _own_directory() -> Path:
    """Return the root's directory for MLflow's files."""
    return Path(local_file_uri_to_path(os.environ[ARTIFACT_ROOT_ENV_VAR])).resolve()
