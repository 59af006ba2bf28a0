"""A user's browser: the system's Chromium, logged in at both servers of a service."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.helpers.service import RunningService

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
requires_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")


@contextmanager
def chromium(*arguments: str) -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *arguments])
        yield browser
        browser.close()


def logged_in(browser: Any, service: RunningService, **options: Any) -> Any:
    """Return a context of the browser in which the password was entered on the pages of both servers."""
    user, _, word = service.login.partition(":")
    credentials = {"username": user, "password": word, "origin": service.record.mlflow}
    context = browser.new_context(http_credentials=credentials, **options)
    page = context.new_page()
    page.goto(service.record.prefect_ui)
    page.get_by_placeholder("user:password").fill(service.login)
    page.get_by_role("button", name="Login").click()
    page.wait_for_url("**/dashboard*")
    page.close()
    return context
