"""What this host has to train with, without torch: the driver's word, and the packages that are installed."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from functools import cache

from trainer.contract.machine.modules import Host

_NONE = ("", "-1")  # CUDA_VISIBLE_DEVICES that hides every GPU


@cache
def this_host() -> Host:
    """The first GPU that torch would find here, and Transformer Engine's version."""
    hides = os.environ.get("CUDA_VISIBLE_DEVICES") in _NONE
    listing = "" if hides or _version("torch").endswith("+cpu") else _ask_driver()
    if not listing:
        return Host()
    name, _, capability = listing.splitlines()[0].rpartition(", ")
    major, _, minor = capability.partition(".")
    known = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
    has_engine = importlib.util.find_spec("transformer_engine") is not None
    return Host(gpu=name, capability=known, engine=_version("transformer-engine") or "?" if has_engine else "")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _ask_driver() -> str:
    """A line for each GPU, "name, capability"; empty if there is none."""
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        listing = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return listing.stdout.strip() if listing.returncode == 0 else ""
