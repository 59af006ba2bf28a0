"""Host memory for the copy of a training's state from which an asynchronous save is written.

The memory is allocated once, on a thread during the first steps, and every save reuses it: allocating 30 GB of
page-locked memory takes longer than ten copies into it. For a GPU the memory is page-locked, so that the copy runs at
the bus's rate.
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

_BLOCK = 1 << 30  # bytes that are page-locked at a time: the driver serves no other call meanwhile
_CGROUPS = Path("/sys/fs/cgroup")
log = logging.getLogger("athanor.trainer")


class HostMemory:
    """Host memory for copies of a device's tensors with these `sizes` in bytes, which may come in any order."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._places: list[int] = []
        self._locked: list[int] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._make, name="host-memory")
        self._thread.start()

    @staticmethod
    def needed(sizes: Iterable[int]) -> int:
        """Return the bytes that tensors of these sizes take, each in whole pages."""
        return sum(map(_in_pages, sizes))

    def _make(self) -> None:
        started = time.perf_counter()
        try:
            _use(self._device)
            self._memory = mmap.mmap(-1, self.needed(self._sizes) or mmap.PAGESIZE)
            with contextlib.suppress(AttributeError, OSError):  # not every system has huge pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            start = end = 0
            for size in self._sizes:
                self._places.append(end)
                end += _in_pages(size)
                # A block ends with a tensor, so that no copy crosses a border of locked memory.
                if end - start >= _BLOCK:
                    self._make_block(start, end)
                    start = end
            self._make_block(start, end)
            log.info("%.3f GB of host memory for saves made in %.1f s", end / 1e9, time.perf_counter() - started)
        except Exception as error:  # raised when the memory is used
            self._error = error

    def _make_block(self, start: int, end: int) -> None:
        if start == end:
            return
        block = torch.frombuffer(self._memory, dtype=torch.uint8, count=end - start, offset=start)
        block.zero_()  # the first write to a page allocates it
        if self._device.type == "cuda":
            error = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), end - start, 0)
            if error == torch.cuda.cudart().cudaError.success:
                self._locked.append(block.data_ptr())
            else:
                log.warning(
                    "%.1f GB of host memory cannot be page-locked (%s): saves take longer", block.nbytes / 1e9, error
                )

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return finished copies of the tensors, each with its own storage. They overwrite the previous copies."""
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
        """Unlock the memory. The copies must no longer be in use."""
        self._thread.join()
        for address in self._locked:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._locked.clear()


def copied_one_by_one(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield copies of the tensors on the CPU, each with its own storage; the next is copied while one is in use. Only
    for a save that blocks: the tensors must not change meanwhile."""
    if not tensors:
        return
    with ThreadPoolExecutor(1, initializer=_use, initargs=(tensors[0].device,)) as ahead:
        coming = ahead.submit(tensors[0].to, "cpu", copy=True)
        for tensor in tensors[1:]:
            ready, coming = coming, ahead.submit(tensor.to, "cpu", copy=True)
            yield ready.result()
        yield coming.result()


def _use(device: torch.device) -> None:
    """Select this process's GPU on a new thread. It starts on the first GPU, where a call would allocate a context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def available_memory() -> int:
    """Return the bytes that this process may still allocate, by the machine's memory and its control groups' limits."""
    return min([psutil.virtual_memory().available, *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Yield the free bytes of each version 2 control group with a limit."""
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
            # The page cache can be reclaimed, and counts as free.
            yield int(limit) - used + int(counts.get("inactive_file", 0)) + int(counts.get("active_file", 0))


def _in_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
