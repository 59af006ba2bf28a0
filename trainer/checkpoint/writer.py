"""The writer of a rank's file of a checkpoint, on a separate thread while training continues.

megatron-core 0.16.1 plans the contents of a rank's file. Its own writer forks a process per file and a manager process,
which can end a run: they wait forever for a killed process, or die at the SIGTERM that tells a job to stop and save. A
thread avoids this. It holds Python's lock for a tenth of a millisecond per tensor; writing to the disk, digests and
waiting for the disk happen without the lock.
"""

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, SerializationFormat
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dataset_builders.storage.files import write_json
from trainer.contract.checkpoint import STATE_DIGESTS
from trainer.libraries.megatron_private import replace_writer
from trainer.libraries.torch_private import write_entry

_CHUNK = 64 << 20  # bytes between two checks of whether to stop

# torch ignores these checksums when it reads, and they take as long as the disk (1.6 GB/s). Instead each entry's xxh3
# (16 GB/s) is in `__0_0.distcp.xxh3` of the same directory, and is compared when the entry is read.
torch.serialization.set_crc32_options(False)


class WritingEnded(Exception):
    """The error that the writer was told to stop before it had written everything."""


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of a rank's write: megatron-core's results, and the number of bytes."""

    results: list[WriteResult]
    size: int


class RankFile(FileSystemWriterAsync):
    """The plan of this rank's file; `write` writes the file.

    Attributes:
        tensors: the tensors of the file, as views of the training's own tensors on their device.
        written: the outcome; to be set after `write`, before megatron-core asks for the results.
    """

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Take the plan of the file; megatron-core calls this when it plans."""
        self._name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        data = [(item, planner.resolve_data(item)) for item in plan.items]
        self._objects = [entry for entry in data if entry[0].type == WriteItemType.BYTE_IO]
        self._items = [item for item, _ in data if item.type != WriteItemType.BYTE_IO]
        self.tensors: list[torch.Tensor] = [t.detach() for item, t in data if item.type != WriteItemType.BYTE_IO]
        self.written: Written | None = None

    def get_save_function_and_args(self) -> tuple[None, None, list]:
        """Return no function, so that megatron-core itself writes nothing."""
        return None, None, []

    def retrieve_write_results(self) -> list[WriteResult]:
        return self.written.results

    def write(self, tensors: Iterable[torch.Tensor], ended: threading.Event) -> Written:
        """Write the file and sync it to the disk, and write the file of its digests.

        Args:
            tensors: copies of `self.tensors` on the CPU, each with its own storage.

        Raises:
            WritingEnded: `ended` was set meanwhile.
        """
        path = Path(self.checkpoint_dir) / self._name
        digests, results = {}, []
        if not (self._objects or self._items):
            return Written([], 0)
        with path.open("wb") as file:
            stream = _DigestingStream(file, ended)
            on_cpu = iter(tensors)
            for item, data in [*self._objects, *((item, None) for item in self._items)]:
                place = stream.tell()
                # Taken one by one: a synchronous save copies the next tensor while this one is written.
                data = next(on_cpu) if data is None else data
                result = write_entry(self.transforms, stream, data, item, self._name, SerializationFormat.TORCH_SAVE)
                results.append(result)
                digests[str(place)] = stream.take_digest()
            size = stream.tell()
            file.flush()
            os.fsync(file.fileno())
        write_json(path.with_name(path.name + STATE_DIGESTS), digests)
        return Written(results, size)


class _DigestingStream:
    """A file that digests the written bytes entry by entry, and starts their write-back at once."""

    def __init__(self, file: BinaryIO, ended: threading.Event) -> None:
        self._file, self._ended = file, ended
        self._digest = xxhash.xxh3_64()
        self._size = self._on_its_way = 0
        self.flush = file.flush

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK):
            if self._ended.is_set():
                raise WritingEnded
            part = view[start : start + _CHUNK]
            self._digest.update(part)
            self._file.write(part)
            self._size += len(part)
            waiting = self._size - self._on_its_way
            # Write-back only at the end costs a third of the rate (1.29 GB/s against 0.95 with fsync, 6 GB). No written
            # page stays in the page cache.
            if waiting >= _CHUNK and hasattr(os, "posix_fadvise"):  # Linux: starts the write-back, does not wait for it
                os.posix_fadvise(self._file.fileno(), self._on_its_way, waiting, os.POSIX_FADV_DONTNEED)
                self._on_its_way = self._size
        return len(view)

    def take_digest(self) -> str:
        """Return the digest of everything written since the last call."""
        digest, self._digest = self._digest.hexdigest(), xxhash.xxh3_64()
        return digest


replace_writer(RankFile)
