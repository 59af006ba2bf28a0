"""The first visit of a service's pages: what a user sees, and which servers the pages call."""

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


@pytest.mark.parametrize("path", ["", "/deployments", "/v2/"])
def test_without_a_password_the_page_says_how_to_log_in_and_no_more(service, path):
    with chromium() as browser:
        page = browser.new_page()
        page.goto(service.record.prefect_ui + path)
        page.get_by_text("service/password below its root").wait_for()
        page.wait_for_timeout(3000)
        text = page.inner_text("body")
        assert page.get_by_placeholder("user:password").count() == 1
        assert not any(word in text for word in ("Cloud", "failed", "wrong")), text
        if not path.startswith("/v2"):
            page.get_by_placeholder("user:password").fill(service.login)
            page.get_by_role("button", name="Login").click()
            page.wait_for_url(f"**{path or '/dashboard'}*")
            assert "V2 UI AVAILABLE" not in page.inner_text("body")


def test_mlflow_begins_with_its_pages_for_training_and_without_an_assistant_that_is_closed(service, page):
    page.goto(f"{service.record.mlflow}/#/experiments/0")
    page.get_by_text("Training runs").or_(page.get_by_text("Runs", exact=True)).first.wait_for()
    page.wait_for_timeout(3000)
    assert "workflowType=genai" not in page.url and not page.get_by_text("Judges").count()
    assert not page.get_by_text("Welcome to MLflow Assistant").count()
    page.evaluate("localStorage.setItem('mlflow.workflowType_v1', '\"genai\"')")
    page.goto(service.record.mlflow)
    assert page.evaluate("localStorage.getItem('mlflow.workflowType_v1')") == '"genai"', "a person's choice stays"


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
