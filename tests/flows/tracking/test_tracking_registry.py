"""Aliases of the registered model: which version is candidate or champion, why, and that each is decided only once."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow.entities import Metric

from flows.tracking.config import RegistryConfig
from flows.tracking.registry import (
    DECISION_TAG,
    EVALUATION_TAG,
    EXPORT_TAG,
    HELDOUT_TAG,
    MODEL_TAG,
    Contender,
    promote,
    register,
)
from flows.tracking.store import connect
from stages.compare.comparison import ScoredAnswers
from stages.evaluate.predictions import PREDICTIONS, PREDICTIONS_SCHEMA
from stages.shared.scoring.intervals import Bootstrap
from tests.helpers.tracked_run import make_artifact

pytestmark = pytest.mark.promise(
    "The gain over the model before training has a paired bootstrap interval, and gates keep a model out of the "
    "registry, one that never learnt to end its answers too, but not its sound twin."
)

CONFIG = RegistryConfig(metric="exact_match", margin=0.005)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("root")


@pytest.fixture
def make(root, request, monkeypatch):
    """Return a function that registers a version with a score under the test's own name, gives it its aliases, and
    returns the reason."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client, name = connect(root), request.node.name
    models = {}  # fingerprint -> the run and its logged model

    def version(
        score: float | None, fingerprint: str = "", heldout: str | None = "h1", config=CONFIG, evaluation: str = ""
    ) -> str:
        fingerprint = fingerprint or f"{len(models):016d}"
        if fingerprint not in models:
            tags = {} if heldout is None else {HELDOUT_TAG: heldout}
            tags |= {EVALUATION_TAG: evaluation} if evaluation else {}
            run_id = client.create_run("0", tags=tags).info.run_id
            model_id = client.create_logged_model("0", source_run_id=run_id).model_id
            client.set_tag(run_id, MODEL_TAG, model_id)
            if score is not None:
                client.log_batch(run_id, [Metric("exact_match", score, 0, 0, model_id=model_id)])
            models[fingerprint] = run_id, model_id
        made = register(client, name, f"file://{root}/hf", *models[fingerprint], {EXPORT_TAG: fingerprint})
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
    tags = Contender.of(make.client, make.name, "3").tags
    assert tags[f"{DECISION_TAG}3"].endswith("of version 1: champion")


def test_what_was_decided_is_not_decided_again(make):
    first = make(0.9, "a" * 16)
    make(0.99, "b" * 16)
    assert make(0.9, "a" * 16) == first
    assert make.aliases() == {"candidate": 2, "champion": 2}


def test_an_interrupted_promotion_is_finished(make):
    make(0.5)
    reason = make(0.9)
    make.client.set_registered_model_alias(make.name, "champion", "1")  # the tags were set, but the alias was not
    assert promote(make.client, Path(make.client.tracking_uri[10:]).parent, make.name, "2", CONFIG) == reason
    assert make.aliases()["champion"] == 2


def test_a_version_without_the_score(make):
    assert make(None) == "exact_match unknown, which no score can be compared with: candidate only"
    assert make(0.1) == "exact_match 0.1000, no champion before: champion"
    assert "candidate only" in make(None)


def test_a_version_that_a_person_registered_stays_champion_and_a_second_version_of_a_model_is_decided_anew(make):
    make.client.create_registered_model(make.name)
    make.client.create_model_version(make.name, "file:///elsewhere")
    make.client.set_registered_model_alias(make.name, "champion", "1")
    assert make(0.9, "a" * 16).startswith("exact_match 0.9000 of other held-out samples than those of version 1, so")
    make.client.delete_registered_model_alias(make.name, "champion")
    make.client.delete_model_version(make.name, "2")
    assert make(0.9, "a" * 16) == "exact_match 0.9000, no champion before: champion"
    assert make.aliases()["champion"] == 3


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


@pytest.fixture
def judge(make, root):
    """Return a function that registers a version with its answers to thirty questions and returns the reason. Each
    answer is one character; + is a right answer."""

    def judged(answers: str, config: RegistryConfig = CONFIG, subsets: str = "") -> str:
        fingerprint = f"{make.name}{answers}".encode().hex()[-200:]
        exact = {"headline": "exact_match", "others": [], "reason": ""}
        artifact = make_artifact(root, "evaluate", fingerprint, stats={"metrics": {"s": exact, "t": exact}})
        rows = [
            {"key": f"s/{i:08d}", "turn": 0, "subset": "t" if subset == "t" else "s", "question": f"{i}?"}
            | {"references": ["yes"], "answer": "yes" if answer == "+" else "no", "pictures": [f"{i}"]}
            for i, (answer, subset) in enumerate(zip(answers, subsets or "s" * len(answers)))
        ]
        pq.write_table(pa.Table.from_pylist(rows, PREDICTIONS_SCHEMA), artifact.dir / PREDICTIONS)
        judged.evaluations.append(artifact)
        return make(answers.count("+") / len(answers), config=config, evaluation=fingerprint)

    judged.aliases, judged.evaluations = make.aliases, []
    return judged


def test_few_answers_make_no_champion(judge):
    reason = judge("+" * 9)
    assert reason == (
        "exact_match 1.0000 (1.00 to 1.00) of 9 answers, fewer than execution.registry.min_answers=10: candidate only; "
        "hold out more samples (convert.min_heldout)"
    )
    assert judge.aliases() == {"candidate": 1}
    assert judge("+" * 4, RegistryConfig(min_answers=4)).endswith("no champion before: champion")


def test_the_first_champion_has_a_score_surely_above_zero(judge):
    nothing = (
        "exact_match 0.0000 (0.00 to 0.00), no champion before, and the score is not surely above 0: candidate only"
    )
    assert judge("-" * 30) == nothing and judge.aliases() == {"candidate": 1}
    assert "not surely above 0: candidate only" in judge("+" + "-" * 29)
    assert re.fullmatch(r"exact_match 0\.6667 \(0\.[45]\d to 0\.8\d\), no .* before: champion", judge("++-" * 10))
    assert judge.aliases() == {"candidate": 3, "champion": 3}


def test_a_lead_that_may_be_chance_makes_no_champion(judge):
    judge("+" * 18 + "-" * 12)
    reason = judge("-" * 8 + "+" * 22)  # twelve answers are better, eight are worse
    assert re.search(
        r"0\.7333 \(0\.\d\d to 0\.\d\d\) against 0\.6000 of version 1: candidate only, the lead of 0\.1333 ", reason
    )
    assert re.search(r"may be chance \(-0\.1\d{3} to \+0\.[45]\d{3}\)$", reason)
    assert judge.aliases() == {"candidate": 2, "champion": 1}


def test_a_lead_on_the_same_questions_may_be_smaller_than_the_interval_of_the_score(judge):
    judge("+" * 18 + "-" * 12)
    reason = judge("+" * 24 + "-" * 6)  # six answers are better, none is worse
    assert reason.endswith("against 0.6000 of version 1: champion") and judge.aliases()["champion"] == 2
    for evaluation in judge.evaluations:
        (evaluation.dir / PREDICTIONS).unlink()
    reason = judge("+" * 28 + "-" * 2)
    assert re.search(r"candidate only, the lead of 0\.1333 is smaller than the interval of the score, 0\.1[67]", reason)
    assert judge("+" * 30).endswith("champion")  # an interval without width


def test_the_lead_of_any_score_of_answers_is_judged_and_of_others_the_margin_alone(judge):
    judge("+-" * 15, subsets="st" * 15)
    judge("--" * 15, subsets="st" * 15)
    first, second = judge.evaluations
    for name, count, value in [
        ("score", 30, 0.5),
        ("score/s", 15, 1),
        ("exact_match/t", 15, 0),
        ("exact_match", 30, 0.5),
    ]:
        ours, theirs = ScoredAnswers(first, name), ScoredAnswers(second, name)
        assert len(ours) == count and ours.interval(Bootstrap(resamples=50)).value == value, name
        assert ours.lead_over(theirs, Bootstrap(resamples=50)).difference == value, name
    for name in ("stop_rate", "cer", "exact_match/other"):
        assert ScoredAnswers(first, name).interval(Bootstrap()) is None
    assert judge("+-" * 15, RegistryConfig(metric="stop_rate")).startswith("stop_rate unknown")
