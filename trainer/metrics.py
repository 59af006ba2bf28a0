"""Timers, peak rates and the writer of metrics.jsonl."""

import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from dataset_builders.contracts.files import write_text
from trainer.contract import METRICS_JSONL, MetricsRow, read_metrics

# Dense bf16 peaks of NVIDIA's data sheets, FLOP/s.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "GB200": 2500e12, "B200": 2250e12}


class PartClock:
    """Splits a step's time into parts that follow each other: data, vision, language, optimizer.

    On CUDA the marks are events on the stream, read once a log interval, so that timing costs no synchronisation.

    Attributes:
        on_switch: hears of every part that begins, None where nothing does; on whatever thread it is.
    """

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        self._part: str | None = None
        self._mark: object = None
        self._spans: list[tuple[str, object, object]] = []
        self.on_switch: Callable[[str | None], None] | None = None

    def switch(self, part: str | None) -> None:
        """End the part that runs and begin `part`; None begins nothing."""
        now = self._now()
        if self._part is not None:
            self._spans.append((self._part, self._mark, now))
        self._part, self._mark = part, now
        if self.on_switch is not None:
            self.on_switch(part)

    def switch_on_gradient(self, tensor: torch.Tensor, part: str) -> None:
        """Begin `part` when the backward pass reaches `tensor`."""
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self.switch(part))

    def read(self) -> dict[str, float]:
        """Seconds by part since the last read."""
        if self._cuda:
            torch.cuda.synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for part, start, stop in self._spans:
            seconds[part] += start.elapsed_time(stop) / 1e3 if self._cuda else stop - start
        self._spans.clear()
        return seconds

    def _now(self) -> object:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def peak_flops() -> float | None:
    """Dense bf16 peak of this process's device in FLOP/s; None where it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def peak_memory_gb() -> float:
    """Peak memory of this process in 1e9 bytes: allocated on the device, or resident on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class MetricsWriter:
    """Appends rows to metrics.jsonl; a resumed run drops what lies after its checkpoint first."""

    def __init__(self, directory: Path, step: int) -> None:
        self.path = directory / METRICS_JSONL
        kept = [row for row in read_metrics(directory) if row.step <= step]
        write_text(self.path, "".join(row.model_dump_json() + "\n" for row in kept))

    def write(self, row: MetricsRow) -> None:
        """Append a row with the time of its writing, by which tracking knows it again."""
        row = row.model_copy(update={"time_ms": time.time_ns() // 1_000_000})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(row.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
