"""A reader of checkpoints that runs no code from them.

Three of the files of megatron-core 0.16.1's format are pickles, which can call any function when they are loaded:
`.metadata` (torch reads it with `pickle.load`), `common.pt` (`torch.load` with its default, which the environment
variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD turns off) and the objects in `*.distcp`, that is, RNG states and the extra
states of modules (`torch.load(weights_only=False)`). Importing this module replaces all three readers for the process:
the contents of our own checkpoints are read, and any other name in a pickle is refused before it is called. Tensors in
`*.distcp` are read with `weights_only=True` by torch itself.
"""

import io
import json
import pickle
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonLoadStrategy
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from trainer.contract.checkpoint import STATE_DIGESTS, digest_of
from trainer.libraries.megatron_private import replace_readers
from trainer.libraries.torch_private import EntryReader, set_in_nested

# Plain records and enumerations of torch, and constructors without side effects.
_METADATA_GLOBALS = {
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.planner": {
        *("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    },
}
_EMPTY_ARRAY = np.zeros(1, np.uint32)
# numpy's state of its generator, in the RNG states: the function that makes an array, its class and its dtype.
_OBJECT_GLOBALS = [_EMPTY_ARRAY.__reduce__()[0], np.ndarray, np.dtype, type(_EMPTY_ARRAY.dtype)]
_EXTRA_STATE = "_extra_state"


class CheckpointNotTrusted(CheckpointingException):
    """The error that a file of a checkpoint would call code that our checkpoints never call."""


class MetadataReader(EntryReader):
    """A reader of `.metadata` (the tensors' locations) as plain records, and of entries that match their digests."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None
        self._digests: dict[str, dict[str, str]] = {}

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = _read_metadata(Path(self.path) / ".metadata")
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_entry(self, file: BinaryIO, name: str, start: int, length: int) -> bytes:
        if name not in self._digests:
            self._digests[name] = _read_digests(Path(self.path) / (name + STATE_DIGESTS))
        file.seek(start)
        data = file.read(length)
        if digest_of(data) != self._digests[name].get(str(start)):
            raise CheckpointingException(f"{name}: the {length} bytes at {start} are not what was written")
        return data


class ObjectPlanner(MCoreLoadPlanner):
    """A planner that reads the objects among the tensors as plain data: numbers, strings, containers, tensors, numpy
    arrays."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        plain = load_plain(value, name)
        # Transformer Engine would unpickle a module's extra state itself. A resume needs nothing from it (float8 scales
        # each tensor by its own largest value, without a history), so no module gets any.
        if _EXTRA_STATE in name:
            plain = [None] * len(plain)
        set_in_nested(self.original_state_dict, self.mappings[name], plain)


class CommonState(TorchCommonLoadStrategy):
    """A reader of common.pt as plain data, whatever the environment variables are."""

    def load_common(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        try:
            return load_plain(Path(checkpoint_dir, COMMON_STATE_FNAME), COMMON_STATE_FNAME)
        except FileNotFoundError as error:
            raise CheckpointingException(f"{COMMON_STATE_FNAME} is missing") from error


def load_plain(file: Path | io.BytesIO, name: str) -> Any:
    """Load the object that `torch.save` wrote, if it is plain data.

    Raises:
        CheckpointNotTrusted: the file names a function or class that plain data does not need.
    """
    with torch.serialization.safe_globals(_OBJECT_GLOBALS):
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointNotTrusted(f"{name} is not plain data: {_unsupported(error)}") from error


def _enum_member(kind: type, name: str) -> Enum:
    """Replace `getattr`, with which early versions of Python 3.11 pickle a member of an enumeration."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise CheckpointNotTrusted(f".metadata asks for {name} of {kind!r}, which is not an enumeration")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if name in _METADATA_GLOBALS.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointNotTrusted(f".metadata names {module}.{name}, which no checkpoint of athanor does")


def _read_metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except CheckpointNotTrusted:
        raise
    except Exception as error:  # a pickle that is cut short or damaged may fail in any way
        raise CheckpointingException(f"{path.name} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointNotTrusted(f"{path.name} holds a {type(metadata).__name__}")
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    for place in metadata.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise CheckpointNotTrusted(f".metadata names the file {place.relative_path!r}, which is elsewhere")
    return metadata


def _read_digests(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointingException(f"{path.name} cannot be read: {error}") from error


def _unsupported(error: pickle.UnpicklingError) -> str:
    """Return the line of torch's long message that names the refused object."""
    naming = [line for line in str(error).splitlines() if "Unsupported" in line or "GLOBAL" in line]
    return (naming or str(error).splitlines())[0].strip().removeprefix("WeightsUnpickler error: ")


replace_readers(ObjectPlanner, MetadataReader)
