"""MLflow's pages begin with score and loss: the order of a run's metrics, and the names that the pages read."""

from pathlib import Path
from types import SimpleNamespace

import mlflow.server

from flows.libraries.mlflow_private import VIEW_TAG, first_view
from flows.service import mlflow_app
from trainer.contract.result import MetricsRow


def test_a_run_gives_results_first_and_the_machine_last():
    class Run(SimpleNamespace):
        def to_mlflow_entity(self) -> list[str]:
            return [metric.key for metric in self.latest_metrics]

    names = ["usage/cpu", "exact_match/a", "loss", "timing/step_seconds", "epoch", "score_low", "score"]
    mlflow_app.replace_run_reader(Run)
    read = Run(latest_metrics=[SimpleNamespace(key=name) for name in names]).to_mlflow_entity()
    assert read == ["score", "score_low", "loss", "epoch", "exact_match/a", "usage/cpu", "timing/step_seconds"]


def test_the_first_view_shows_metrics_that_runs_have():
    known = {"score", "gain", *MetricsRow.model_fields}
    view = first_view()
    assert {name[9:-1] for name in view["selectedColumns"]} <= known
    assert view["columnOrder"][0] == "metrics.`score`", "MLflow's own order is the duration, then the metrics by name"
    charts = [chart["metricKey"] for chart in view["compareRunCharts"] if chart["type"] != "DIFFERENCE"]
    assert charts[:3] == ["score", "heldout_loss", "loss"] and set(charts) <= known
    assert "selectedColumns" not in first_view(is_of_one_run=True)


def test_mlflows_pages_read_the_names_of_the_view():
    pages = Path(mlflow.server.__file__).parent.glob("js/build/static/js/*.js")
    script = "".join(page.read_text(encoding="utf-8") for page in pages)
    names = {*first_view(), *first_view()["compareRunCharts"][1], *first_view()["compareRunSections"][0]}
    names |= {'getStoreForComponent("ExperimentPage"', 'getStoreForComponent("RunPage"', '"MLflowLocalStorage"'}
    names |= {
        "mlflow_header.toggle_sidebar_button",
        "data-assistant-ui",
        '"compareRunsMode"',
        f'"{VIEW_TAG.removesuffix("athanor")}"',
        "viewStateShareKey",
    }
    assert {name for name in names if name not in script} == set()
