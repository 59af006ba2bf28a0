"""The comparison of an exported directory with the model that its training started from, by headers, small files and
the bytes of copied tensors.

Greedy answers do not change if the weights of a draft layer are lost or damaged, if weights are stored in another dtype
or if a tied matrix is stored twice. Other programs then fail, take twice the memory, or draft worse.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.shared.chat_format.prompt import BOX_FORMAT, SYSTEM_PROMPT
from stages.shared.inputs.model_directory import (
    WEIGHTS_INDEX,
    ModelDirectory,
    StoredTensor,
    end_ids,
    read_json,
    stored_tensors,
    tensor_digests,
)
from stages.shared.inputs.served import completed

_COMPARED = ("*.json", "*.jinja", "*.txt")
_NOT_COMPARED = (WEIGHTS_INDEX, SYSTEM_PROMPT, BOX_FORMAT)  # depend on the files and on the training
_FREE = {"dtype", "torch_dtype", "auto_map", "transformers_version"}
# The training's limits, and how it chose the frames of videos.
_PIXEL_LIMITS = {"size", "min_pixels", "max_pixels", "fps", "min_frames", "max_frames"}
_PIXEL_LIMITS |= {"cap_pixels_per_frame", "max_video_tokens"}
_OUTPUT = "lm_head.weight"


def differences(hf_dir: Path, source: ModelDirectory, copied: Collection[str] = ()) -> list[str]:
    """Return one line per difference that an export must not have; [] if there is none. `source` is the model
    that the training started from; `copied` are prefixes of the names of tensors that the export copies from it."""
    is_tied = source.shape.language.tie_word_embeddings
    ours, theirs = stored_tensors(hf_dir), source.tensors
    return [
        *_of_files(hf_dir, source.path),
        *_of_weights(ours, theirs, is_tied),
        *_of_bytes(ours, theirs, tuple(copied)),
    ]


def _of_files(hf_dir: Path, source: Path) -> Iterator[str]:
    for file in sorted({file for pattern in _COMPARED for file in source.glob(pattern)}):
        if file.name in _NOT_COMPARED or file.name.startswith(("manifest.", "report.")):
            continue
        copy = hf_dir / file.name
        if not copy.is_file():
            yield f"{file.name} is missing"
        elif file.suffix != ".json":
            if copy.read_bytes() != file.read_bytes():
                yield f"{file.name} is not the source's"
        else:
            free = _FREE | (_PIXEL_LIMITS if "process" in file.name else set())
            if file.name == "generation_config.json" and {*end_ids(source)} <= {*end_ids(hf_dir)}:
                free |= {"eos_token_id"}  # the export may add the end of the turns that were trained
            mine, wanted = read_json(copy), read_json(file)
            if file.name == "config.json":
                mine, wanted = completed(mine), completed(wanted)  # the export may add keys that vLLM reads
            ours, theirs = _flat(mine, free), _flat(wanted, free)
            for name in sorted(name for name in ours.keys() | theirs if ours.get(name, ...) != theirs.get(name, ...)):
                values = [json.dumps(each[name])[:60] if name in each else "absent" for each in (ours, theirs)]
                yield f"{file.name}: {name} is {values[0]}, in the source {values[1]}"


def _of_weights(ours: Mapping[str, StoredTensor], source: Mapping[str, StoredTensor], is_tied: bool) -> Iterator[str]:
    needed = {name for name in source if not (is_tied and name == _OUTPUT)}
    if missing := sorted(needed - ours.keys()):
        yield f"{len(missing)} tensors are missing, the first is {missing[0]}"
    if is_tied and _OUTPUT in ours:
        yield f"{_OUTPUT} is stored, although tie_word_embeddings makes it the embedding"
    if extra := sorted(ours.keys() - source.keys() - {_OUTPUT}):
        yield f"{len(extra)} tensors are not the source's, the first is {extra[0]}"
    for field in ("dtype", "shape"):
        pairs = {name: (getattr(ours[name], field), getattr(source[name], field)) for name in ours.keys() & source}
        if changed := sorted(name for name, (mine, theirs) in pairs.items() if mine != theirs):
            mine, theirs = pairs[changed[0]]
            yield f"{len(changed)} tensors have another {field}: {changed[0]} is {mine}, in the source {theirs}"


def _of_bytes(
    ours: Mapping[str, StoredTensor], source: Mapping[str, StoredTensor], prefixes: tuple[str, ...]
) -> Iterator[str]:
    alike = [name for name in ours.keys() & source if ours[name][1:] == source[name][1:]]  # dtype and shape
    names = sorted(name for name in alike if name.startswith(prefixes))
    digests = [tensor_digests({name: side[name].file for name in names}) for side in (ours, source)]
    if changed := [name for name in names if digests[0][name] != digests[1][name]]:
        yield f"{len(changed)} copied tensors have other bytes than the source's, the first is {changed[0]}"


def _flat(value: Any, free: set[str], prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> value of a JSON object, without the free fields."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {} if value or not prefix else {prefix: {}}
    for name, inner in value.items():
        if name not in free:
            flat |= _flat(inner, free, f"{prefix}.{name}" if prefix else name)
    return flat
