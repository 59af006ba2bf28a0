"""The first view of MLflow's pages, which is score and loss, and of Prefect's, which says how to log in."""

from pathlib import Path
from types import SimpleNamespace

import mlflow.server
import prefect
from prefect.settings.models.root import Settings
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import HTMLResponse, PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from flows.libraries.mlflow_private import COLOUR_TAG, VIEW_TAG, first_view
from flows.service import mlflow_app, prefect_app
from flows.service.access import make_access
from flows.service.programs import Service, prefect_server
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
        f'"{COLOUR_TAG}"',
    }
    assert {name for name in names if name not in script} == set()


def test_prefects_pages_get_the_script_and_nothing_else_changes():
    seen = []

    async def page(request):
        seen.append(request.headers.keys())
        return HTMLResponse("<html><head></head>" + "x" * 5000)

    async def data(request):
        return PlainTextResponse("<head>")

    app = Starlette(routes=[Route("/data", data), Route("/{path:path}", page)], middleware=[Middleware(GZipMiddleware)])
    client = TestClient(prefect_app.with_first_visit(app))
    known = {"Accept": "text/html,*/*", "If-None-Match": "x"}
    assert "service/password below its root" in client.get("/login", headers=known).text
    assert not {"accept-encoding", "if-none-match"} & set(seen[0]), "an old or packed page would come without it"
    assert client.get("/data", headers=known).text == "<head>" and "script" not in client.get("/x").text


def test_prefects_pages_read_the_names_of_the_script():
    scripts = "".join(path.read_text(encoding="utf-8") for path in Path(prefect.__ui_static_path__).glob("assets/*.js"))
    names = ("prefect-show-promotional-content", "prefect-v2-promo-dismissed", "prefect-password", "admin:pass")
    for name in (*names, "flow-run-name-input", "Something went wrong", "p-toast-container__toast"):
        assert name in scripts and name in prefect_app._FIRST_VISIT, name


def test_prefect_is_told_to_show_no_promotion(tmp_path, monkeypatch):
    access = make_access("127.0.0.1", tmp_path, {})
    program = prefect_server(Service(tmp_path, access, {"prefect": 4200, "mlflow": 5000}, 1, {}))
    assert Settings().server.ui.show_promotional_content, "otherwise this test would show nothing"
    for name, value in program.environment.items():
        monkeypatch.setenv(name, value)
    assert not Settings().server.ui.show_promotional_content
