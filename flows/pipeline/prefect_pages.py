"""The Prefect artifacts of a run: the table of stages, the figures of the reports, the scores, the link to MLflow."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact

from dataset_builders.storage.store import StorePath, absolute, is_local, location
from flows.pipeline.tasks import StageRun
from flows.tracking.notes import markdown_table, score_text
from flows.tracking.servers import read_record
from stages.shared.pages.report import REPORT_HTML, REPORT_JSON, read_report
from stages.shared.scoring.names import OVERALL

_log = logging.getLogger("athanor.pipeline")


def publish_stages(runs: Sequence[StageRun], root: StorePath) -> None:
    """Publish two pages: which stages were made or reused, and the headline figures of each report."""
    rows = [
        (_linked(run, root), "reused" if run["reused"] else f"{run['seconds']:,.1f} s", f"`{run['dir']}`")
        for run in runs
    ]
    table = markdown_table(("stage", "made in", "directory"), rows, numbers=[1])
    create_markdown_artifact(key="stages", markdown=table, description="What this run made and what it reused")
    figures = [row for run in runs for row in _figures(run, root)]
    table = markdown_table(("stage", "figure", "value"), figures, numbers=[2])
    create_markdown_artifact(key="reports", markdown=table, description="Headline figures of each stage")


def publish_scores(stats: Mapping[str, Any], export_dir: str) -> None:
    """Publish the scores of every subset, the headline of each with its interval first, and the model's directory.

    Args:
        stats: the stats of the evaluation: "scores", and "headlines", "counts" and "warnings" if it has them.
    """
    scores, headlines, counts = stats["scores"], stats.get("headlines", {}), stats.get("counts", {})
    metrics = list(dict.fromkeys(metric for values in scores.values() for metric in values))
    rows = []
    for name in sorted(scores, key=lambda subset: subset != OVERALL):
        head = headlines.get(name)
        first = f"{head['metric']} {score_text(head['value'], (head['low'], head['high']))}" if head else ""
        answers = f"{counts[name]['answers']:,}" if name in counts else ""
        rows.append((name, answers, first, *(score_text(scores[name].get(metric)) for metric in metrics)))
    table = markdown_table(("subset", "answers", "headline", *metrics), rows, numbers=range(1, len(metrics) + 3))
    warnings = "".join(f"\n\n**Warning**: {line}" for line in stats.get("warnings", []))
    text = f"Model: `{export_dir}`{warnings}\n\n{table}"
    create_markdown_artifact(key="scores", markdown=text, description="Scores on held-out samples")


def publish_mlflow(url: str | None) -> None:
    """Publish the link to the MLflow run, if there is one."""
    if url:
        create_link_artifact(key="mlflow-run", link=url, link_text="MLflow run", description=url)


def publish_sweep(
    columns: Sequence[str], rows: Sequence[Sequence[str]], errors: Sequence[str], url: str | None
) -> None:
    """Publish the table of a sweep's runs, the errors of those that failed, and MLflow's page that compares them."""
    link = [f"[Compare them in MLflow]({url})"] if url else []
    failures = ["Failed:\n\n" + "\n".join(f"- `{line}`" for line in errors)] if errors else []
    text = "\n\n".join([*link, markdown_table(columns, rows), *failures])
    create_markdown_artifact(key="sweep", markdown=text, description="Every run of the sweep")
    if url:
        create_link_artifact(key="mlflow-compare", link=url, link_text="Compare in MLflow", description=url)


def page_url(root: StorePath, page: StorePath) -> str | None:
    """Return the address of an artifact's page on the root's running service; None if no service serves it."""
    service = read_record(root)
    if service is None or not is_local(root) or not str(page).startswith(f"{absolute(root)}/artifacts/"):
        return None
    return f"{service.mlflow}/reports/{str(page).removeprefix(f'{absolute(root)}/artifacts/')}"


def _linked(run: StageRun, root: StorePath) -> str:
    """Return the stage's name, as a link to its report if the service of the root serves it."""
    page = location(run["dir"]) / REPORT_HTML
    url = page_url(root, page) if page.is_file() else None
    return f"[{run['stage']}]({url})" if url else run["stage"]


def _figures(run: StageRun, root: StorePath) -> list[tuple[str, str, str]]:
    directory = location(run["dir"])
    report, path = read_report(directory), directory / REPORT_JSON
    if report is None and path.exists():
        _log.warning("%s: %s cannot be read; delete %s to make it again", run["stage"], path, directory)
    summary = report["summary"] if report is not None else {}
    name = _linked(run, root)
    if name == run["stage"]:  # no server serves the report
        name = f"{name}: `{location(run['dir']) / REPORT_HTML}`"
    names = [name, *[""] * len(summary)]  # the name stands in the first of its rows only
    return [(name, figure, str(value)) for name, (figure, value) in zip(names, summary.items())]
