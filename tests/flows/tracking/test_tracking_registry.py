"""Aliases of the registered model: who is candidate, who is champion, why, and never twice."""

from pathlib import Path

import pytest

from flows.tracking.config import RegistryConfig
from flows.tracking.registry import promote, register
from flows.tracking.store import connect
from stages.evaluate.predictions import heldout_fingerprint
from tests.helpers.tracked_run import make_evaluated

CONFIG = RegistryConfig(metric="exact_match", margin=0.005)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture
def make(root, request, monkeypatch):
    """Registers a version with a score under the test's own name, and gives it its aliases; returns the reason."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client, name = connect(root), request.node.name
    run_id = client.create_run("0").info.run_id

    def version(score: float | None, fingerprint: str = "", heldout: str | None = "h1", config=CONFIG) -> str:
        number = len(client.search_model_versions(f"name='{name}'"))
        tags = {"fingerprint": fingerprint or f"{number:016d}"}
        tags |= {} if score is None else {"exact_match": f"{score:.6g}"}
        tags |= {} if heldout is None else {"heldout": heldout}
        model = client.create_logged_model("0", source_run_id=run_id)
        made = register(client, name, f"file://{root}/hf", run_id, model.model_id, tags)
        return promote(client, root, name, str(made.version), config)

    version.aliases = lambda: {k: int(v) for k, v in client.get_registered_model(name).aliases.items()}
    version.client, version.name = client, name
    return version


def test_the_first_is_champion_and_only_a_margin_changes_that(make):
    assert make(0.97) == "exact_match 0.9700, no champion before: champion"
    assert make.aliases() == {"candidate": 1, "champion": 1}
    assert make(0.9749) == ("exact_match 0.9749 against 0.9700 of version 1: candidate only, the margin is 0.005")
    assert make.aliases() == {"candidate": 2, "champion": 1}
    assert make(0.975) == "exact_match 0.9750 against 0.9700 of version 1: champion"
    assert make.aliases() == {"candidate": 3, "champion": 3}
    tags = make.client.get_model_version(make.name, "3").tags
    assert tags["athanor.champion"].endswith("of version 1: champion")


def test_what_was_decided_is_not_decided_again(make):
    first = make(0.9, "a" * 16)
    make(0.99, "b" * 16)
    assert make(0.9, "a" * 16) == first
    assert make.aliases() == {"candidate": 2, "champion": 2}


def test_an_interrupted_promotion_is_finished(make):
    make(0.5)
    reason = make(0.9)
    make.client.set_registered_model_alias(make.name, "champion", "1")  # the tags were set, the alias not yet
    assert promote(make.client, Path(make.client.tracking_uri[10:]).parent, make.name, "2", CONFIG) == reason
    assert make.aliases()["champion"] == 2


def test_a_version_without_the_score(make):
    assert make(None) == "exact_match unknown, no champion before: champion"
    assert make(0.1) == "exact_match 0.1000 against unknown of version 1: champion"
    assert "candidate only" in make(None)


REPLACES = RegistryConfig(metric="exact_match", margin=0.005, other_heldout="champion")


def test_scores_of_other_held_out_samples_are_not_compared_and_a_setting_decides(make):
    make(0.9356, heldout="digits")
    reason = make(0.5128, "s" * 16, heldout="shapes")
    assert reason == (
        "exact_match 0.5128 of other held-out samples than those of version 1, so that the two are not compared: "
        "candidate only; the same command with --set execution.registry.other_heldout=champion makes it champion"
    )
    assert make.aliases() == {"candidate": 2, "champion": 1}
    assert make(0.99, heldout="trivial").endswith("makes it champion"), "nor dethrones a good model"
    assert make.aliases()["champion"] == 1
    for _ in range(2):
        reason = make(0.5128, "s" * 16, heldout="shapes", config=REPLACES)
        assert reason.endswith("than those of version 1, in whose place it is put: champion")
        assert make.aliases() == {"candidate": 3, "champion": 2}
    assert make(0.52, heldout="shapes") == "exact_match 0.5200 against 0.5128 of version 2: champion"


def test_the_setting_decides_nothing_that_scores_can_decide(make):
    make(0.9)
    assert "candidate only" in make(0.5, "b" * 16, config=REPLACES)
    assert "candidate only" in make(0.5, "b" * 16, config=REPLACES)
    assert make.aliases()["champion"] == 1


def test_a_champion_of_before_is_asked_what_its_scores_are_of(make, root):
    evaluated = make_evaluated(root, "9" * 16)
    make(0.9, heldout=None)
    run_id = make.client.get_model_version(make.name, "1").run_id
    make.client.set_tag(run_id, "fingerprint.evaluate", "8" * 16)
    assert "not compared" in make(0.95, heldout=heldout_fingerprint(evaluated)), "its evaluation is gone"
    make.client.set_tag(run_id, "fingerprint.evaluate", "9" * 16)
    reason = make(0.96, heldout=heldout_fingerprint(evaluated))
    assert reason == "exact_match 0.9600 against 0.9000 of version 1: champion"
    assert make.client.get_model_version(make.name, "1").tags["heldout"] == heldout_fingerprint(evaluated)
