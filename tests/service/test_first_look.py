"""The first visit of a service's pages: what a user sees, and which servers the pages call."""

import re

import pytest

from tests.helpers.browser import chromium, logged_in, requires_chromium

pytestmark = [
    pytest.mark.full,
    requires_chromium,
    pytest.mark.promise("The pages of the service ask no other server, and telemetry is switched off."),
]


@pytest.fixture(scope="module")
def page(service):
    with chromium() as browser:
        yield logged_in(browser, service).new_page()


def test_mlflow_begins_with_its_pages_for_training_and_without_an_assistant_that_is_closed(service, page):
    page.goto(f"{service.record.mlflow}/#/experiments/0")
    page.get_by_text("Training runs").or_(page.get_by_text("Runs", exact=True)).first.wait_for()
    page.wait_for_timeout(3000)
    assert "workflowType=genai" not in page.url and not page.get_by_text("Judges").count()
    assert not page.get_by_text("Welcome to MLflow Assistant").count()
    page.evaluate("localStorage.setItem('mlflow.workflowType_v1', '\"genai\"')")
    page.goto(service.record.mlflow)
    assert page.evaluate("localStorage.getItem('mlflow.workflowType_v1')") == '"genai"', "a person's choice stays"


def test_prefect_begins_with_the_pages_whose_form_is_tested(service, page):
    page.goto(service.record.prefect_ui)
    page.get_by_text("Dashboard").first.wait_for()
    assert "/v2" not in page.url


def test_settings_pages_show_telemetry_as_off(service, page):
    page.goto(f"{service.record.mlflow}/#/settings")
    page.get_by_text("Enable telemetry").wait_for()
    assert [switch.is_checked() for switch in page.get_by_role("switch").all()][-1] is False
    assert not page.get_by_text("Information about UI telemetry").count()
    page.goto(f"{service.record.prefect_ui}/settings")
    for name in ("analytics_enabled", "enable_orchestration_telemetry"):
        page.get_by_text(name).first.wait_for()
    shown = re.sub(r"\s+", " ", page.locator("body").inner_text())
    for name in ("analytics_enabled", "enable_orchestration_telemetry", "enable_resource_metrics"):
        assert re.search(rf"{name}\W*false", shown, re.IGNORECASE), shown[:3000]


def test_the_pages_ask_no_other_server(service, page):
    foreign = set()

    def note(request) -> None:
        if not request.url.startswith((service.record.prefect_ui, service.record.mlflow, "data:", "blob:")):
            foreign.add((request.url, request.failure))

    page.on("requestfinished", note)
    page.on("requestfailed", note)
    for url in (service.record.prefect_ui, f"{service.record.prefect_ui}/runs", service.record.mlflow):
        page.goto(url, wait_until="commit")
        page.wait_for_timeout(5000)
    assert {(url, failure) for url, failure in foreign if failure != "csp"} == set()
