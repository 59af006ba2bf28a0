"""`athanor doctor`: what this machine has, what it lacks and how to install it. Imports none of the heavy packages."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dataset_builders.known_version import installed_version
from dataset_builders.storage.store import side_dir
from flows.cli.terminal import print_table
from flows.pipeline.host import ask_driver
from trainer.contract.modules import FLASH_GAIN, KERNEL_CAPABILITY, Host

HUB = "https://huggingface.co"
MIN_MEMORY_GB = 3.0
MIN_DISK_GB = 2.0
_CHECKOUT = Path(__file__).parents[2]
_INSTALL = "pip install -c constraints.txt -e ."
_INSTALL_ON_GPU = "make gpu"
_INSTALL_FLASH = "pip install -c constraints.txt -e '.[flash]'"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. Only the state "missing" makes the machine unfit for the default recipe."""

    what: str
    state: Literal["ok", "note", "missing"]
    value: str
    way_out: str = ""


def doctor_command(args: argparse.Namespace) -> int:
    """Print the findings. Return 0 if the default recipe can run here, 1 if something that it needs is missing."""
    gpu_names = ask_driver("name", "memory.total")
    findings = [
        check_python(),
        *check_packages(),
        check_tested_versions(_CHECKOUT, has_gpu=bool(gpu_names)),
        *check_machine(side_dir(args.root)),
        *check_gpus(gpu_names),
        *check_flash(ask_driver("compute_cap")),
    ]
    if args.network:
        findings.append(check_network())
    rows = [(f.what, f.state, f.value, f.way_out) for f in findings]
    print_table("This machine", ("what", "", "found", "way out"), rows, sys.stdout.isatty())
    missing = [f.what for f in findings if f.state == "missing"]
    print(f"\nMissing: {', '.join(missing)}." if missing else "\nEverything that `athanor run` needs is here.")
    return 1 if missing else 0


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Finding:
    """Check that the Python version is 3.11 or 3.12."""
    value = f"{platform.python_version()} at {sys.executable}"
    if version in ((3, 11), (3, 12)):
        return Finding("python", "ok", value)
    return Finding("python", "missing", value, "install Python 3.11 or 3.12, delete .venv and run `make run`")


def check_packages() -> list[Finding]:
    """Check the installed packages against the declared requirements.

    Returns:
        one finding if all fit, else one finding per requirement that is not met.
    """
    try:
        declared = importlib.metadata.requires("athanor-vlm") or []
    except importlib.metadata.PackageNotFoundError:
        return [Finding("packages", "missing", "athanor is not installed", _INSTALL)]
    needed = [r for r in map(Requirement, declared) if r.marker is None or r.marker.evaluate({"extra": ""})]
    bad = [finding for requirement in needed if (finding := check_requirement(requirement)) is not None]
    return bad or [Finding("packages", "ok", f"all {len(needed)} requirements fit")]


def check_requirement(requirement: Requirement) -> Finding | None:
    """Check one requirement. Return None if the installed version fits."""
    version = installed_version(requirement.name)
    if version and requirement.specifier.contains(version, prereleases=True):
        return None
    return Finding(requirement.name, "missing", f"{version or 'not installed'}, needed: {requirement}", _INSTALL)


def check_tested_versions(checkout: Path, has_gpu: bool) -> Finding:
    """List installed versions that differ from the tested ones, which are those of constraints.txt and, on a machine
    with a GPU, of constraints-gpu.txt."""
    files = [checkout / name for name in ("constraints.txt", "constraints-gpu.txt")[: 1 + has_gpu]]
    if not all(file.is_file() for file in files):
        return Finding("tested versions", "note", "no constraints.txt here", "work from a checkout to see them")
    tested: dict[str, str] = {}
    for file in files:
        tested |= _read_pins(file)
    other, total = [], 0
    for name, pin in tested.items():
        if not (version := installed_version(name)):
            continue
        total += 1
        if version.partition("+")[0] != pin:
            other.append(f"{name} {version} (tested: {pin})")
    if other:
        text = ", ".join(other[:4]) + (f" and {len(other) - 4} more" if len(other) > 4 else "")
        return Finding("tested versions", "note", text, _INSTALL_ON_GPU if has_gpu else _INSTALL)
    return Finding("tested versions", "ok", f"all {total} as in {' and '.join(file.name for file in files)}")


def _read_pins(constraints: Path) -> dict[str, str]:
    """Return normalized package name -> pinned version."""
    lines = (line.split("#")[0] for line in constraints.read_text(encoding="utf-8").splitlines())
    pins = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name.strip()): version.strip() for name, version in pins}


def check_machine(root: Path) -> list[Finding]:
    """Check the cores, the memory, and the disk that holds the root."""
    memory = psutil.virtual_memory()
    place = next(p for p in (root, *root.parents) if p.exists())
    free = shutil.disk_usage(place).free / 1e9
    memory_state = "ok" if memory.available / 1e9 >= MIN_MEMORY_GB else "note"
    writable = os.access(place, os.W_OK)
    disk_state = "ok" if free >= MIN_DISK_GB and writable else "missing"
    way_out = f"free {MIN_DISK_GB:g} GB there or choose another --root" if disk_state == "missing" else ""
    return [
        Finding("CPU", "ok", f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}"),
        Finding(
            "memory",
            memory_state,
            f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free",
            "" if memory_state == "ok" else f"the default recipe takes up to {MIN_MEMORY_GB:g} GB",
        ),
        Finding("disk", disk_state, f"{free:.1f} GB free at {place}{'' if writable else ', not writable'}", way_out),
    ]


def check_gpus(names: list[str]) -> list[Finding]:
    """Check for NVIDIA GPUs, and whether Transformer Engine is installed for them.

    Args:
        names: the GPUs' names from the driver.
    """
    if not names:
        return [Finding("GPU", "note", "none found", "the default recipe needs none")]
    if importlib.util.find_spec("transformer_engine") is None:
        text = "not installed: training runs on plain modules, which are slower"
        engine = Finding("transformer engine", "note", text, _INSTALL_ON_GPU)
    else:
        engine = Finding("transformer engine", "ok", importlib.metadata.version("transformer-engine"))
    return [Finding("GPU", "ok", f"{len(names)} x {names[0]}"), engine]


def check_flash(capabilities: list[str]) -> list[Finding]:
    """Check whether FlashAttention 4 is installed where the first GPU can use it.

    Args:
        capabilities: the GPUs' compute capabilities from the driver, such as "9.0".

    Returns:
        nothing if there is no GPU, or if its capability is unknown.
    """
    major, _, minor = (capabilities or [""])[0].partition(".")
    if not (major.isdigit() and minor.isdigit()):
        return []
    what, version = "FlashAttention 4", installed_version("flash-attn-4")
    if not Host(capability=(int(major), int(minor)), flash="any").has_flash:
        needed = ".".join(map(str, KERNEL_CAPABILITY))
        return [Finding(what, "ok", f"not used: it needs compute capability {needed}, and the GPU has {major}.{minor}")]
    if version:
        return [Finding(what, "ok", version)]
    way_out = f"{_INSTALL_ON_GPU}, or without a compiler: {_INSTALL_FLASH}"
    return [Finding(what, "note", f"not installed: with it, training is about {FLASH_GAIN} times as fast", way_out)]


def check_network(url: str = HUB) -> Finding:
    """Check that the hub answers. The hub is needed only for models and datasets that are given by hub name."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10):
            return Finding("hub", "ok", f"{url} answers")
    except (urllib.error.URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        return Finding("hub", "note", f"{url}: {reason}", "only for data and models by hub name; give directories")
