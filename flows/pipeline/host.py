"""The GPUs and the training packages of this host, found without importing torch: from the driver and from pip."""

import importlib.util
import os
import shutil
import subprocess
from functools import cache

from dataset_builders.known_version import installed_version
from trainer.contract.modules import Host

_NONE = ("", "-1")  # values of CUDA_VISIBLE_DEVICES that hide every GPU


@cache
def this_host() -> Host:
    """Return the first GPU that torch would find here, and the versions of Transformer Engine and FlashAttention 4."""
    hides = os.environ.get("CUDA_VISIBLE_DEVICES") in _NONE
    listing = [] if hides or installed_version("torch").endswith("+cpu") else ask_driver("name", "compute_cap")
    if not listing:
        return Host()
    name, _, capability = listing[0].rpartition(", ")
    major, _, minor = capability.partition(".")
    known = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    engine = installed_version("transformer-engine") or "?" if has_engine else ""
    return Host(gpu=name, capability=known, engine=engine, flash=installed_version("flash-attn-4"))


def ask_driver(*fields: str) -> list[str]:
    """Return one line per GPU with these fields of nvidia-smi, joined by ", "; [] if there is no GPU."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listing.stdout.strip().splitlines() if listing.returncode == 0 else []


def gpu_memory_gb() -> float | None:
    """Return the memory of the first GPU in 10^9 bytes; None if there is no GPU, or if torch is a CPU build."""
    if not this_host().gpu:
        return None
    number, _, unit = ask_driver("memory.total")[0].partition(" ")
    return float(number) * {"MiB": 2**20}.get(unit, 1) / 1e9
