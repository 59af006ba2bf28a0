"""The check that a library has a version for which our use of its private parts was written."""

import importlib.metadata
import logging

from packaging.specifiers import SpecifierSet

from dataset_builders.errors import InputError

log = logging.getLogger("athanor")


def installed_version(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def check_version(package: str, known: str, module: str, risk: str, *, refuses: bool) -> None:
    """Warn of a version of a library that `module`, which uses the library's private parts, was not written for.

    Args:
        known: the versions that the module was written for, such as "==3.8.8".
        risk: what another version could do unnoticed.
        refuses: raises InputError instead, because results could be wrong or a server open.
    """
    installed = importlib.metadata.version(package)
    if SpecifierSet(known).contains(installed, prereleases=True):
        return
    text = f"{package} {installed}: {module} was written for {known}; with another version {risk}"
    line = f"{text}; install {package}{known}, or run the module's tests and change its KNOWN"
    if refuses:
        raise InputError(line)
    log.warning(line)
