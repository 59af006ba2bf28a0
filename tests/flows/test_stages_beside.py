"""Stages that run at the same time: they meet, they end together, and the run ends when both have ended."""

import threading
import time
from collections.abc import Mapping

import pytest
from prefect import flow

from dataset_builders.contracts.strict import StrictModel
from dataset_builders.storage.store import StorePath
from flows.pipeline import flow as module
from flows.pipeline.flow import Runs, run_nodes
from flows.pipeline.graph import NODES, PREPARE_DATA, TRAIN, Needs, Node, pipeline_nodes
from flows.pipeline.recipe import load_recipe
from stages.artifacts.artifact import Stage, StageOutput
from stages.artifacts.workers import StageResources
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


def stage(name: str, then: str = "", beside: str = "", needs: Needs = Needs.NOTHING, **inputs: str) -> Node:
    return Node(name, f"{__name__}:STAGE", Settings(name=name, then=then), inputs, needs, beside)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs the first flow of a graph, given the nodes of both flows."""

    def of_graph(data: list[Node], training: list[Node] = ()) -> tuple[Runs, dict[str, object]]:
        for name, nodes in ((PREPARE_DATA, data), (TRAIN, training)):
            monkeypatch.setitem(NODES, name, [lambda config, nodes=nodes: nodes])
        places: dict[str, object] = {}
        ended.clear()
        config = load_recipe().config
        return flow(lambda: run_nodes(config, str(tmp_path), None, PREPARE_DATA, places), name="beside")(), places

    BOTH_RUN.reset()
    monkeypatch.setitem(NODES, "evaluate", [])
    return of_graph


def test_two_stages_run_at_the_same_time(run):
    runs, places = run([stage("rows"), stage("check", "meet", "bins", rows="rows"), stage("bins", "meet", rows="rows")])
    assert list(runs) == ["rows", "check", "bins"], "the runs have the order of the graph"
    assert set(places) == set(runs)


def test_a_stage_of_a_later_flow(run):
    runs, places = run([stage("train", "meet")], [stage("answer_base", "meet", "train")])
    assert list(runs) == list(places) == ["train", "answer_base"]


@pytest.mark.parametrize("failing", ["check", "bins"])
def test_a_failure_ends_the_run_after_both(run, failing):
    then = {"check": "go on", "bins": "go on", failing: "fail"}
    if failing == "check":
        then["bins"] = "meet"  # the main stage is not stopped: it may be a training of hours
    with pytest.raises(ValueError, match=f"{failing} failed"):
        run([stage("check", then["check"], "bins"), stage("bins", then["bins"])])
    assert set(ended) == {"check", "bins"}


def test_a_stage_that_needs_a_slot_waits_for_its_turn(run, monkeypatch):
    nodes = [stage("train", needs=Needs.SLOT)], [stage("answer_base", beside="train", needs=Needs.SLOT)]
    monkeypatch.setattr(module, "has_server", lambda: True)
    runs, places = run(*nodes)
    assert list(runs) == list(places) == ["train"]


def test_stages_of_the_recipe_that_have_no_common_work():
    beside = {node.name: node.beside for node in pipeline_nodes(load_recipe().config) if node.beside}
    assert beside == {"contamination": "tokenize", "answer_base": "train"}
