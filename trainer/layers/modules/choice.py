"""The choice of a job's modules, shared by training, features and tests."""

import fcntl
import logging
import os
from pkgutil import resolve_name

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.backends import BackendSpecProvider

from dataset_builders.known_version import installed_version
from dataset_builders.storage.store import cache_dir
from trainer.contract.modules import Host, Wanted, describe, modules_of
from trainer.layers.kernel_support import allow_kernels
from trainer.layers.module_set import TorchModules
from trainer.layers.modules.plain import PlainModules

if HAVE_TE:
    from trainer.layers.modules.engine import FusedModules

log = logging.getLogger("athanor.trainer")

_FAST_ATTENTION = "trainer.layers.modules.flash_4:FlashAttention4"  # imported only if it is used: this takes seconds


def host_of(device: torch.device) -> Host:
    """Return the hardware and the versions of the libraries that this process computes with."""
    if device.type != "cuda":
        return Host()
    return Host(
        gpu=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        engine=installed_version("transformer-engine") if HAVE_TE else "",
        flash=installed_version("flash-attn-4"),
    )


def choose_modules(wanted: Wanted, device: torch.device, cp: int = 1) -> BackendSpecProvider:
    """Return the modules of a job on a device, and log the choice. Also set whether our kernels run in this process
    from now on: they do not with the portable modules.

    Args:
        cp: ranks that divide the tokens of a segment.
    """
    host = host_of(device)
    modules = modules_of(wanted, host)
    log.info("modules: %s", describe(wanted, host))
    allow_kernels(modules != "portable")
    if modules == "exact":
        return TorchModules()
    fast_attention = None
    if modules != "portable" and host.has_flash:
        _cache_compiled_kernels()
        fast_attention = resolve_name(_FAST_ATTENTION)
    return FusedModules(fast_attention, cp) if modules == "engine" else PlainModules(fast_attention)


def _cache_compiled_kernels() -> None:
    """Let FlashAttention 4, before it is imported, keep compiled kernels in a directory of the user.

    On an H200 compiling for one head dim took 9 s, and reading compiled kernels 1 s. Unless asked, it keeps none.
    """
    try:
        directory = cache_dir() / "flash-attn-4"
        directory.mkdir(parents=True, exist_ok=True)
        # Where it may not lock files, as on some shared disks, it would end the training.
        with (directory / "locks").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(directory))
