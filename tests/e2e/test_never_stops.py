"""A model that was never trained to end its turn: its stop rate shows it, and the gate keeps it out of the registry.

The embedded recipe runs twice in one root, from the raw rows to the registry, with its own gate. In the first run, one
thing is really broken: tokenize leaves the end-of-turn tokens out of the loss mask. The second run is the control, with
the same settings and nothing broken. The stages before tokenize are made only once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from flows.cli.main import main
from flows.pipeline.recipe import load_recipe
from flows.tracking.registry import CANDIDATE, CHAMPION, REASON_TAG
from flows.tracking.store import connect
from stages.shared.chat_format.chat import ChatEncoder
from stages.tokenize import stage as tokenize_samples
from tests.e2e.command import own_process, sets
from tests.helpers.index import read_index

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise(
        "The gain over the model before training has a paired bootstrap interval, and gates keep a model out of "
        "the registry, one that never learnt to end its answers too, but not its sound twin."
    ),
]

NAME = "athanor-embedded"
SETTINGS = {
    "data.num_scans": 400,
    "data.num_multi": 0,
    "data.num_pairs": 0,
    "data.num_texts": 0,
    "train.num_steps": 60,
    "train.optim.warmup_steps": 10,
    "train.heldout_interval": 60,
    "evaluate.max_samples_per_subset": 40,
    "execution.num_workers": 1,  # tokenize runs in this process, where it is patched
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The results that a run has left."""

    run: Run
    index: list[dict[str, Any]]  # rows of the tokenized samples that it trained on
    answers: list[dict[str, Any]]  # rows of its predictions
    versions: dict[str, str]  # of the registry: version -> MLflow run that made it
    aliases: dict[str, str]

    @property
    def stop_rate(self) -> float:
        return self.run.data.metrics["stop_rate"]

    @property
    def reason(self) -> str:
        return self.run.data.tags[REASON_TAG]

    @property
    def share_read_right(self) -> float:
        """Return how many answers start right, whatever follows."""
        return np.mean([answer["answer"].startswith(answer["reference"]) for answer in self.answers])


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Iterator[Path]:
    """Return the root of both runs."""
    with own_process():
        yield tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def broken(root) -> Outcome:
    """Make the first run, in which no end-of-turn token has a loss."""
    with pytest.MonkeyPatch.context() as patch:
        leave_the_end_of_turn_out(patch)
        return run_recipe(root)


@pytest.fixture(scope="module")
def control(root, broken) -> Outcome:
    """Make the second run."""
    return run_recipe(root)


def leave_the_end_of_turn_out(patch: pytest.MonkeyPatch) -> None:
    """Break tokenize: both the mask and the check of the mask, which would otherwise stop the stage before its first
    shard."""
    whole = ChatEncoder._mask_answers

    def mask_answers(self, ids, messages):
        return np.where(ids == self.end_of_turn_id, 0, whole(self, ids, messages)).astype(np.uint8)

    patch.setattr(ChatEncoder, "_mask_answers", mask_answers)
    patch.setattr(ChatEncoder, "trained_text", lambda self, answer: self._normalize(answer.text.strip()))
    # Other bytes from the same input need another VERSION. Otherwise the control would reuse these artifacts.
    stage = tokenize_samples.STAGE
    patch.setattr(tokenize_samples, "STAGE", replace(stage, version=stage.version + 1000))


def run_recipe(root: Path) -> Outcome:
    client = connect(root)
    before = {run.info.run_id for run in mlflow_runs(client)}
    assert main(["run", "--root", str(root), *sets(SETTINGS)]) == 0
    (run,) = (run for run in mlflow_runs(client) if run.info.run_id not in before)
    models = client.search_registered_models(f"name='{NAME}'")
    return Outcome(
        run=run,
        index=read_index(made(root, run, "tokenize")).to_pylist(),
        answers=pq.read_table(made(root, run, "evaluate") / "predictions.parquet").to_pylist(),
        versions={str(v.version): v.run_id for v in client.search_model_versions(f"name='{NAME}'")},
        aliases={alias: str(version) for model in models for alias, version in model.aliases.items()},
    )


def mlflow_runs(client: MlflowClient) -> list[Run]:
    experiment = client.get_experiment_by_name(NAME)
    return [] if experiment is None else list(client.search_runs([experiment.experiment_id]))


def made(root: Path, run: Run, stage: str) -> Path:
    """Return the artifact of a stage that a run made."""
    return root / "artifacts" / stage / run.data.tags[f"mlflow.athanor.fingerprint.{stage}"]


def test_the_end_of_turn_is_all_that_is_left_out(broken, control):
    answers_of = {row["key"]: row["num_loss_tokens"] for row in control.index}
    assert {row["key"]: row["num_loss_tokens"] + 1 for row in broken.index} == answers_of and len(answers_of) == 400
    assert broken.run.data.params == control.run.data.params


def test_a_model_that_never_learnt_to_stop_is_caught_by_its_stop_rate(broken):
    answers, most = broken.answers, load_recipe("embedded").config.evaluate.max_new_tokens
    assert broken.stop_rate == np.mean([answer["stopped"] for answer in answers]) <= 0.1
    assert np.mean([answer["num_tokens"] == most for answer in answers]) >= 0.9
    # Nothing else is wrong with the model: its loss is low, and its answers start right.
    assert broken.run.data.metrics["final_heldout_loss"] < 1
    assert broken.share_read_right >= 0.8


def test_the_gate_keeps_it_out_of_the_registry(broken):
    assert broken.reason.startswith(f"not registered: stop_rate {broken.stop_rate:.4f} is below 0.9")
    assert broken.reason in broken.run.data.tags["mlflow.note.content"]
    assert broken.run.info.status == "FINISHED" and "mlflow.athanor.model_version" not in broken.run.data.tags
    assert broken.versions == broken.aliases == {}


def test_the_same_training_with_nothing_broken_stops_and_is_registered(broken, control):
    assert control.stop_rate == np.mean([answer["stopped"] for answer in control.answers]) >= 0.9
    assert control.share_read_right >= 0.8
    assert control.reason.endswith("no champion before: champion")
    assert control.versions == {"1": control.run.info.run_id} and control.run.info.run_id != broken.run.info.run_id
    assert control.aliases == {CANDIDATE: "1", CHAMPION: "1"}
