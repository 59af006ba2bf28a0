"""Host memory for the copy of a training's state from which an asynchronous save is written.

It is made once, on a thread beside the first steps, and every save uses it again: making 30 GB of page-locked memory
takes longer than ten copies into it. For a GPU it is page-locked, so that the copy runs at the bus's rate.
"""

import contextlib
import logging
import mmap
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch

_BLOCK = 1 << 30  # bytes that are page-locked at a time: the driver serves nobody else meanwhile
_CGROUPS = Path("/sys/fs/cgroup")
log = logging.getLogger("athanor.trainer")


class HostMemory:
    """Room for tensors of given sizes, in any order.

    Args:
        sizes: bytes of each tensor.
        device: where the tensors are; for a GPU the memory is page-locked.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._places: list[int] = []
        self._locked: list[int] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._make, name="host-memory")
        self._thread.start()

    @staticmethod
    def needed(sizes: Iterable[int]) -> int:
        """Bytes that the memory for such tensors takes."""
        return sum(map(_in_pages, sizes))

    def _make(self) -> None:
        started = time.perf_counter()
        try:
            _use(self._device)
            self._memory = mmap.mmap(-1, self.needed(self._sizes) or mmap.PAGESIZE)
            with contextlib.suppress(AttributeError, OSError):  # where the system has none
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            start = end = 0
            for size in self._sizes:
                self._places.append(end)
                end += _in_pages(size)
                if end - start >= _BLOCK:
                    self._make_block(start, end)
                    start = end
            self._make_block(start, end)
            log.info("%.3f GB of host memory for saves made in %.1f s", end / 1e9, time.perf_counter() - started)
        except Exception as error:  # raised where the memory is used
            self._error = error

    def _make_block(self, start: int, end: int) -> None:
        """Have the pages of a block made, and locked. A tensor lies in one block: copies do not cross their borders."""
        if start == end:
            return
        block = torch.frombuffer(self._memory, dtype=torch.uint8, count=end - start, offset=start)
        block.zero_()
        if self._device.type == "cuda":
            error = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), end - start, 0)
            if error == torch.cuda.cudart().cudaError.success:
                self._locked.append(block.data_ptr())
            else:
                log.warning(
                    "%.1f GB of host memory cannot be page-locked (%s): saves take longer", block.nbytes / 1e9, error
                )

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the tensors, whole when it returns, in the place of the copies before; each its own storage."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        free: dict[int, list[int]] = {}
        for place, size in zip(self._places, self._sizes, strict=True):
            free.setdefault(size, []).append(place)
        copies = []
        for tensor in tensors:
            place = free[tensor.nbytes].pop()
            room = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=place)
            copies.append(room.view(tensor.shape).copy_(tensor, non_blocking=True))
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return copies

    def release(self) -> None:
        """Unlock the memory; the copies are not used any more."""
        self._thread.join()
        for address in self._locked:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._locked.clear()


def copied_one_by_one(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors on the CPU, each with a storage of its own; the next is copied while one is used. For a save that
    blocks: the tensors must not change meanwhile."""
    if not tensors:
        return
    with ThreadPoolExecutor(1, initializer=_use, initargs=(tensors[0].device,)) as ahead:
        coming = ahead.submit(tensors[0].to, "cpu", copy=True)
        for tensor in tensors[1:]:
            ready, coming = coming, ahead.submit(tensor.to, "cpu", copy=True)
            yield ready.result()
        yield coming.result()


def _use(device: torch.device) -> None:
    """A thread begins on the first GPU, where a call would take memory for a context of its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def available_memory() -> int:
    """Bytes that this process may still take: of the machine, and of the control groups it is in."""
    return min([psutil.virtual_memory().available, *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Of control groups of version 2 with a limit. The page cache counts as used there, and is given back."""
    try:
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
    except OSError:
        return
    for group in (_CGROUPS / own, *(_CGROUPS / own).parents):
        try:
            limit = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max":
            yield int(limit) - used + int(counts.get("inactive_file", 0)) + int(counts.get("active_file", 0))


def _in_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
