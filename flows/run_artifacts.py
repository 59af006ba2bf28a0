"""Prefect artifacts of a pipeline run: the table of stages, the reports' figures, the scores, the MLflow link."""

import json
from collections.abc import Mapping, Sequence

from prefect.artifacts import create_link_artifact, create_markdown_artifact

from dataset_builders.contracts.store import location
from flows.tasks import StageRun
from stages.report import REPORT_HTML, REPORT_JSON


def publish_stages(runs: Sequence[StageRun]) -> None:
    """Two pages: which stage was made or reused, and the headline figures of each report."""
    rows = [
        f"| {run['stage']} | {'reused' if run['reused'] else 'made'} | {run['seconds']:.1f} | `{run['dir']}` |"
        for run in runs
    ]
    table = "\n".join(["| stage | | seconds | directory |", "| --- | --- | ---: | --- |", *rows])
    create_markdown_artifact(key="stages", markdown=table, description="What this run made and what it reused")
    create_markdown_artifact(
        key="reports", markdown="\n\n".join(_report(run) for run in runs), description="Headline figures of each stage"
    )


def publish_scores(scores: Mapping[str, Mapping[str, float]], export_dir: str) -> None:
    """The scores of every subset, with the model's directory."""
    metrics = sorted({metric for values in scores.values() for metric in values})
    head = f"| subset | {' | '.join(metrics)} |\n| --- |{' ---: |' * len(metrics)}"
    rows = [f"| {name} | {' | '.join(_number(values.get(m)) for m in metrics)} |" for name, values in scores.items()]
    text = "\n".join([f"Model: `{export_dir}`", "", head, *rows])
    create_markdown_artifact(key="scores", markdown=text, description="Scores on held-out samples")


def publish_mlflow(url: str | None) -> None:
    """The MLflow run as a link, where there is one."""
    if url:
        create_link_artifact(key="mlflow-run", link=url, link_text="MLflow run", description=url)


def publish_comparison(
    columns: Sequence[str], rows: Sequence[Sequence[str]], errors: Sequence[str], url: str | None
) -> None:
    """The table of a comparison's runs, what went wrong in those that failed, and MLflow's page that compares them."""
    table = "\n".join(
        [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}", *(f"| {' | '.join(r)} |" for r in rows)]
    )
    link = [f"[Compare them in MLflow]({url})"] if url else []
    failed = ["Failed:\n\n" + "\n".join(f"- `{line}`" for line in errors)] if errors else []
    text = "\n\n".join([*link, table, *failed])
    create_markdown_artifact(key="comparison", markdown=text, description="Every run of the comparison")
    if url:
        create_link_artifact(key="mlflow-compare", link=url, link_text="Compare in MLflow", description=url)


def _report(run: StageRun) -> str:
    path = location(run["dir"]) / REPORT_JSON
    summary = json.loads(path.read_text(encoding="utf-8"))["summary"] if path.is_file() else {}
    lines = [f"| {name} | {value} |" for name, value in summary.items()]
    page = location(run["dir"]) / REPORT_HTML
    table = "\n".join(["| | |", "| --- | ---: |", *lines]) if lines else ""
    return f"## {run['stage']}\n\n`{page}`\n\n{table}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
