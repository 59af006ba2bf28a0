"""Peak rates and peak memory of the device, and the writer of metrics.jsonl."""

import os
import resource
import time
from pathlib import Path

import torch

from dataset_builders.storage.files import write_text
from trainer.contract.names import METRICS_JSONL
from trainer.contract.result import MetricsRow, read_metrics

# Dense bf16 peaks from NVIDIA's data sheets, FLOP/s.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "GB200": 2500e12, "B200": 2250e12}


def peak_flops() -> float | None:
    """Return the dense bf16 peak of this process's device in FLOP/s; None if it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def peak_memory_gb() -> float:
    """Return this process's peak memory in 1e9 bytes: device memory that torch reserves, or resident memory on a
    CPU."""
    if torch.cuda.is_available():
        # Allocated memory leaves out the memory of CUDA graphs between their launches: 11 GB of 83 for a 2B model.
        return torch.cuda.max_memory_reserved() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class MetricsWriter:
    """A writer that appends rows to metrics.jsonl. A resumed run first drops the rows after its checkpoint."""

    def __init__(self, directory: Path, step: int) -> None:
        self.path = directory / METRICS_JSONL
        rows = [row for row in read_metrics(directory) if row.step <= step]
        write_text(self.path, "".join(row.model_dump_json() + "\n" for row in rows))

    def write(self, row: MetricsRow) -> None:
        """Append a row with the time of writing, by which tracking recognises the row."""
        row = row.model_copy(update={"time_ms": time.time_ns() // 1_000_000})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(row.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())
