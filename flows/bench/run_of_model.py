"""The finished run that made a model: its model before training, its held-out samples and its evaluation."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from dataset_builders.errors import InputError
from dataset_builders.storage.store import StorePath, absolute, is_local, local_dir, location
from flows.tracking.record import TrackedRun, find_place, load_record, records_dir
from stages.artifacts.artifact import Artifact
from stages.inputs.hf_directory import hf_dir_of, resolve_hf_dir
from trainer.contract.names import HF_EXPORT

_EMBEDDED = "embedded_model"
_WITH_MODEL = ("release", "export")  # stages whose artifacts hold the trained model


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOfModel:
    """A run that trained and scored a model.

    Attributes:
        key: the run's key for `Tracker`.
        hf_dir: directory of the trained model.
        base_dir: directory of the model before training.
        samples, evaluated: the artifacts with the held-out samples and with our own evaluation of the trained model.
        max_new_tokens: number of tokens after which our own evaluation cuts an answer.
    """

    key: str
    record: TrackedRun
    hf_dir: Path
    base_dir: Path
    samples: Artifact
    evaluated: Artifact
    max_new_tokens: int


def run_of_model(model: str, root: StorePath) -> RunOfModel | None:
    """Return the newest run of a root whose trained model is in this directory; None if no run made it.

    Args:
        model: directory of the model or of the artifact that holds it, as `athanor run` prints it.

    Raises:
        InputError: the run is not finished, or its model before training no longer exists.
    """
    wanted = _resolved(location(model))
    runs = [(record.opened_ms, key, record) for key, record in _records(root) if wanted in _places(root, record)]
    if not runs:
        return None
    _, key, record = max(runs, key=lambda run: run[:2])
    missing = [name for name in ("convert", "evaluate", "release") if name not in record.stages]
    if missing:
        raise InputError(f"{model} is of a run without {missing[0]}; `athanor run` with the same recipe finishes it")
    settings = yaml.safe_load(record.opening.recipe_yaml)
    artifacts = {name: Artifact.load(find_place(root, entry.dir)) for name, entry in record.stages.items()}
    base = settings["model"]
    return RunOfModel(
        key=key,
        record=record,
        hf_dir=local_dir(artifacts["release"].dir / HF_EXPORT),
        base_dir=resolve_hf_dir(base) if isinstance(base, str) else hf_dir_of(artifacts[_EMBEDDED]),
        samples=artifacts["convert"],
        evaluated=artifacts["evaluate"],
        max_new_tokens=settings["evaluate"]["max_new_tokens"],
    )


def _records(root: StorePath) -> Iterator[tuple[str, TrackedRun]]:
    for path in records_dir(root).glob("*.json"):
        try:
            yield path.stem, load_record(root, path.stem)
        except (OSError, ValueError):  # `athanor sync` reports records that cannot be read
            continue


def _places(root: StorePath, record: TrackedRun) -> set[str]:
    directories = [find_place(root, record.stages[name].dir) for name in _WITH_MODEL if name in record.stages]
    return {_resolved(place) for directory in directories for place in (directory, directory / HF_EXPORT)}


def _resolved(path: StorePath) -> str:
    path = absolute(path)
    return str(Path(str(path)).resolve()) if is_local(path) else str(path).rstrip("/")
