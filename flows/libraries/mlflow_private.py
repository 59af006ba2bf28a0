"""The private parts of MLflow that athanor uses outside MLflow's server, as they are in MLflow 3.17.2.

- Columns of MLflow's tables hold absolute addresses of files, which follow a root that was copied or moved.
- The registered versions are read from MLflow's tables, since MLflow itself takes seconds to import.
- The application of `mlflow server` gets its settings from private environment variables.
- Experiments and browsers hold the state of MLflow's pages: columns, charts, sections.

The replaced functions of the server itself are in `flows/service/mlflow_app.py`.
`tests/flows/libraries/test_mlflow_private.py` compares all of them with the installed MLflow.
"""

import contextlib
import json
import logging
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from dataset_builders.known_version import check_version

KNOWN = "==3.17.2"
check_version("mlflow", KNOWN, __name__, "addresses of files may be stale after a root was moved", refuses=False)

# Columns of MLflow's database that hold addresses of files (ADDRESSES), or texts with paths in them (TEXTS).
ADDRESSES = (
    *(("experiments", "artifact_location"), ("runs", "artifact_uri"), ("logged_models", "artifact_location")),
    *(("model_versions", "source"), ("model_versions", "storage_location")),
)
TEXTS = (
    *(("tags", "value"), ("logged_model_tags", "tag_value"), ("model_version_tags", "value")),
    *(("datasets", "dataset_source"), ("model_versions", "description")),
)
_DELETED_STAGE = "Deleted_Internal"  # of the row that a deleted version leaves
log = logging.getLogger("athanor.tracking")


def update_addresses(database: Path, files: str, seconds: float) -> None:
    """Update the addresses in a root's SQLite database if the root is no longer where they say.

    Args:
        files: name of the directory of MLflow's files, which is beside the database.
        seconds: longest wait for other writers of the database.
    """
    with contextlib.closing(sqlite3.connect(database, timeout=seconds)) as connection, connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "experiments" not in tables:
            return
        query = "SELECT DISTINCT artifact_location FROM experiments WHERE artifact_location LIKE ?"
        addresses = [f"{address}/" for (address,) in connection.execute(query, (f"file:///%/{files}%",))]
        places = {address.rpartition(f"/{files}/")[0] for address in addresses} - {"", database.parent.as_uri()}
        for before in places:
            if not _is_same_file(Path(_path_of(before)) / database.name, database):
                log.info("the root was at %s; MLflow's addresses follow it", before)
                _replace(connection, tables, before, database.parent.as_uri())


def _replace(connection: sqlite3.Connection, tables: set[str], before: str, now: str) -> None:
    """Replace a directory by another one in MLflow's tables. Both directories are given as URLs."""
    for table, column in (place for place in ADDRESSES if place[0] in tables):
        command = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
        connection.execute(command, (now, len(before) + 1, len(before) + 1, f"{before}/"))
    old, new = _path_of(before), _path_of(now)
    for table, column in (place for place in TEXTS if place[0] in tables):
        command = (
            f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE {column} = ? OR substr({column}, 1, ?) = ?"
        )
        connection.execute(command, (new, len(old) + 1, old, len(old) + 1, f"{old}/"))
        in_json = (json.dumps(f"{old}/")[:-1], json.dumps(f"{new}/")[:-1])
        for replacement in ((f"`{old}/", f"`{new}/"), in_json):  # in Markdown texts, and in JSON texts
            connection.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", replacement)


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """A version of a registered model.

    Attributes:
        texts: all texts in which it may name an artifact: its addresses, and the values of its tags and of the tags
            and parameters of its run.
    """

    name: str
    number: int
    aliases: tuple[str, ...]
    texts: tuple[str, ...]


def read_registry(database: Path, seconds: float) -> tuple[list[RegisteredVersion], set[str]]:
    """Return the registered versions in a SQLite database, which a server may use meanwhile, and the ids of its runs.

    Args:
        seconds: longest wait for writers of the database.

    Raises:
        sqlite3.Error: it is no whole database of MLflow, or it cannot be read.
    """
    address = f"{database.resolve().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, timeout=seconds, uri=True)) as connection:
        connection.execute("BEGIN")  # all that follows is of one moment
        aliases: dict[tuple[str, int], list[str]] = {}
        for name, number, alias in connection.execute("SELECT name, version, alias FROM registered_model_aliases"):
            aliases.setdefault((name, int(number)), []).append(alias)
        tags: dict[tuple[str, int], list[str]] = {}
        for name, number, value in connection.execute("SELECT name, version, value FROM model_version_tags"):
            tags.setdefault((name, int(number)), []).append(value or "")
        of_runs: dict[str, list[str]] = {}
        query = " UNION ALL ".join(
            f"SELECT run_uuid, value FROM {table} WHERE run_uuid IN (SELECT run_id FROM model_versions)"
            for table in ("tags", "params")
        )
        for run_id, value in connection.execute(query):
            of_runs.setdefault(run_id, []).append(value or "")
        query = (
            "SELECT name, version, run_id, source, storage_location FROM model_versions WHERE current_stage IS NOT ?"
        )
        versions = [
            RegisteredVersion(
                name=name,
                number=int(number),
                aliases=tuple(sorted(aliases.get((name, int(number)), ()))),
                texts=(source or "", place or "", *tags.get((name, int(number)), ()), *of_runs.get(run_id, ())),
            )
            for name, number, run_id, source, place in connection.execute(query, (_DELETED_STAGE,))
        ]
        return versions, {run_id for (run_id,) in connection.execute("SELECT run_uuid FROM runs")}


def _path_of(uri: str) -> str:
    return unquote(urlparse(uri).path)


def _is_same_file(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def server_variables(store: str, files: str) -> dict[str, str]:
    """Return the environment variables that `mlflow server` sets for its application.

    Args:
        store: address of the database.
        files: address of the directory of the files.
    """
    return {
        "_MLFLOW_SERVER_FILE_STORE": store,
        "_MLFLOW_SERVER_ARTIFACT_ROOT": files,
        "_MLFLOW_SERVER_ARTIFACT_DESTINATION": files,
        "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
        "_MLFLOW_SGI_NAME": "uvicorn",
    }


VIEW_TAG = (
    "mlflow.sharedViewState.athanor"  # tag of an experiment: the page opens with it at ?viewStateShareKey=athanor
)
COLOUR_TAG = "mlflow.runColor"  # tag of a run; without it the pages choose a colour by the run's id
# Tableau's ten colours, for as many runs as one chart has.
RUN_COLOURS = (
    *("#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac"),
)
_COLUMNS = ("score", "gain", "heldout_loss", "loss", "tokens_per_second")
_CHARTS = (("BAR", "score"), ("LINE", "heldout_loss"), ("LINE", "loss"), ("BAR", "gain"), ("LINE", "tokens_per_second"))
_LINE = {
    "lineSmoothness": 0,
    "xAxisScaleType": "linear",
    "scaleType": "linear",
    "range": {},
    "xAxisKey": "step",
    "selectedXAxisMetricKey": "",
    "yAxisKey": "metric",
    "yAxisExpressions": [],
    "ignoreOutliers": False,
    "useGlobalXaxisKey": True,
    "useGlobalLineSmoothing": True,
}
_DIFFERENCE = {
    "compareGroups": ["Parameters", "Model metrics"],
    "chartName": "Runs difference view",
    "showChangeFromBaseline": True,
    "showDifferencesOnly": True,
    "baselineColumnUuid": "",
}


def next_colour(used: Sequence[str | None]) -> str:
    """Return a colour for a run that the runs before it do not have, or else the one that was not used for longest.

    Args:
        used: colours of the runs before it, of the newest run first; None: a run has none.
    """
    return max(RUN_COLOURS, key=lambda colour: used.index(colour) if colour in used else len(used))


def first_view(is_of_one_run: bool = False) -> dict[str, Any]:
    """Return a state of MLflow's pages in which score and loss are the first columns and the first charts.

    The pages put the columns of `columnOrder` before all others but the run's name, and show a metric with all its
    digits. They keep the state of a page in the browser.

    Args:
        is_of_one_run: for the charts of a run, which has no table and nothing to differ from.
    """
    names = {"athanor-1": "Score and loss", "athanor-2": "What differs", "athanor-3": "Model metrics"}
    sections = [
        {"uuid": uuid, "name": name, "display": True, "isReordered": False, "deleted": False, "isGenerated": True}
        for uuid, name in names.items()
        if not (is_of_one_run and name == "What differs")
    ]
    charts = [
        _chart(kind, name, "athanor-1", metricKey=name, **(_LINE if kind == "LINE" else {})) for kind, name in _CHARTS
    ]
    view = {
        "compareRunCharts": charts,
        "compareRunSections": sections,
        "isAccordionReordered": True,  # else the sections are sorted by name
        "autoRefreshEnabled": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }
    if is_of_one_run:
        return view
    charts.append(_chart("DIFFERENCE", "difference", "athanor-2", **_DIFFERENCE))
    columns = [f"metrics.`{name}`" for name in _COLUMNS]
    return view | {"selectedColumns": columns, "columnOrder": columns, "columnWidths": {}, "hideEmptyCharts": True}


def _chart(kind: str, name: str, section: str, **settings: Any) -> dict[str, Any]:
    plain = {"runsCountToCompare": 10, "deleted": False, "isGenerated": True}
    return {"type": kind, "uuid": f"athanor-{name}", "metricSectionId": section, **plain, **settings}
