"""The directory that is given away: the export's files, its adapter, and MLflow's flavor beside them.

hf/           the files of the export, hard links on the same file system, else copies
hf/adapter/   the export's adapter, if it has one, with the name of its base model
MLmodel ...   see `flavor.py`
"""

import base64
import os
import shutil
from pathlib import Path

from dataset_builders.contracts.manifest import FileEntry
from dataset_builders.contracts.sample import IMAGE_SLOT
from dataset_builders.pictures.images import preview_png
from dataset_builders.storage.files import write_json
from dataset_builders.storage.store import local_dir
from stages.answer.heldout import heldout_samples
from stages.release.flavor import installed_versions, write_flavor
from stages.release.model_card import HUB_NAME
from stages.shared.artifacts.artifact import Artifact
from stages.shared.chat_format.text import slots_of
from stages.shared.inputs.model_directory import read_json
from trainer.contract.names import ADAPTER_EXPORT, HF_EXPORT
from trainer.contract.peft import ADAPTER_CONFIG

_EXAMPLE_SIDE = 128  # pixels of the input example's picture, at most
_QUESTION = "What is in the picture?"


def write_directory(
    work: Path, exported: Artifact, samples: Artifact, base_model: str | None, max_new_tokens: int
) -> list[FileEntry]:
    """Write everything but the card.

    Args:
        samples: the convert artifact; one of its held-out questions becomes MLflow's input example.
        base_model: hub name or directory of the base model; None: random weights.
        max_new_tokens: default limit of an answer in MLflow.

    Returns:
        the entries of the files that are known already, since the export has their digests.
    """
    hf_dir = work / HF_EXPORT
    shutil.rmtree(hf_dir, ignore_errors=True)
    hf_dir.mkdir()
    places = {HF_EXPORT: hf_dir}
    if "adapter" in exported.manifest.stats:
        places[ADAPTER_EXPORT] = hf_dir / ADAPTER_EXPORT
    known: list[FileEntry] = []
    entries = {entry.name: entry for entry in exported.manifest.files}
    for folder, place in places.items():
        place.mkdir(exist_ok=True)
        for file in sorted(local_dir(exported.dir / folder).iterdir()):
            name = f"{folder}/{file.name}"
            if file.name == ADAPTER_CONFIG:
                # A directory as the base model's name is useless on another machine; a hub name is not.
                is_name = base_model is not None and HUB_NAME.fullmatch(base_model)
                name_of_base = {"base_model_name_or_path": base_model if is_name else None}
                write_json(place / ADAPTER_CONFIG, {**read_json(file), **name_of_base})
            elif _link(file, place / file.name) and name in entries:
                known.append(entries[name].model_copy(update={"name": str((place / file.name).relative_to(work))}))
    write_flavor(work, installed_versions(), *_example(samples), max_new_tokens)
    return known


def _link(source: Path, target: Path) -> bool:
    """Create a hard link to a file that never changes; if that is impossible, copy the file and return False."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
        return False
    return True


def _example(samples: Artifact) -> tuple[str, list[str]]:
    """Return the first held-out question about one picture, and the picture in base64; without one, a plain one."""
    seen: set[str] = set()
    for sample in heldout_samples(samples, None):
        if sample.subset in seen:
            continue
        seen.add(sample.subset)
        question = sample.messages[0]
        # A question with boxes is passed over: its coordinates belong to the whole picture, not to this small one.
        if question.role == "user" and slots_of([question]) == [IMAGE_SLOT] and not question.boxes:
            picture = preview_png(sample.images[:1], _EXAMPLE_SIDE)
            return question.text, [base64.b64encode(picture).decode()]
    return _QUESTION, []
