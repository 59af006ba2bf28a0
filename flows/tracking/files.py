"""The upload of artifacts' files to MLflow: small files as they are, the others by name, size and digest; also the
weights of a model.

A file that MLflow already lists with the same size is not sent again. If MLflow keeps its files on this machine, a file
is hard-linked where the file system allows that.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlparse

from dataset_builders.storage.store import StorePath, is_local, local_copy, walk_files
from flows.prefect_server.service_record import FILES_VARIABLE
from flows.tracking.config import ArtifactLevel
from flows.tracking.run_writer import RunWriter
from stages.artifacts.artifact import Artifact
from stages.release.flavor.mlmodel import FLAVOR_FILES
from trainer.contract.names import ADAPTER_EXPORT, HF_EXPORT, PROFILE

REFERENCES = "references.json"
SMALL_BYTES = 64 * 2**20  # largest size of one small file
_SLOWEST = 10e6  # bytes per second; a slower upload is given up
_SMALL_FOLDERS = ("", "logs", PROFILE, HF_EXPORT, ADAPTER_EXPORT)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")

Announce = Callable[[float], None]  # gets the number of seconds for which MLflow may not answer


def sizes_of(directory: StorePath) -> dict[str, int]:
    """Return name below the directory -> bytes for every file in it. A directory in a store is listed with one call."""
    if is_local(directory):
        return {str(file.relative_to(directory)): file.stat().st_size for file in walk_files(directory)}
    start, found = f"{directory.path.rstrip('/')}/", directory.fs.find(directory.path, detail=True)
    return {name.removeprefix(start): entry["size"] for name, entry in sorted(found.items())}


def chosen_files(artifact: Artifact, level: ArtifactLevel, sizes: Mapping[str, int]) -> list[str]:
    """Return the names of the files that are uploaded to MLflow as they are."""
    if level == "all":
        return list(sizes)
    chosen = {name for name in artifact.shown_files() if name in sizes}
    if level == "small":
        chosen |= {name for name, size in sizes.items() if _is_small(PurePosixPath(name), size)}
    return sorted(chosen)


def _is_small(name: PurePosixPath, size: int) -> bool:
    folder = "" if len(name.parts) == 1 else name.parts[0]
    return folder in _SMALL_FOLDERS and name.suffix not in _WEIGHTS and size <= SMALL_BYTES


def references(artifact: Artifact, place: str, sizes: Mapping[str, int], chosen: list[str]) -> str:
    """Return the text of references.json: the files that are not uploaded, each with its size, and with its SHA-256 if
    the manifest has it.

    Args:
        place: the address of the artifact's directory.
    """
    manifest = artifact.manifest
    digests = {entry.name: entry.sha256 for entry in (*manifest.shards, *manifest.files)}
    left = {name: {"bytes": sizes[name], "sha256": digests.get(name)} for name in sorted(sizes.keys() - set(chosen))}
    return json.dumps({"directory": place, "files": left}, indent=1) + "\n"


def send_stage(writer: RunWriter, artifact: Artifact, folder: str, names: list[str], announce: Announce) -> int:
    """Send the files of an artifact that the run lacks, and return their number.

    Args:
        folder: folder of the run's artifacts, in which the files get their names below the artifact's directory.
        names: names of the files.
    """
    client, sizes = writer.client, sizes_of(artifact.dir)
    wanted = {f"{folder}/{name}": sizes[name] for name in names}
    lacking, here = (
        _lacking(lambda path: client.list_artifacts(writer.run_id, path), wanted),
        _local(writer.artifact_uri),
    )
    for path in lacking:
        announce(wanted[path] / _SLOWEST)
        file = artifact.dir / path.removeprefix(f"{folder}/")
        if here is None or not _link(file, here / path):
            client.log_artifact(writer.run_id, str(local_copy(file)), str(PurePosixPath(path).parent))
    return len(lacking)


def send_model(client: Any, model_id: str, hf_dir: StorePath, level: ArtifactLevel, announce: Announce) -> int | None:
    """Give a logged model its files: MLflow's flavor, and hf/, a directory that transformers loads.

    Args:
        hf_dir: the hf/ of a release, whose parent has the files of the flavor.

    Returns:
        the bytes that were copied or uploaded now; None if the model's files stay where they are. They stay if they are
        in a store while MLflow keeps its files on this machine, or if the level is `references` and no hard link is
        possible.
    """
    here, sent = _local(client.get_logged_model(model_id).artifact_location), 0
    if not is_local(hf_dir) and (here is not None or level == "references"):
        return None
    release, folder = hf_dir.parent, f"{hf_dir.name}/"
    sizes = sizes_of(release)
    sizes = {name: size for name, size in sizes.items() if name.startswith(folder) or name in FLAVOR_FILES}
    for name in _lacking(lambda path: client.list_logged_model_artifacts(model_id, path), sizes):
        if here is not None and _link(release / name, here / name):
            continue
        if level == "references":
            return None
        announce(sizes[name] / _SLOWEST)
        folder = str(PurePosixPath(name).parent)
        client.log_model_artifact(model_id, str(local_copy(release / name)), None if folder == "." else folder)
        sent += sizes[name]
    return sent


def _local(address: str) -> Path | None:
    """Return the directory of this machine that an address of MLflow names; None if it names none."""
    parts = urlparse(address)
    if parts.scheme == "mlflow-artifacts" and (files := os.environ.get(FILES_VARIABLE)):
        return Path(files, parts.path.lstrip("/"))
    return Path(unquote(parts.path)) if parts.scheme in ("", "file") else None


def _lacking(list_folder: Callable[[str | None], Any], sizes: Mapping[str, int]) -> list[str]:
    """Return the paths that MLflow does not list with these sizes."""
    folders = {str(PurePosixPath(path).parent) for path in sizes}
    listed = [item for folder in folders for item in list_folder(None if folder == "." else folder)]
    there = {item.path: item.file_size for item in listed}
    return [path for path, size in sizes.items() if there.get(path) != size]


def _link(source: StorePath, target: Path) -> bool:
    """Hard-link a file that never changes. Return False if it is in a store or the file system cannot link it."""
    if not is_local(source):
        return False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        os.link(source.resolve(), target)
    except OSError:
        return False
    return True
