"""The pages of artifacts over HTTP: pages only, and without the rights of the server's own pages."""

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from flows.pipeline import prefect_pages
from flows.pipeline.prefect_pages import page_url
from flows.pipeline.tasks import StageRun
from flows.service.mlflow_app import with_reports
from stages.shared.pages.report import write_report

PLACE = "convert/0123456789abcdef"


@pytest.fixture
def client(tmp_path):
    for name in ("report.html", "shard.tar", "config.json"):
        path = tmp_path / "artifacts" / PLACE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "secret.html").write_text("secret")
    return TestClient(with_reports(PlainTextResponse("MLflow"), tmp_path))


def test_a_page_is_served_without_an_origin(client):
    answer = client.get(f"/reports/{PLACE}/report.html")
    assert answer.text == "report.html" and "text/html" in answer.headers["content-type"]
    assert answer.headers["content-security-policy"].startswith("sandbox allow-scripts")
    assert client.get("/other").text == "MLflow"


@pytest.mark.parametrize(
    "path",
    [
        *(f"{PLACE}/shard.tar", f"{PLACE}/config.json", f"{PLACE}/preview.html", "convert/0123456789abcdef/"),
        *("../secret.html", "%2e%2e/%2e%2e/secret.html", f"{PLACE}/..%2f..%2f..%2fsecret.html", ""),
    ],
)
def test_nothing_else_is(client, path):
    answer = client.get(f"/reports/{path}")
    assert (answer.status_code, answer.text) in ((404, "there is no such page\n"), (200, "MLflow"))


def test_a_link_needs_a_service(tmp_path, monkeypatch):
    page = tmp_path / "artifacts" / PLACE / "report.html"
    assert page_url(tmp_path, page) is None
    monkeypatch.setattr(prefect_pages, "read_record", lambda root: type("Record", (), {"mlflow": "http://h:5"}))
    assert page_url(tmp_path, page) == f"http://h:5/reports/{PLACE}/report.html"
    assert page_url(tmp_path, tmp_path / "elsewhere.html") is None


@pytest.mark.parametrize("text", ["", '{"summary": {"samples"', "[]"])
def test_a_damaged_report_does_not_end_the_run_that_shows_it(text, tmp_path, monkeypatch, caplog):
    whole, damaged, pages = tmp_path / "convert" / "a", tmp_path / "tokenize" / "b", {}
    for directory in (whole, damaged):
        directory.mkdir(parents=True)
        write_report(directory, title="A page", summary={"samples": 31}, sections=[])
    (damaged / "report.json").write_text(text)
    monkeypatch.setattr(
        prefect_pages, "create_markdown_artifact", lambda key, markdown, **_: pages.update({key: markdown})
    )
    runs = [StageRun(stage=d.parent.name, dir=str(d), reused=True, seconds=0.0) for d in (whole, damaged)]
    prefect_pages.publish_stages(runs, str(tmp_path))
    assert "31" in pages["reports"] and "tokenize" in pages["stages"] and "tokenize" not in pages["reports"]
    assert f"{damaged / 'report.json'} cannot be read; delete {damaged} to make it again" in caplog.text


def test_the_page_of_scores_begins_with_what_the_evaluation_warns_of(monkeypatch):
    pages = {}
    monkeypatch.setattr(
        prefect_pages, "create_markdown_artifact", lambda key, markdown, **_: pages.update({key: markdown})
    )
    stats = {"scores": {"overall": {"score": 0.5}}}
    prefect_pages.publish_scores(stats, "/release")
    usual = pages["scores"]
    prefect_pages.publish_scores(stats | {"warnings": ["a: read otherwise"]}, "/release")
    assert pages["scores"].split("\n\n")[1] == "**Warning**: a: read otherwise"
    assert pages["scores"].replace("**Warning**: a: read otherwise\n\n", "") == usual
