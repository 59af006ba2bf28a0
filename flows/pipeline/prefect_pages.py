"""The Prefect artifacts of a run: the table of stages, the figures of the reports, the scores, the link to MLflow."""

import json
from collections.abc import Mapping, Sequence

from prefect.artifacts import create_link_artifact, create_markdown_artifact

from dataset_builders.storage.store import location
from flows.pipeline.tasks import StageRun
from flows.tracking.notes import markdown_table
from stages.pages.report import REPORT_HTML, REPORT_JSON


def publish_stages(runs: Sequence[StageRun]) -> None:
    """Publish two pages: which stages were made or reused, and the headline figures of each report."""
    rows = [
        (run["stage"], "reused" if run["reused"] else "made", f"{run['seconds']:.1f}", f"`{run['dir']}`")
        for run in runs
    ]
    table = markdown_table(("stage", "", "seconds", "directory"), rows, numbers=[2])
    create_markdown_artifact(key="stages", markdown=table, description="What this run made and what it reused")
    create_markdown_artifact(
        key="reports", markdown="\n\n".join(_report(run) for run in runs), description="Headline figures of each stage"
    )


def publish_scores(scores: Mapping[str, Mapping[str, float]], export_dir: str) -> None:
    """Publish the scores of every subset, with the model's directory."""
    metrics = sorted({metric for values in scores.values() for metric in values})
    rows = [
        (name, *("" if values.get(metric) is None else f"{values[metric]:.4g}" for metric in metrics))
        for name, values in scores.items()
    ]
    table = markdown_table(("subset", *metrics), rows, numbers=range(1, len(metrics) + 1))
    text = f"Model: `{export_dir}`\n\n{table}"
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


def _report(run: StageRun) -> str:
    path = location(run["dir"]) / REPORT_JSON
    summary = json.loads(path.read_text(encoding="utf-8"))["summary"] if path.is_file() else {}
    table = markdown_table(("", ""), [(name, str(value)) for name, value in summary.items()], numbers=[1])
    page = location(run["dir"]) / REPORT_HTML
    return f"## {run['stage']}\n\n`{page}`\n\n{table if summary else ''}"
