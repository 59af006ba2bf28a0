"""A Hugging Face model directory: resolve its name, check it, digest it, count its parameters."""

import hashlib
import json
import math
import mmap
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open

from dataset_builders.contracts.fingerprint import fingerprint
from dataset_builders.errors import InputError, in_ascii, one_line
from dataset_builders.storage.files import read_object
from dataset_builders.storage.store import home_expanded, local_dir, location
from stages.artifacts.artifact import Artifact, External, Input
from stages.artifacts.intact import check_written
from stages.artifacts.unchanged import digest_once, state_of
from stages.inputs.remote_code import check_remote_code
from trainer.contract.names import HF_EXPORT
from trainer.contract.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.model.family import Family
from trainer.model.registry import read_model
from trainer.model.rules import stored_rules
from trainer.model.shape import ModelShape

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
PREPROCESSOR_CONFIG, PROCESSOR_CONFIG = "preprocessor_config.json", "processor_config.json"
_PROCESSOR_FILES = (*_TOKENIZER_FILES, *_TEMPLATE_FILES, "tokenizer_config.json")
_MODEL_FILE_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.safetensors"]
_HASHERS = 4  # files read at a time
_DTYPES = ("F32", "BF16", "F16")  # dtypes of weights that can be trained
_TIED = "lm_head.weight"  # some directories store the tied weight twice
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_hf_dir(name_or_path: str, field: str = "model") -> Path:
    """Return the local directory for a local path, an object-store URL or a hub name; download it if necessary. `field`
    is the config field that names the model, for messages."""
    if "://" in name_or_path:
        check_written(location(name_or_path))
        return local_dir(location(name_or_path))
    path = home_expanded(name_or_path)
    if path.is_dir():
        return path.resolve()
    if not _HUB_NAME.fullmatch(name_or_path):
        raise InputError(
            f"{field} {name_or_path!r} is not a directory here, nor a hub name like Qwen/Qwen3-VL-2B-Instruct"
        )
    try:
        return Path(huggingface_hub.snapshot_download(name_or_path, allow_patterns=_MODEL_FILE_PATTERNS))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise InputError(
            f"{field} {name_or_path!r} is not a directory here, and the hub has no model of that name that you may "
            "read; check the spelling, or log in with `hf auth login`"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise InputError(
            f"{field} {name_or_path!r} is not a directory here, and the hub cannot be reached "
            f"({type(error).__name__}); download it on a machine that can (`hf download NAME --local-dir DIR`) and "
            "give that directory"
        ) from error


def check_hf_dir(path: Path, code_sha256: str | None = None) -> None:
    """Check that a directory has everything that the pipeline needs, without loading a weight. It may contain code if
    that has the hash `code_sha256` (see remote_code.py)."""
    check_processor_files(path)
    check_remote_code(path, code_sha256)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if (path / name).is_file():
            raise InputError(
                f"{path / name} is an adapter's, beside the weights of a model, where some programs add it and others "
                "do not; move it to a directory of its own (to give as start_adapter or --adapter), or delete it"
            )
    _check_weights(path, *read_model(path))


def check_processor_files(path: Path) -> None:
    """Check that a directory has everything that tokens and pixels need."""
    if not path.is_dir():
        raise InputError(f"model directory {path} does not exist")
    if not (path / "config.json").is_file():
        inner = path / HF_EXPORT
        way_out = f"give {inner}" if inner.is_dir() else "give the directory that `athanor run` prints after Model"
        if (path / ADAPTER_CONFIG).is_file():
            way_out = "it is an adapter: give its base model, and this directory as start_adapter or --adapter"
        raise InputError(f"{path} has no config.json, so it is not a Hugging Face model directory; {way_out}")
    family, _ = read_model(path)
    if not ((path / "tokenizer.json").is_file() or all((path / n).is_file() for n in ("vocab.json", "merges.txt"))):
        raise InputError(f"{path} has no tokenizer (tokenizer.json, or vocab.json with merges.txt); copy the model's")
    if family.image_processor is not None and not image_settings(path):
        raise InputError(f"{path} has no {PREPROCESSOR_CONFIG} (how pictures are scaled); copy the model's")
    tokenizer_config = path / "tokenizer_config.json"
    if not (
        any((path / name).is_file() for name in _TEMPLATE_FILES)
        or (tokenizer_config.is_file() and "chat_template" in read_json(tokenizer_config))
    ):
        raise InputError(f"{path} has no chat template (chat_template.jinja); take an -Instruct model or copy its file")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model directory."""
    return read_object(path, "copy the model's own file again")


def image_settings(path: Path) -> dict[Path, dict[str, Any]]:
    """Return file -> settings of the image processor in it; the file that transformers prefers comes first. Empty for a
    text-only model."""
    whole, alone = path / PROCESSOR_CONFIG, path / PREPROCESSOR_CONFIG
    nested = read_json(whole).get("image_processor") if whole.is_file() else None
    if nested is not None and not isinstance(nested, dict):
        raise InputError(f"{whole}: image_processor is not an object; copy the model's own file again")
    return ({} if nested is None else {whole: nested}) | ({alone: read_json(alone)} if alone.is_file() else {})


def processor_input(path: Path) -> External:
    """Return the input that determines tokens and pixels: tokenizer, template, preprocessor, and token ids."""
    _, shape = read_model(path)
    config = read_json(path / "config.json")
    ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    # If both files have settings, these are equal.
    names = [n for n in _PROCESSOR_FILES if (path / n).is_file()] + [f.name for f in [*image_settings(path)][-1:]]
    states = {path / name: state_of(path / name) for name in ("config.json", *names)}
    identity = {
        "files": _digests(path, names),
        "ids": ids,
        "model_type": config["model_type"],
        "vocab_size": shape.language.vocab_size,
    }
    return External(dir=path, name="processor", digest=fingerprint(identity), states=states)


def model_input(path: Path) -> External:
    """Return the whole model as an input: every file that `from_pretrained` may read, by its full SHA-256."""
    names = {file.name for pattern in _MODEL_FILE_PATTERNS for file in path.glob(pattern) if file.is_file()}
    states = {path / name: state_of(path / name) for name in names}
    digests = _digests(path, sorted(names))
    check_written(path)
    return External(dir=path, name="hf_dir", digest=fingerprint(digests), states=states)


def count_parameters(path: Path) -> dict[str, int]:
    """Return part -> number of parameters of a directory's model, from its headers; a tied projection counts once."""
    family, shape = read_model(path)
    part_of = {name: family.part_of(rule.ours) for rule in family.weight_rules(shape) for name in rule.hf}
    counts = dict.fromkeys(family.parts, 0)
    for file in weight_files(path):
        for name, entry in safetensors_header(path / file).items():
            # A tensor that exports copy is not counted; one that the family does not know counts for the last part.
            if not name.startswith(family.copied):
                counts[part_of.get(name, family.parts[-1])] += math.prod(entry["shape"])
    return counts


def check_mtp_tensors(path: Path, shape: ModelShape) -> None:
    """Check that a directory has the tensors of multi-token prediction, if the shape trains it."""
    if shape.language.mtp is None:
        return
    names = {name for file in weight_files(path) for name in safetensors_header(path / file)}
    expected = [name for rule in stored_rules(shape.language.mtp.rules(), names) for name in rule.hf]
    if missing := [name for name in expected if name not in names]:
        raise InputError(
            f"{path} lacks {missing[0]}, which train.mtp_loss_scaling_factor trains; take the published weights "
            "(transformers' save_pretrained drops mtp.*), or set train.mtp_loss_scaling_factor=0"
        )


def safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return tensor name -> {dtype, shape} of one file, without loading a weight; InputError if it is not whole."""
    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in sorted(file.keys())}
            return {name: {"dtype": s.get_dtype(), "shape": s.get_shape()} for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a whole safetensors file ({one_line(error)}); copy it again") from error


def tensor_digests(paths: Mapping[str, Path]) -> dict[str, bytes]:
    """Return name -> SHA-256 of the tensor's bytes, from name -> its safetensors file."""
    digests = {}
    for path in sorted(set(paths.values())):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            start = 8 + int.from_bytes(data[:8], "little")
            header = json.loads(data[8:start])
            for name in (name for name, its in paths.items() if its == path):
                first, last = header[name]["data_offsets"]
                with memoryview(data) as view, view[start + first : start + last] as part:
                    digests[name] = hashlib.sha256(part).digest()
    return digests


def weight_files(path: Path) -> list[str]:
    """Return the names of the weight files, in order: the files that `from_pretrained` reads."""
    return sorted(_tensors_of(path))


def _tensors_of(path: Path) -> dict[str, set[str]]:
    """Return file -> its tensors according to the index; an empty set for a single file."""
    index = path / WEIGHTS_INDEX
    if (path / WEIGHTS).is_file():
        return {WEIGHTS: set()}
    if not index.is_file():
        raise InputError(f"{path} has no weights ({WEIGHTS} or {WEIGHTS_INDEX}); other formats are not read")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index}: weight_map is not an object of tensors; copy the model's own file again")
    files: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise InputError(
                f"{index} says that {in_ascii(tensor)} is in '{in_ascii(name)}'; only *.safetensors beside the index "
                "are read: put the file there and name it so"
            )
        files.setdefault(name, set()).add(tensor)
    return files


def _check_weights(path: Path, family: Family, shape: ModelShape) -> None:
    """Check the headers: all tensors exist, with a dtype that can be trained and the sizes in config.json."""
    numbers, head = 0, [shape.language.vocab_size, shape.language.hidden_size]
    places: dict[str, Path] = {}
    for name, tensors in sorted(_tensors_of(path).items()):
        if not (path / name).is_file():
            raise InputError(f"{path / WEIGHTS_INDEX} names {in_ascii(name)}, which is missing; copy it too")
        header = safetensors_header(path / name)
        missing = sorted(tensors - header.keys())
        if missing:
            raise InputError(
                f"{path / name} lacks {in_ascii(missing[0])} ({len(missing)} tensors of the index); copy it again"
            )
        for tensor, entry in header.items():
            if entry["dtype"] not in _DTYPES:
                known = ", ".join(_DTYPES)
                raise InputError(
                    f"{path / name}: {in_ascii(tensor)} is of dtype {entry['dtype']}; only {known} are trained"
                )
            places[tensor] = path / name
            is_twice = tensor == _TIED and shape.language.tie_word_embeddings and entry["shape"] == head
            numbers += 0 if is_twice or tensor.startswith(family.copied) else math.prod(entry["shape"])
    expected = sum(shape.parameters.values())
    if numbers != expected:
        raise InputError(
            f"{path}: its weights are {numbers:,} numbers, and the sizes in config.json make {expected:,}; take both "
            "from the same model, whole"
        )
    if shape.language.tie_word_embeddings and _TIED in places:
        (embedding,) = next(rule.hf for rule in family.weight_rules(shape) if rule.ours == "language.embedding.weight")
        digests = tensor_digests({name: places[name] for name in (embedding, _TIED)})
        if digests[embedding] != digests[_TIED]:
            raise InputError(
                f"{places[_TIED]}: {_TIED} differs from {embedding}, and tie_word_embeddings in {path / 'config.json'} "
                "makes them one matrix; set tie_word_embeddings to false there, and both are trained and exported"
            )


def _digests(path: Path, names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    with ThreadPoolExecutor(_HASHERS) as pool:
        return dict(zip(names, pool.map(lambda name: digest_once(path / name), names)))


def hf_dir_of(model: Input) -> Path:
    """Return the local HF directory of a model input: an external directory itself, or `hf/` of the artifact."""
    return local_dir(model.dir / HF_EXPORT if isinstance(model, Artifact) else model.dir)
