"""Publishes a run: adds to MLflow the content of its record and artifacts that MLflow lacks.

A stage, a model and scores are marked by a tag once they are complete. The times and steps of metrics come from files.
So publishing again adds exactly the missing content, whatever failed before.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from flows.tracking.store import check_own_database, connect, experiment_of, may_pass, store_digest, tracking_uri

# isort: split
from mlflow import MlflowClient
from mlflow.entities import Metric, Run

from dataset_builders.contracts.fingerprint import fingerprint, flatten
from dataset_builders.contracts.manifest import MANIFEST
from dataset_builders.storage.files import GrowingFile
from dataset_builders.storage.store import StorePath, local_copy, modified
from flows.libraries.mlflow_private import VIEW_TAG, first_view
from flows.tracking.files import REFERENCES, chosen_files, references, send_model, send_stage, sizes_of
from flows.tracking.notes import NOTE_TAG, experiment_note, run_note
from flows.tracking.record import (
    MlflowState,
    Registration,
    StageEntry,
    TrackedRun,
    error_line,
    find_place,
    live_path,
    load_record,
    now_ms,
    samples_path,
    save_learnt,
)
from flows.tracking.registry import MODEL_TAG, REASON_TAG, log_model, register_model, standing
from flows.tracking.run_writer import FINGERPRINT, HIDDEN, RunWriter, metric_name
from flows.tracking.system import CPU_METRIC, parse_samples
from flows.tracking.tables import (
    COMPARISON_TABLE,
    MAX_ANSWERS,
    PREDICTIONS_TABLE,
    dataset_input,
    gain_metrics,
    headline,
    log_answers,
    most_different,
    score_interval,
    training_figures,
    wrong_first,
)
from stages.artifacts.artifact import Artifact
from stages.evaluate.predictions import COMPARISON
from stages.scoring.names import flat_scores
from trainer.contract.answer import parse_metrics, read_metrics
from trainer.contract.names import METRICS_JSONL

IDENTITY_TAG, _CREATION_TAG = f"{HIDDEN}identity", f"{HIDDEN}creation"
_LOSS = "loss"  # a metric of every row of a training
RECIPE_YAML, EXECUTION_YAML = "recipe.yaml", "execution.yaml"
COMPARED_RUNS = 8
log = logging.getLogger("athanor.tracking")


class Publication:
    """The publication of one run. `run` may be called again and again. The owner must hold the run's `publish_lock`.

    Args:
        announce: function that is called before an upload with the seconds that the upload may take, and with 0
            whenever a part of the run is complete.

    Attributes:
        sent: kind of content that was added -> number.
    """

    def __init__(self, root: StorePath, key: str, announce: Callable[[float], None] = lambda seconds: None) -> None:
        self.root, self.key, self.announce = root, key, announce
        self.sent: Counter[str] = Counter()
        self.record: TrackedRun | None = None
        self._client: MlflowClient | None = None
        self._writer: RunWriter | None = None
        self._live: GrowingFile | None = None
        self._samples = GrowingFile(samples_path(root, key))
        self._headline_of: tuple[list[str], list[str]] = ([], [])  # directories of artifacts, and their figures
        self._files: dict[str, list[str]] = {}  # stage -> names of the files that the run holds

    def run(self) -> None:
        """Bring MLflow up to the newest revision of the record and the newest lines of metrics.

        Raises:
            InputError: the root's own database is ruined or cannot be written.
            Exception: another error of MLflow or this machine's disk that may be temporary. Nothing is lost.
        """
        self.record = record = load_record(self.root, self.key)
        try:
            is_open = record.learnt.store == store_digest(self.root) and self._writer is not None
            if record.is_empty():  # a run that is refused before its first stage leaves none in MLflow
                if record.is_waiting():
                    save_learnt(self.root, self.key, record.learnt.model_copy(update={"published": record.revision}))
            elif is_open and record.learnt.published == record.revision:
                self._live_rows()
            else:
                self._publish()
        except Exception:
            self._client = self._writer = None  # after a failure everything is read again
            check_own_database(self.root)
            raise

    def _publish(self) -> None:
        record, store = self.record, store_digest(self.root)
        if record.learnt.store != store:
            record.learnt, self._client = MlflowState(store=store), None
        self._client = self._client or connect(self.root)
        self._open(self._find_or_create())
        ids = {"run_id": self._writer.run_id, "experiment_id": self._writer.experiment_id}
        record.learnt = record.learnt.model_copy(update=ids)
        save_learnt(self.root, self.key, record.learnt)  # other processes can now link to the run's page
        refused = self._publish_parts()
        record.learnt = record.learnt.model_copy(update={"refused": refused, "published": record.revision})
        save_learnt(self.root, self.key, record.learnt)

    def _open(self, run: Run) -> None:
        before, self._writer = self._writer, RunWriter(self._client, run)
        if before is not None and before.run_id == self._writer.run_id:
            self._writer.steps = before.steps
        else:
            self._files, self._live = {}, None  # all lines are read again and compared with the run's
            self._samples = GrowingFile(samples_path(self.root, self.key))

    def _publish_parts(self) -> dict[str, str]:
        """Publish every part of the run. Return name -> reason for the parts that MLflow will never take."""
        refused: dict[str, str] = {}
        for name, part in self._parts():
            try:
                part()
                self.announce(0)
            except Exception as error:
                if may_pass(error):
                    raise
                refused[name] = error_line(error, 500)
                if refused[name] != self.record.learnt.refused.get(name):
                    log.warning("tracking: MLflow never takes %s (%s); the pipeline goes on", name, refused[name])
        return refused

    def _parts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "the recipe", self._recipe
        for name, entry in self.record.stages.items():
            yield f"stage {name}", partial(self._stage, name, entry)
        yield "metrics", self._live_rows
        if (registration := self.record.registration) is not None:
            yield "the model", partial(self._model, registration)
            yield "scores", partial(self._scores, registration)
        for name, entry in self.record.stages.items():
            yield f"files of {name}", partial(self._stage_files, name, entry)
        if registration is not None:
            yield "the registration", partial(self._register, registration)
        yield "the description", self._describe
        if self.record.status is not None:
            yield "the end", self._end

    def _count(self, what: str, number: int = 1) -> None:
        self.sent.update({what: number} if number else {})

    # --- the run ---

    def _find_or_create(self) -> Run:
        """Return the MLflow run of this identity, or make it. A run that failed or was killed is set to running."""
        client, record, opening = self._client, self.record, self.record.opening
        experiment_id = experiment_of(client, self.root, opening.experiment)
        same = f"tags.`{IDENTITY_TAG}` = '{opening.identity}'"
        runs = client.search_runs([experiment_id], same, max_results=1, order_by=["attributes.start_time ASC"])
        if not runs:
            marks = {IDENTITY_TAG: opening.identity, _CREATION_TAG: record.creation}
            return client.create_run(experiment_id, record.opened_ms, marks, opening.name)
        info = runs[0].info
        status = "RUNNING" if record.status is None and info.status != "FINISHED" else info.status
        if (status, opening.name) != (info.status, info.run_name):
            client.update_run(info.run_id, status, opening.name)
        return runs[0]

    def _recipe(self) -> None:
        writer, opening = self._writer, self.record.opening
        if not writer.is_marked("params", opening.identity):
            writer.log_params(flatten(opening.params))
            writer.client.log_text(writer.run_id, opening.recipe_yaml, RECIPE_YAML)
            writer.mark("params", opening.identity)
            self._count("recipe")
        mark = fingerprint({"execution": opening.execution_yaml})
        if opening.execution_yaml and not writer.is_marked("execution", mark):
            writer.client.log_text(writer.run_id, opening.execution_yaml, EXECUTION_YAML)
            writer.mark("execution", mark)
        writer.set_tags(opening.tags)

    def _describe(self) -> None:
        record, writer = self.record, self._writer
        stages = {name: (entry.dir, self._files_of(name)) for name, entry in record.stages.items()}
        scores = record.registration.scores if record.registration else {}
        record.learnt.verdict = self._verdict()
        note = run_note(record.opening.note, writer.page, stages, scores, writer.tags.get(REASON_TAG), self._headline())
        writer.set_tags({NOTE_TAG: note})

    def _headline(self) -> list[str]:
        """Return the score, the gain, the losses and the speed of this run, as far as they exist."""
        evaluated = self.record.registration and self.record.registration.evaluated
        places = [place for place in (evaluated, *(each.dir for each in self.record.stages.values())) if place]
        places = [place for place in places if (find_place(self.root, place) / MANIFEST).is_file()]
        if self._headline_of[0] != places:
            artifacts = {place: Artifact.load(find_place(self.root, place)) for place in places}
            self._headline_of = places, headline(artifacts.get(evaluated), list(artifacts.values()))
        return self._headline_of[1]

    def _verdict(self) -> str:
        """Return the decision on this run's model. If an earlier try decided it, return which model is champion now."""
        registration, tags = self.record.registration, self._writer.tags
        if registration is None or registration.refusals or self.record.learnt.decided_ms >= self.record.opened_ms:
            return tags.get(REASON_TAG, "")
        return standing(self._writer)

    def _files_of(self, stage: str) -> list[str]:
        """Return the names of a stage's files that the run holds."""
        if stage not in self._files:
            listed = self._writer.client.list_artifacts(self._writer.run_id, f"stages/{stage}")
            self._files[stage] = [Path(item.path).name for item in listed]
        return self._files[stage]

    def _end(self) -> None:
        """End the run: FINISHED, FAILED or KILLED. A run that was finished before keeps its times."""
        writer, record = self._writer, self.record
        if writer.status != "FINISHED" and (writer.status, writer.end_ms) != (record.status, record.ended_ms):
            seconds = (record.ended_ms - record.opened_ms) / 1e3
            writer.log_metrics([Metric(metric_name("flow_seconds"), seconds, record.ended_ms, 0)])
            writer.client.set_terminated(writer.run_id, record.status, record.ended_ms)
            self._count("end")
        self._drop_doubles()
        newest = self._comparable_runs()
        ids = [run.info.run_id for run in newest]
        if len(ids) > 1:
            note = experiment_note([run.info.run_name for run in newest], ids, writer.experiment_id)
            writer.client.set_experiment_tag(writer.experiment_id, NOTE_TAG, note)
            writer.client.set_experiment_tag(writer.experiment_id, VIEW_TAG, json.dumps(first_view()))
        record.learnt.compare = [other for other in ids if other != writer.run_id][:1]

    def _comparable_runs(self) -> list[Run]:
        """Return the newest finished runs on the same data, this run included; [] if this run has no samples yet."""
        samples = self.record.stages.get("convert")
        if samples is None:
            return []
        alike = f"attributes.status = 'FINISHED' AND tags.`{FINGERPRINT}convert` = '{samples.fingerprint}'"
        order = ["attributes.start_time DESC"]
        return self._writer.client.search_runs([self._writer.experiment_id], alike, 1, COMPARED_RUNS, order)

    def _drop_doubles(self) -> None:
        """Delete the extra runs that were made because the server answered too late. They carry the same mark."""
        mark = f"tags.`{_CREATION_TAG}` = '{self.record.creation}'"
        for run in self._writer.client.search_runs([self._writer.experiment_id], mark):
            if run.info.run_id != self._writer.run_id:
                self._writer.client.delete_run(run.info.run_id)

    # --- stages and metrics ---

    def _stage(self, name: str, entry: StageEntry) -> None:
        """Add a stage: its pages, its curves or differences, and a dataset of the run if the stage makes data."""
        writer, mark = self._writer, f"{FINGERPRINT}{name}"
        if writer.tags.get(mark) == entry.fingerprint:
            return
        artifact = Artifact.load(find_place(self.root, entry.dir))
        self._files[name] = artifact.shown_files()
        for file in self._files[name]:
            folder = "/".join(["stages", name, *Path(file).parent.parts])
            writer.client.log_artifact(writer.run_id, str(local_copy(artifact.dir / file)), folder)
        if (artifact.dir / METRICS_JSONL).is_file():
            self._training(artifact)
        if (artifact.dir / COMPARISON).is_file():
            self._comparison(artifact)
        if entry.dataset is not None:
            writer.client.log_inputs(writer.run_id, [dataset_input(artifact, entry.dataset)])
        # The mark is set last, so that a stage that was logged only in part is logged again.
        writer.set_tags({f"{HIDDEN}reused.{name}": str(entry.reused).lower(), mark: entry.fingerprint})
        self._count("stage")

    def _training(self, training: Artifact) -> None:
        """Add the rows that the live metrics have missed, and the headline figures of the complete training."""
        rows = read_metrics(training.dir)
        self._count("step", self._writer.log_rows(rows, _made_ms(training), _LOSS))
        if not rows:
            return
        moment, step = rows[-1].time_ms or _made_ms(training), rows[-1].step
        figures = training_figures(rows)
        self._writer.log_metrics([Metric(name, value, moment, step) for name, value in figures.items()])

    def _comparison(self, comparison: Artifact) -> None:
        """Add the gain over the model before training, with its interval, and a table of the largest differences."""
        writer, moment = self._writer, _made_ms(comparison)
        gains = gain_metrics(comparison.manifest.stats["subsets"])
        writer.log_metrics([Metric(name, value, moment, 0) for name, value in gains.items()])
        log_answers(writer.client, writer.run_id, COMPARISON_TABLE, most_different(comparison.dir, MAX_ANSWERS))

    def _model(self, registration: Registration) -> None:
        self._writer.set_tags({MODEL_TAG: log_model(self._writer, self.root, registration)})

    def _stage_files(self, name: str, entry: StageEntry) -> None:
        """Add the chosen files of a stage, and a list of the files that are not uploaded."""
        writer, level = self._writer, self.record.opening.artifacts
        mark, is_added = f"{entry.fingerprint} {level}", writer.tags.get(f"{FINGERPRINT}{name}") == entry.fingerprint
        if writer.is_marked(f"files.{name}", mark) or not is_added:
            return
        artifact, folder = Artifact.load(find_place(self.root, entry.dir)), f"stages/{name}"
        sizes = sizes_of(artifact.dir)
        chosen = chosen_files(artifact, level, sizes)
        self._count("file", send_stage(writer, artifact, folder, chosen, self._before_upload))
        if len(chosen) < len(sizes):
            text = references(artifact, entry.dir, sizes, chosen)
            writer.client.log_text(writer.run_id, text, f"{folder}/{REFERENCES}")
        writer.mark(f"files.{name}", mark)

    def _before_upload(self, seconds: float) -> None:
        """Add the newest training metrics, and announce how long the upload may take."""
        self._live_rows()
        self.announce(seconds)

    def _register(self, registration: Registration) -> None:
        """Give the model its files, and then register it, so that a version always has complete files."""
        writer, opening, learnt = self._writer, self.record.opening, self.record.learnt
        model_id, hf_dir = writer.tags[MODEL_TAG], find_place(self.root, registration.hf_dir)
        mark = f"{hf_dir.parent.name} {opening.artifacts}"
        if not registration.refusals and not writer.is_marked("model_files", mark):
            sent = send_model(writer.client, model_id, hf_dir, opening.artifacts, self._before_upload)
            if sent is not None:
                writer.mark("model_files", mark)
                learnt.model_bytes += sent
        source = f"models:/{model_id}"
        if not tracking_uri(self.root).startswith("http"):  # without a server MLflow cannot resolve that
            has_files = writer.is_marked("model_files", mark)
            source = writer.client.get_logged_model(model_id).artifact_location if has_files else hf_dir.parent.as_uri()
        if register_model(writer, self.root, registration, source, opening.registry):
            learnt.decided_ms = now_ms()
            self._count("model")

    def _scores(self, registration: Registration) -> None:
        """Add the scores of every subset (overall scores under bare names), and a table of answers, wrong first."""
        writer, evaluation = self._writer, Artifact.load(find_place(self.root, registration.evaluated))
        if writer.is_marked("scores", evaluation.manifest.fingerprint):
            return
        about = {}
        if model_id := writer.tags.get(MODEL_TAG):
            samples = evaluation.manifest.parents["samples"]
            about = {"model_id": model_id, "dataset_name": samples.name, "dataset_digest": samples.fingerprint}
        moment, scores = _made_ms(evaluation), flat_scores(registration.scores)
        scores |= score_interval(evaluation)
        writer.log_metrics([Metric(name, value, moment, 0, **about) for name, value in scores.items()])
        log_answers(writer.client, writer.run_id, PREDICTIONS_TABLE, wrong_first(evaluation.dir, MAX_ANSWERS))
        writer.mark("scores", evaluation.manifest.fingerprint)
        self._count("score table")

    def _live_rows(self) -> None:
        """Add the new lines of the running training's metrics.jsonl, and the new samples of its machine."""
        writer, default_ms, path = self._writer, self.record.changed_ms, live_path(self.root, self.record)
        if path is None:
            return
        if self._live is None or self._live.path != path:
            self._live = GrowingFile(path)
        self._count("step", writer.log_rows(parse_metrics(self._live.new_lines()), default_ms, _LOSS))
        self._live.take()
        if not writer.steps.get(_LOSS) and self.record.status is None:
            return  # MLflow's compare page begins with the first metric that a run got
        samples = parse_samples(self._samples.new_lines())
        self._count("machine sample", writer.log_rows(samples, default_ms, CPU_METRIC))
        self._samples.take()


def _made_ms(artifact: Artifact) -> int:
    """Return the time at which an artifact was made, in milliseconds since 1970. Used for metrics without a time."""
    return int(modified(artifact.dir / MANIFEST) * 1000)
