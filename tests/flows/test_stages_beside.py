"""Stages that run at the same time: they meet, they end together, and the run ends when both have ended."""

import threading
import time
from collections.abc import Mapping

import pytest
from prefect import flow

from dataset_builders.contracts.strict import StrictModel
from dataset_builders.storage.store import StorePath
from flows.pipeline import flow as module
from flows.pipeline.flow import run_steps
from flows.pipeline.plan import Plan
from flows.pipeline.recipe import load_recipe
from flows.pipeline.steps import PREPARE_DATA, TRAIN, Needs, Step
from flows.pipeline.tasks import stage_runs
from stages.shared.artifacts.artifact import Stage, StageOutput
from stages.shared.artifacts.workers import StageResources
from tests.helpers.patience import at_most

BOTH_RUN = threading.Barrier(2)
ended: list[str] = []


class Settings(StrictModel):
    """The work of a stage of this file: "meet" the other stage, then "fail" or "go on" until it is stopped."""

    name: str
    then: str = ""


def _run(config: Settings, inputs: Mapping[str, object], work: StorePath, resources: StageResources) -> StageOutput:
    try:
        if config.then:
            BOTH_RUN.wait(at_most(30))
        if config.then == "fail":
            raise ValueError(f"{config.name} failed")
        deadline = time.monotonic() + (30 if config.then == "go on" else 0)
        while time.monotonic() < deadline:
            resources.report(0, 1)
            time.sleep(0.01)
        if config.then == "go on":
            ended.append(f"{config.name}, which nothing stopped")
        return StageOutput()
    finally:
        ended.append(config.name)


STAGE = Stage("of_this_file", 1, _run)


def step(name: str, then: str = "", beside: str = "", flow: str = PREPARE_DATA, needs: Needs = Needs.NOTHING) -> Step:
    return Step(flow, name, STAGE, Settings(name=name, then=then), {}, needs, beside)


@pytest.fixture
def run(tmp_path):
    """Return a function that runs the first flow of a plan of these steps."""

    def of_steps(*steps: Step) -> list[str]:
        plan = Plan.open(load_recipe(), tmp_path)
        plan._steps = list(steps)
        ended.clear()
        flow(lambda: run_steps(plan, PREPARE_DATA, None), name="beside")()
        return [run["stage"] for run in stage_runs(plan)]

    BOTH_RUN.reset()
    return of_steps


def test_two_stages_run_at_the_same_time(run):
    rows, check, bins = step("rows"), step("check", "meet", "bins"), step("bins", "meet")
    check.inputs = bins.inputs = {"rows": rows}
    assert run(rows, check, bins) == ["rows", "check", "bins"], "the runs have the order of the plan"
    assert all(each.artifact is not None for each in (rows, check, bins))


def test_a_stage_of_a_later_flow(run):
    assert run(step("train", "meet"), step("answer_base", "meet", "train", TRAIN)) == ["train", "answer_base"]


@pytest.mark.parametrize("failing", ["check", "bins"])
def test_a_failure_ends_the_run_after_both(run, failing):
    then = {"check": "go on", "bins": "go on", failing: "fail"}
    if failing == "check":
        then["bins"] = "meet"  # the main stage is not stopped: it may be a training of hours
    with pytest.raises(ValueError, match=f"{failing} failed"):
        run(step("check", then["check"], "bins"), step("bins", then["bins"]))
    assert set(ended) == {"check", "bins"}


def test_a_stage_that_needs_a_slot_waits_for_its_turn(run, monkeypatch):
    monkeypatch.setattr(module, "has_server", lambda: True)
    steps = step("train", needs=Needs.SLOT), step("answer_base", "", "train", TRAIN, Needs.SLOT)
    assert run(*steps) == ["train"]
