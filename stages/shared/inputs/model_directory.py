"""A Hugging Face model directory: its name resolved, opened and checked once, digested as a stage's input."""

import hashlib
import json
import math
import mmap
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open

from dataset_builders.contracts.manifest import fingerprint
from dataset_builders.errors import InputError, in_ascii, one_line
from dataset_builders.storage.files import read_object, write_json
from dataset_builders.storage.store import home_expanded, local_dir, location
from dataset_builders.videos.decode import decoder
from stages.shared.artifacts.artifact import Artifact, External, Input
from stages.shared.artifacts.verify import check_written, digest_once, state_of
from stages.shared.inputs.remote_code import check_remote_code
from trainer.contract.names import HF_EXPORT
from trainer.contract.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.contract.run import TrainConfig
from trainer.model.registry import model_of, read_config
from trainer.model.rules import stored_rules
from trainer.model.shape import ModelShape

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
PREPROCESSOR_CONFIG, PROCESSOR_CONFIG = "preprocessor_config.json", "processor_config.json"
VIDEO_PREPROCESSOR_CONFIG = "video_preprocessor_config.json"
# Field of processor_config.json -> the file that has the same settings alone.
_ALONE = {"image_processor": PREPROCESSOR_CONFIG, "video_processor": VIDEO_PREPROCESSOR_CONFIG}
GENERATION_CONFIG = "generation_config.json"
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


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file."""

    file: Path
    dtype: str  # in safetensors' spelling, as BF16
    shape: list[int]


class ModelDirectory:
    """A Hugging Face model directory that is open: its small files were read and checked, once.

    The constructor checks everything that tokens and pixels need; `check_weights` checks the rest.

    Attributes:
        path: the directory, on this machine.
        config: the content of config.json.
        family: the family that config.json names.
        shape: the sizes that config.json describes, without a training; see `ModelShape.for_training`.
        image_settings: file -> settings of the image processor in it; the file that transformers prefers comes first.
            Empty for a text-only model.
        video_settings: the same of the video processor. Empty for a model that reads no videos, or a copy without them.
        code_sha256: the hash of code that `check_weights` allowed.

    Raises:
        InputError: a file is missing, cannot be read, or describes a model that is not supported.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise InputError(f"model directory {path} does not exist")
        if not (path / "config.json").is_file():
            inner = path / HF_EXPORT
            way_out = f"give {inner}" if inner.is_dir() else "give the directory that `athanor run` prints after Model"
            if (path / ADAPTER_CONFIG).is_file():
                way_out = "it is an adapter: give its base model, and this directory as start_adapter or --adapter"
            raise InputError(f"{path} has no config.json, so it is not a Hugging Face model directory; {way_out}")
        self.path = path
        self._is_checked = False
        self.code_sha256: str | None = None
        self._read: dict[str, tuple[list[int], str]] = {}  # name -> state and SHA-256
        self.config = read_config(path)
        self.family, self.shape = model_of(self.config, path)
        if not ((path / "tokenizer.json").is_file() or all((path / n).is_file() for n in ("vocab.json", "merges.txt"))):
            raise InputError(
                f"{path} has no tokenizer (tokenizer.json, or vocab.json with merges.txt); copy the model's"
            )
        self.image_settings = read_settings(path, "image_processor")
        self.video_settings = read_settings(path, "video_processor")
        if self.family.image_processor is not None and not self.image_settings:
            raise InputError(f"{path} has no {PREPROCESSOR_CONFIG} (how pictures are scaled); copy the model's")
        tokenizer_config = path / "tokenizer_config.json"
        if not (
            any((path / name).is_file() for name in _TEMPLATE_FILES)
            or (tokenizer_config.is_file() and "chat_template" in read_json(tokenizer_config))
        ):
            raise InputError(
                f"{path} has no chat template (chat_template.jinja); take an -Instruct model or copy its file"
            )

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Name -> tensor in the files that `from_pretrained` reads, see `stored_tensors`."""
        return stored_tensors(self.path)

    def digests_of(self, names: Sequence[str]) -> tuple[dict[Path, list[int]], dict[str, str]]:
        """Return path -> state, see `state_of`, and name -> SHA-256 of files of the directory; each is read once."""
        unread = [name for name in names if name not in self._read]
        # The state first: a file that changes while it is read has another state afterwards.
        states = [state_of(self.path / name) for name in unread]
        with ThreadPoolExecutor(_HASHERS) as pool:
            digests = pool.map(lambda name: digest_once(self.path / name), unread)
            self._read |= zip(unread, zip(states, digests))
        return {self.path / name: self._read[name][0] for name in names}, {name: self._read[name][1] for name in names}

    def check_weights(self, code_sha256: str | None = None) -> None:
        """Check, without loading a weight, that all tensors exist, with a dtype that can be trained and the sizes in
        config.json; once. The directory may contain code if that has the hash `code_sha256` (see remote_code.py)."""
        if self._is_checked:
            return
        check_remote_code(self.path, code_sha256)
        for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            if (self.path / name).is_file():
                raise InputError(
                    f"{self.path / name} is an adapter's, beside the weights of a model, where some programs add it "
                    "and others do not; move it to a directory of its own (to give as start_adapter or --adapter), or "
                    "delete it"
                )
        language, numbers = self.shape.language, 0
        head = [language.vocab_size, language.hidden_size]
        for name, tensor in self.tensors.items():
            if tensor.dtype not in _DTYPES:
                raise InputError(
                    f"{tensor.file}: {in_ascii(name)} is of dtype {tensor.dtype}; only {', '.join(_DTYPES)} are trained"
                )
            is_twice = name == _TIED and language.tie_word_embeddings and tensor.shape == head
            numbers += 0 if is_twice or name.startswith(self.family.copied) else math.prod(tensor.shape)
        expected = sum(self.shape.parameters.values())
        if numbers != expected:
            raise InputError(
                f"{self.path}: its weights are {numbers:,} numbers, and the sizes in config.json make {expected:,}; "
                "take both from the same model, whole"
            )
        if language.tie_word_embeddings and _TIED in self.tensors:
            rules = self.family.weight_rules(self.shape)
            (embedding,) = next(rule.hf for rule in rules if rule.ours == "language.embedding.weight")
            digests = tensor_digests({name: self.tensors[name].file for name in (embedding, _TIED)})
            if digests[embedding] != digests[_TIED]:
                raise InputError(
                    f"{self.tensors[_TIED].file}: {_TIED} differs from {embedding}, and tie_word_embeddings in "
                    f"{self.path / 'config.json'} makes them one matrix; set tie_word_embeddings to false there, and "
                    "both are trained and exported"
                )
        self._is_checked, self.code_sha256 = True, code_sha256

    def check_mtp(self, shape: ModelShape) -> None:
        """Check that the directory has the tensors of multi-token prediction, if the training's shape has it."""
        if shape.language.mtp is None:
            return
        expected = [name for rule in stored_rules(shape.language.mtp.rules(), self.tensors) for name in rule.hf]
        if missing := [name for name in expected if name not in self.tensors]:
            raise InputError(
                f"{self.path} lacks {missing[0]}, which train.mtp_loss_scaling_factor trains; take the published "
                "weights (transformers' save_pretrained drops mtp.*), or set train.mtp_loss_scaling_factor=0"
            )

    def count_parameters(self) -> dict[str, int]:
        """Return part -> number of parameters, from the headers; a tied projection counts once."""
        family = self.family
        part_of = {name: family.part_of(rule.ours) for rule in family.weight_rules(self.shape) for name in rule.hf}
        counts = dict.fromkeys(family.parts, 0)
        for name, tensor in self.tensors.items():
            # A tensor that exports copy is not counted; one that the family does not know counts for the last part.
            if not name.startswith(family.copied):
                counts[part_of.get(name, family.parts[-1])] += math.prod(tensor.shape)
        return counts

    def count_copied(self, train: TrainConfig | None = None) -> dict[str, int]:
        """Return name prefix -> number of copied tensors. `train` is the training, which may compute some of
        them; None: it computes none."""
        shape = self.shape if train is None else self.shape.for_training(train)
        rules = stored_rules(self.family.weight_rules(shape), self.tensors)
        names = self.tensors.keys() - {name for rule in rules for name in rule.hf}
        counts = {prefix: sum(name.startswith(prefix) for name in names) for prefix in self.family.copied}
        return {prefix: count for prefix, count in counts.items() if count}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a model directory."""
    return read_object(path, "copy the model's own file again")


def read_settings(path: Path, processor: str) -> dict[Path, dict[str, Any]]:
    """Return `ModelDirectory.image_settings` of a directory, or its video_settings. `processor` is the field of
    processor_config.json: image_processor or video_processor."""
    whole, alone = path / PROCESSOR_CONFIG, path / _ALONE[processor]
    nested = read_json(whole).get(processor) if whole.is_file() else None
    if nested is not None and not isinstance(nested, dict):
        raise InputError(f"{whole}: {processor} is not an object; copy the model's own file again")
    return ({} if nested is None else {whole: nested}) | ({alone: read_json(alone)} if alone.is_file() else {})


def processor_input(model: ModelDirectory) -> External:
    """Return the input that determines tokens and pixels: tokenizer, template, preprocessor, and token ids."""
    path, config = model.path, model.config
    # If both files have the settings, these are equal.
    settings = [file.name for found in (model.image_settings, model.video_settings) for file in [*found][-1:]]
    names = [name for name in _PROCESSOR_FILES if (path / name).is_file()] + list(dict.fromkeys(settings))
    states, digests = model.digests_of(["config.json", *names])
    identity = {
        "files": {name: digests[name] for name in names},
        "ids": {key: value for key, value in config.items() if key.endswith("_token_id")},
        "model_type": config["model_type"],
        "vocab_size": model.shape.language.vocab_size,
    }
    if model.video_settings:  # other versions of the decoder may give other pixels
        identity["videos"] = decoder()
    return External(dir=path, name="processor", digest=fingerprint(identity), states=states, opened=model)


def model_input(model: ModelDirectory) -> External:
    """Return the whole model as an input: every file that `from_pretrained` may read, by its full SHA-256."""
    path = model.path
    names = {file.name for pattern in _MODEL_FILE_PATTERNS for file in path.glob(pattern) if file.is_file()}
    states, digests = model.digests_of(sorted(names))
    check_written(path)
    return External(dir=path, name="hf_dir", digest=fingerprint(digests), states=states, opened=model)


def opened_model(model: Input) -> ModelDirectory:
    """Return the open directory of a model or processor input. An external one was opened with the plan, unless this
    is another process."""
    found = model.opened if isinstance(model, External) else None
    return found if isinstance(found, ModelDirectory) else ModelDirectory(hf_dir_of(model))


def hf_dir_of(model: Input) -> Path:
    """Return the local HF directory of a model input: an external directory itself, or `hf/` of the artifact."""
    return local_dir(model.dir / HF_EXPORT if isinstance(model, Artifact) else model.dir)


def end_ids(hf_dir: Path) -> list[int]:
    """Return the ids of the tokens that end an answer where the directory is served; [] if it names none."""
    file = hf_dir / (GENERATION_CONFIG if (hf_dir / GENERATION_CONFIG).is_file() else "config.json")
    eos = generation_config(hf_dir).get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(type(each) is not int or each < 0 for each in ids):
        raise InputError(f"{file}: eos_token_id is {str(eos)[:80]}; give the id of a token, or a list of ids")
    return ids


def add_end(hf_dir: Path, end: int) -> bool:
    """Add a token to those that end an answer, and keep the others; return whether it was missing."""
    ids = end_ids(hf_dir)
    if end in ids:
        return False
    write_json(hf_dir / GENERATION_CONFIG, {**generation_config(hf_dir), "eos_token_id": [*ids, end]})
    return True


def generation_config(hf_dir: Path) -> dict[str, Any]:
    """Return generation_config.json, or else what transformers derives from config.json, as far as it names tokens."""
    if (hf_dir / GENERATION_CONFIG).is_file():
        return read_json(hf_dir / GENERATION_CONFIG)
    whole = read_json(hf_dir / "config.json")
    text = whole.get("text_config") or {}
    found = {
        name: text.get(name) if whole.get(name) is None else whole[name]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    return {name: value for name, value in found.items() if value is not None}


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return name -> tensor in the files that `from_pretrained` reads, from their headers.

    Raises:
        InputError: a file is missing or not whole, lacks a tensor that the index names, or holds one that another file
            holds too.
    """
    index, files = path / WEIGHTS_INDEX, {}  # name of a file -> its tensors according to the index
    if (path / WEIGHTS).is_file():
        files[WEIGHTS] = set()  # no index is read then, as in `from_pretrained`
    elif not index.is_file():
        raise InputError(f"{path} has no weights ({WEIGHTS} or {WEIGHTS_INDEX}); other formats are not read")
    else:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{index}: weight_map is not an object of tensors; copy the model's own file again")
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise InputError(
                    f"{index} says that {in_ascii(tensor)} is in '{in_ascii(name)}'; only *.safetensors beside the "
                    "index are read: put the file there and name it so"
                )
            files.setdefault(name, set()).add(tensor)
    found: dict[str, StoredTensor] = {}
    for name, expected in sorted(files.items()):
        file = path / name
        if not file.is_file():
            raise InputError(f"{index} names {in_ascii(name)}, which is missing; copy it too")
        header = safetensors_header(file)
        if missing := sorted(expected - header.keys()):
            raise InputError(
                f"{file} lacks {in_ascii(missing[0])} ({len(missing)} tensors of the index); copy it again"
            )
        if twice := sorted(found.keys() & header.keys()):
            raise InputError(
                f"{file} and {found[twice[0]].file.name} both hold {in_ascii(twice[0])}; copy the model's own files"
            )
        found |= {tensor: StoredTensor(file, entry["dtype"], entry["shape"]) for tensor, entry in header.items()}
    return found


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
