"""A Hugging Face model directory: find it, say in one line what is wrong with it, digest it, count its parameters."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from dataset_builders.contracts.errors import InputError
from dataset_builders.contracts.files import sha256_file
from dataset_builders.contracts.fingerprint import fingerprint
from dataset_builders.contracts.store import local_dir, location
from stages.artifact import External
from stages.remote_code import check_remote_code

SUPPORTED_MODEL_TYPES = ("qwen3_vl",)
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_PROCESSOR_FILES = (*_TOKENIZER_FILES, *_TEMPLATE_FILES, "tokenizer_config.json", "preprocessor_config.json")
_MODEL_FILE_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.safetensors"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_hf_dir(name_or_path: str) -> Path:
    """A directory for a local path, an object-store URL or a hub name; what is not here is downloaded, or in a cache.

    Raises:
        InputError: neither a directory here nor a hub name that can be downloaded now.
    """
    if "://" in name_or_path:
        return local_dir(location(name_or_path))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path.resolve()
    if not _HUB_NAME.fullmatch(name_or_path):
        raise InputError(f"model {name_or_path!r} is no directory here and no hub name like Qwen/Qwen3-VL-2B-Instruct")
    try:
        return Path(huggingface_hub.snapshot_download(name_or_path, allow_patterns=_MODEL_FILE_PATTERNS))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise InputError(
            f"model {name_or_path!r} is no directory here, and the hub has none of that name that you may read; "
            "check the spelling, or log in with `hf auth login`"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise InputError(
            f"model {name_or_path!r} is no directory here, and the hub cannot be reached ({type(error).__name__}); "
            "download it on a machine that can (`hf download NAME --local-dir DIR`) and give that directory"
        ) from error


def check_hf_dir(path: Path, code_sha256: str | None = None) -> dict[str, Any]:
    """See that a directory holds everything the pipeline needs, without loading a weight.

    Args:
        code_sha256: of the code that the directory may bring (see stages/remote_code.py); None: it may bring none.

    Returns:
        config.json, parsed.

    Raises:
        InputError: for the first thing that is missing, unreadable, code, or of an unsupported architecture.
    """
    config = check_processor_files(path)
    check_remote_code(path, code_sha256)
    _check_weights(path)
    return config


def check_processor_files(path: Path) -> dict[str, Any]:
    """The part of `check_hf_dir` that is not about weights: what tokens and pixels need.

    Returns:
        config.json, parsed.

    Raises:
        InputError: for the first thing that is missing, unreadable or of an unsupported architecture.
    """
    config = read_model_config(path)
    if not ((path / "tokenizer.json").is_file() or all((path / n).is_file() for n in ("vocab.json", "merges.txt"))):
        raise InputError(f"{path} has no tokenizer (tokenizer.json, or vocab.json with merges.txt); copy the model's")
    if not (path / "preprocessor_config.json").is_file():
        raise InputError(f"{path} has no preprocessor_config.json (how pictures are scaled); copy the model's")
    if not any((path / n).is_file() for n in _TEMPLATE_FILES) and "chat_template" not in _tokenizer_config(path):
        raise InputError(f"{path} has no chat template (chat_template.jinja); take an -Instruct model or copy its file")
    return config


def read_model_config(path: Path) -> dict[str, Any]:
    """config.json of a directory whose architecture is supported.

    Raises:
        InputError: no directory, no config.json, or another architecture.
    """
    if not path.is_dir():
        raise InputError(f"model directory {path} does not exist")
    if not (path / "config.json").is_file():
        raise InputError(f"{path} has no config.json: it is no Hugging Face model directory")
    config = read_json(path / "config.json")
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise InputError(
            f"{path / 'config.json'}: model_type is {model_type!r}; supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    return config


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model directory.

    Raises:
        InputError: the file is no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}); copy the model's own file again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a {type(value).__name__}, not an object; copy the model's own file again")
    return value


def processor_input(path: Path) -> External:
    """What decides tokens and pixels: tokenizer, template, preprocessor, and the token ids config.json gives."""
    config = read_model_config(path)
    ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
    identity = {
        "files": _digests(path, (n for n in _PROCESSOR_FILES if (path / n).is_file())),
        "ids": ids,
        "model_type": config["model_type"],
        "vocab_size": config.get("text_config", config).get("vocab_size"),
    }
    return External(dir=path, name="processor", digest=fingerprint(identity))


def model_input(path: Path) -> External:
    """The whole model: every file that `from_pretrained` may read, weights by their full SHA-256."""
    names = {file.name for pattern in _MODEL_FILE_PATTERNS for file in path.glob(pattern) if file.is_file()}
    return External(dir=path, name="hf_dir", digest=fingerprint(_digests(path, sorted(names))))


def count_parameters(path: Path) -> dict[str, int]:
    """Parameters of the vision encoder, of the mergers (deepstack's too) and of the language model.

    Read from the headers of the safetensors files; a tied output projection is counted once.
    """
    counts = {"vision": 0, "merger": 0, "language": 0}
    for file in sorted(path.glob("*.safetensors")):
        for name, entry in safetensors_header(file).items():
            counts[_part(name)] += math.prod(entry["shape"])
    return counts


def safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape, data_offsets} of one file.

    Raises:
        InputError: the file is cut short or is none.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        raw = file.read(length) if 8 + length <= size else b""
    try:
        header = json.loads(raw)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is no whole safetensors file ({size} bytes); copy it again") from error
    header.pop("__metadata__", None)
    wanted = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != wanted:
        raise InputError(f"{path} has {size} bytes, its header promises {wanted}; copy it again")
    return header


def _part(name: str) -> str:
    if "visual.merger." in name or "visual.deepstack_merger_list." in name:
        return "merger"
    return "vision" if "visual." in name else "language"


def _check_weights(path: Path) -> None:
    if (path / WEIGHTS).is_file():
        safetensors_header(path / WEIGHTS)
        return
    if not (path / WEIGHTS_INDEX).is_file():
        raise InputError(f"{path} has no weights ({WEIGHTS} or {WEIGHTS_INDEX}); other formats are not read")
    files: dict[str, set[str]] = {}
    for tensor, name in read_json(path / WEIGHTS_INDEX).get("weight_map", {}).items():
        files.setdefault(name, set()).add(tensor)
    for name, tensors in sorted(files.items()):
        if not (path / name).is_file():
            raise InputError(f"{path / WEIGHTS_INDEX} names {name}, which is missing; copy it too")
        missing = sorted(tensors - safetensors_header(path / name).keys())
        if missing:
            raise InputError(f"{path / name} lacks {missing[0]} ({len(missing)} tensors of the index); copy it again")


def _tokenizer_config(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def _digests(path: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: sha256_file(path / name) for name in names}
