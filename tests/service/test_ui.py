"""Must-show 1: the Prefect UI in a browser, as a user uses it: a wrong and a right form, a watched run, a comparison.

Screenshots of every page are in ATHANOR_PICTURES, or in the test's own directory.
"""

import os
import re
import urllib.error
from pathlib import Path

import pytest

from flows.tracking.store import compare_url
from tests.helpers.browser import chromium, logged_in, requires_chromium
from tests.helpers.patience import at_most
from tests.helpers.service import lines
from tests.helpers.small_run import SMALL

pytestmark = [
    pytest.mark.full,
    requires_chromium,
    pytest.mark.promise(
        "The form, a watched run and MLflow's pages work in headless Chromium; a wrong value is refused with its path."
    ),
]
WIDTH, HEIGHT = 1400, 1000
RUN_SECONDS = 480
NAME = "A run of my own"
TYPED = {"convert.heldout_fraction": 0.3, "train.num_steps": 12, "train.optim.lr": 0.002}
LINES = lines({dotted: value for dotted, value in SMALL.items() if dotted not in TYPED})


def runs_of(service, deployment: str) -> list[dict]:
    body = {"deployments": {"id": {"any_": [deployment]}}, "sort": "START_TIME_DESC"}
    return service.prefect("/flow_runs/filter", body)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    kept = os.environ.get("ATHANOR_PICTURES")
    directory = Path(kept) if kept else tmp_path_factory.mktemp("pictures")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture(scope="module")
def browser(service):
    """Return a browser in which the password was entered."""
    with chromium() as browser:
        yield logged_in(browser, service, viewport={"width": WIDTH, "height": HEIGHT})


@pytest.fixture
def page(browser):
    page = browser.new_page()
    page.set_default_timeout(30_000)
    yield page
    page.close()


class Form:
    """The custom-run form of a deployment, whose fields are found by the dotted names in their descriptions."""

    def __init__(self, page, service, deployment: str) -> None:
        self.page = page
        page.goto(f"{service.record.prefect_ui}/deployments/deployment/{deployment}/run")
        page.wait_for_selector(".schema-input")

    def field(self, dotted: str):
        name = self.page.locator("code", has_text=re.compile(rf"^{re.escape(dotted)}$"))
        return self.page.locator(".schema-form-property").filter(has=name).last

    def fill(self, dotted: str, value: object) -> None:
        self.field(dotted).locator("input, textarea").first.fill(str(value))

    def write(self, parameter: str, text: str) -> None:
        label = self.page.get_by_text(f"{parameter} (Optional)", exact=True)
        self.page.locator(".schema-form-property").filter(has=label).last.locator("textarea").fill(text)

    def submit(self) -> None:
        self.page.wait_for_timeout(500)  # the page processes typed text with a delay
        self.page.get_by_role("button", name="Submit").click()


def fill_small(form: Form) -> None:
    """Fill in a name, the smallest data that the pipeline accepts, and a few steps."""
    assert not form.page.get_by_text("Run Name", exact=True).is_visible(), "what is typed there is not kept"
    form.write("name", NAME)
    form.write("set", LINES)
    for dotted, value in TYPED.items():
        form.fill(dotted, value)


def snap(page, path: Path, height: int = HEIGHT) -> None:
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.wait_for_timeout(700)  # animations of the page
    page.screenshot(path=str(path))
    page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    assert path.stat().st_size > 10_000


@pytest.fixture(scope="module")
def form_run(service, browser, pictures) -> dict:
    """Ask for a run in the form, first wrongly and then rightly, and watch the run to its end."""
    deployment = service.deployment("vlm-sft")["id"]
    before = {run["id"] for run in runs_of(service, deployment)}
    page = browser.new_page()
    form = Form(page, service, deployment)
    snap(page, pictures / "form.png")
    fill_small(form)

    form.fill("train.optim.lr", "3")
    form.submit()
    refusal = form.field("train.optim.lr").get_by_text("3 is greater than the maximum of 1")
    refusal.wait_for()
    refusal.scroll_into_view_if_needed()
    snap(page, pictures / "form_refused.png")
    assert page.url.endswith("/run") and {run["id"] for run in runs_of(service, deployment)} == before

    form.fill("train.optim.lr", "0.002")
    refusal.wait_for(state="detached")
    snap(page, pictures / "form_filled.png", 3600)
    form.submit()
    page.wait_for_url(lambda url: not url.endswith("/run"))
    (run,) = [run for run in runs_of(service, deployment) if run["id"] not in before]
    page.goto(f"{service.record.prefect_ui}/runs/flow-run/{run['id']}")
    page.get_by_text("Completed", exact=True).first.wait_for(timeout=at_most(RUN_SECONDS) * 1000)
    yield {"page": page, **service.end_of(run["id"], 10)}
    page.close()


def test_the_form_has_what_the_recipe_leaves_open(form_run):
    assert form_run["state_type"] == "COMPLETED", form_run["state"]["message"]
    asked = form_run["parameters"]
    assert {key: value for key, value in asked["settings"].items() if value is not None} == TYPED
    assert asked["set"] == LINES and asked["recipe"] == "embedded"
    assert form_run["name"] == NAME


def test_the_run_shows_logs_and_artifacts(service, form_run, pictures):
    page = form_run["page"]
    page.reload()  # the timeline is drawn to the scale of the whole run
    page.get_by_text(re.compile("train (made in|reused)")).first.wait_for(state="attached")
    page.wait_for_timeout(2000)  # it is drawn on a canvas, which does not report when it is finished
    snap(page, pictures / "prefect_run.png")
    page.get_by_text("Artifacts", exact=True).click()
    for key in ("stages", "reports", "scores", "mlflow-run"):
        page.get_by_text(key, exact=True).first.wait_for()
    snap(page, pictures / "prefect_artifacts.png")
    (scores,) = artifacts(service, form_run["id"], "scores")
    page.goto(f"{service.record.prefect_ui}/artifacts/artifact/{scores['id']}")
    page.get_by_text("exact_match").first.wait_for()
    snap(page, pictures / "prefect_scores.png")


def artifacts(service, run_id: str, key: str) -> list[dict]:
    body = {"artifacts": {"flow_run_id": {"any_": [run_id]}, "key": {"any_": [key]}}}
    return service.prefect("/artifacts/filter", body)


def test_mlflow_opens_on_score_and_loss(service, form_run, pictures, page):
    (link,) = artifacts(service, form_run["id"], "mlflow-run")
    run_url = re.search(r"\((http[^)]+)\)", link["data"]).group(1)
    page.goto(run_url.partition("/runs/")[0])
    page.get_by_text("Score and loss", exact=True).wait_for()
    assert [page.get_by_text(name, exact=True).first.bounding_box()["y"] < HEIGHT for name in ("score", "loss")] == [
        True
    ] * 2
    page.wait_for_timeout(3000)
    snap(page, pictures / "mlflow_experiment.png")
    for place in ("", "/#/experiments"):
        page.goto("about:blank")
        page.goto(f"{service.record.mlflow}{place}")
        page.get_by_role("row").get_by_role("link", name="athanor-embedded").click()
        page.get_by_text("Score and loss", exact=True).wait_for()
    page.goto(f"{run_url.partition('/runs/')[0]}/runs?compareRunsMode=TABLE")
    columns = page.locator(".ag-header-viewport .ag-header-cell")
    columns.filter(has_text="score").first.wait_for()
    left = {column.bounding_box()["x"]: column.text_content() for column in columns.all()}
    assert left[min(left)].strip() == "score", "the first column after the run's name"
    page.goto(run_url)
    page.get_by_text("score_low", exact=True).wait_for()
    assert page.get_by_text("Reports:").is_visible() and not page.get_by_text("fingerprint").count()
    page.goto(f"{run_url}/model-metrics")
    page.get_by_text("Score and loss", exact=True).wait_for()


def test_a_wrong_value_is_refused_with_its_path(service):
    with pytest.raises(urllib.error.HTTPError, match="409") as refused:
        path = f"/deployments/{service.deployment('vlm-sft')['id']}/create_flow_run"
        service.prefect(path, {"parameters": {"settings": {"train.optim.lr": 3}}})
    assert "train.optim.lr" in refused.value.read().decode()


def test_two_runs_compared_in_mlflow(service, form_run, pictures, page):
    wrong = service.start_run("vlm-sft", {**SMALL, "tokenize.max_seq_len": 99999})
    right = service.start_run("vlm-sft", {**SMALL, "train.optim.lr": 0.006, "train.num_steps": 12})
    second, refused = service.end_of(right, RUN_SECONDS), service.end_of(wrong, 60)
    assert second["state_type"] == "COMPLETED", second["state"]["message"]
    assert (refused["state_type"], refused["state_name"]) == ("FAILED", "Refused")
    assert not artifacts(service, wrong, "stages")
    assert refused["state"]["message"].startswith("recipe embedded with --set: tokenize.max_seq_len=99999 is more")
    (stages,) = artifacts(service, second["id"], "stages")
    assert re.search(r"\[convert\]\(\S+/reports/convert/\w+/report.html\) \| reused \|", stages["data"])
    assert re.search(r"\[train\]\(\S+\) \| [\d.]+ s \|", stages["data"])

    links = [artifacts(service, run["id"], "mlflow-run")[-1]["data"] for run in (form_run, second)]
    urls = [re.search(r"\((http[^)]+)\)", link).group(1) for link in links]
    assert all(url.startswith(service.record.mlflow) for url in urls)
    page.goto(urls[0])
    page.get_by_text(NAME).first.wait_for()
    page.get_by_text("exact_match").first.wait_for()
    snap(page, pictures / "mlflow_run.png", 1300)
    ids, experiment = [url.rpartition("/")[2] for url in urls], re.search(r"/experiments/(\d+)/", urls[0]).group(1)
    page.goto(compare_url(ids, experiment, service.record.mlflow))
    page.get_by_text("Comparing 2 Runs").first.wait_for()
    for value in ("0.002", "0.006"):
        page.get_by_text(value, exact=True).first.wait_for()
    page.get_by_text("Show diff only").first.click()
    snap(page, pictures / "mlflow_compare.png", 1300)
    page.goto(f"{urls[0].partition('/runs/')[0]}/runs?compareRunsMode=ARTIFACT")
    page.get_by_text("answers.json", exact=True).wait_for()  # the table that is chosen, as are these columns
    page.get_by_placeholder("Filter by sample").wait_for()
    page.get_by_label("Dialog Combobox, selected option: answer").wait_for()
    snap(page, pictures / "mlflow_answers.png")
