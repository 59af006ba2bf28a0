"""The machine that a bench runs on: its versions, its matrix rate; and work in a process that leaves no GPU memory."""

import contextlib
import importlib.metadata
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from infra.gpu_environment import REPO, merged_pins, normalized, read_pins
from trainer.loop.metrics import peak_flops

PACKAGES = ("torch", "megatron-core", "transformer-engine", "transformers", "triton")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine, with dense FLOP/s of one device.

    Attributes:
        rate: of `product`, at once.
        sustained: of `product`, on a GPU after five seconds of products: then the power that the GPU may draw sets its
            clock, as in a training. On a CPU the same as `rate`.
        peak: the data sheet's value, or None.
    """

    device: str
    versions: str
    product: str
    rate: float
    sustained: float
    peak: float | None

    @classmethod
    def here(cls) -> "Host":
        """Return the measurements of this machine."""
        return cls(*describe(), *matrix_rate(), peak_flops())


def apart(function: Callable[..., T], *args: object) -> T:
    """Return the function's result, computed in a process of its own, so that its GPU memory is free at its end.

    This does not use multiprocessing, whose children import what the main program has imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "asked"), Path(folder, "answer")
        asked.write_bytes(pickle.dumps((function, args)))
        subprocess.run([sys.executable, "-W", "ignore", "-m", "tests.bench.host", str(asked), str(answer)], check=True)
        return pickle.loads(answer.read_bytes())


def describe() -> tuple[str, str]:
    """Return (the device, a line of versions)."""
    versions = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(version_text(package))
    if not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores", ", ".join(versions)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    versions += [f"driver {driver}", f"cuDNN {_cudnn()}"]
    return torch.cuda.get_device_name(), ", ".join(versions)


def version_text(package: str) -> str:
    """Return the package's name and installed version. If constraints-gpu.txt (on a CPU constraints.txt) pins another
    version, the text says so.

    Raises:
        PackageNotFoundError: the package is not installed.
    """
    pins = merged_pins() if torch.cuda.is_available() else read_pins(REPO / "constraints.txt")
    version = importlib.metadata.version(package)
    pin = pins.get(normalized(package), "").partition("==")[2]
    is_other = pin and version.partition("+")[0] != pin
    return f"{package} {version}" + (f" (not the pinned {pin})" if is_other else "")


def _cudnn() -> str:
    try:
        return f"{torch.backends.cudnn.version()}, torch's"
    except RuntimeError:  # this process has loaded another one for Transformer Engine, which torch will not use
        return "the system's"


def matrix_rate(rounds: int = 31, seconds: float = 5.0) -> tuple[str, float, float]:
    """Return (what was multiplied, its rate in FLOP/s at once, on a GPU after some seconds of products).

    Each rate is the median over products without gaps, after as many to warm up.
    """
    cuda = torch.cuda.is_available()
    size, dtype, device = (8192, torch.bfloat16, "cuda") if cuda else (512, torch.float32, "cpu")
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)

    def rate() -> float:
        marks = []
        for _ in range(2 * rounds + 1):
            marks.append(mark(cuda))
            torch.mm(a, b, out=out)
        if cuda:
            torch.cuda.synchronize()
        return 2 * size**3 / statistics.median(between(*pair) for pair in zip(marks[rounds:-1], marks[rounds + 1 :]))

    at_once = sustained = rate()
    end = time.monotonic() + seconds
    while cuda and time.monotonic() < end:
        sustained = rate()
    return f"{size}^3 {str(dtype).removeprefix('torch.')}", at_once, sustained


def mark(cuda: bool) -> torch.cuda.Event | float:
    """Return this moment, on the device if it is a GPU."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def wait_for_device() -> None:
    """Wait until the GPU has done everything, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def between(start: torch.cuda.Event | float, stop: torch.cuda.Event | float) -> float:
    """Return the seconds from one `mark` to another, which the device has passed."""
    return stop - start if isinstance(start, float) else start.elapsed_time(stop) / 1e3


def _answer(asked: Path, answer: Path) -> None:
    function, args = pickle.loads(asked.read_bytes())
    answer.write_bytes(pickle.dumps(function(*args)))


if __name__ == "__main__":
    _answer(Path(sys.argv[1]), Path(sys.argv[2]))
