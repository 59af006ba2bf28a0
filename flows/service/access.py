"""The rules for access to a root and its servers: the root is its owner's alone, a client needs the password and must
call one of this machine's names, and a web page must belong to the servers themselves.

`athanor up` makes a password at its first start and keeps it in the root, in a file that only its user may read. The
password is also required on loopback, which every user of the machine and every page in a browser can reach. A login in
the environment of `athanor up` takes precedence over the generated one, and is never written to disk.

No other user of the machine may read data, logs, answers or databases in a root. `flows/__init__.py`, the trainer and
the answer workers also set a umask, so that each new file is private.
"""

import contextlib
import ipaddress
import os
import secrets
import shutil
import socket
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dataset_builders.errors import InputError
from dataset_builders.readers.source_files import ROOT_MARK
from dataset_builders.storage.store import StorePath
from flows.tracking.servers import (
    FILES_VARIABLE,
    NAMES_VARIABLE,
    PREFECT_CLIENT_SECRET,
    PREFECT_SECRET,
    ServiceRecord,
    mlflow_files,
    past_the_proxy,
    read_service,
    service_dir,
)

MLFLOW_USER = "MLFLOW_TRACKING_USERNAME"
MLFLOW_PASSWORD = "MLFLOW_TRACKING_PASSWORD"
PASSWORD_FILE = "password"
USER = "athanor"
_EVERYWHERE = ("0.0.0.0", "::")

_OTHERS = stat.S_IRWXG | stat.S_IRWXO  # permissions of all but the owner


@dataclass(frozen=True, slots=True)
class Access:
    """The address on which the servers listen, and the logins that they require.

    Attributes:
        host: address to bind.
        prefect, mlflow: `user:password`.
        password_path: file of the generated password; None if the environment has both logins.
    """

    host: str
    prefect: str = field(repr=False)
    mlflow: str = field(repr=False)
    password_path: Path | None = None

    @property
    def name(self) -> str:
        """This machine's name in browsers: the host, or the machine's own name if all addresses are bound."""
        return socket.getfqdn() if self.host in _EVERYWHERE else self.host

    @property
    def local_name(self) -> str:
        """The name by which programs on this machine reach the servers."""
        return "127.0.0.1" if self.host in _EVERYWHERE else self.host

    def url(self, port: int, *, local: bool = False) -> str:
        """Return http://name:port."""
        return f"http://{_in_url(self.local_name if local else self.name)}:{port}"

    def names(self, environment: Mapping[str, str] = os.environ) -> list[str]:
        """Return the names and addresses by which a browser may call the servers, as a URL spells them.

        A request to any other name comes from a foreign page (DNS rebinding). ATHANOR_HOST_NAMES adds names of a proxy.
        """
        names = {"localhost", "127.0.0.1", "::1", self.name, self.local_name}
        if self.host in _EVERYWHERE:
            names |= {socket.gethostname(), *_own_addresses()}
        further = environment.get(NAMES_VARIABLE, "").replace(",", " ").split()
        return sorted({_in_url(name).lower() for name in (*names, *further)})


def make_access(host: str, directory: Path, environment: Mapping[str, str] = os.environ) -> Access:
    """Return the access for a host and an environment. Make the password if there is none yet.

    Args:
        directory: directory of the service's files, which holds the password.

    Raises:
        InputError: only half of a login is set, or other users may read the password's file or own it.
    """
    user, password = environment.get(MLFLOW_USER), environment.get(MLFLOW_PASSWORD)
    if bool(user) != bool(password):
        raise InputError(f"{MLFLOW_USER} and {MLFLOW_PASSWORD} go together; set both or neither")
    prefect, mlflow = environment.get(PREFECT_SECRET), f"{user}:{password}" if password else None
    if prefect and mlflow:
        return Access(host, prefect, mlflow)
    path = directory / PASSWORD_FILE
    login = _own_password(path)
    return Access(host, prefect or login, mlflow or login, path)


def check_host(host: str) -> None:
    """Check an address to listen on.

    Raises:
        InputError: `host` is neither an IP address nor `localhost`.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if host != "localhost":
            raise InputError(
                f"--host {host} is not an IP address; give one, for example 127.0.0.1 or 0.0.0.0"
            ) from None


def client_logins(directory: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables by which a client on this machine logs in to a service's servers, except those already set.

    Raises:
        InputError: the password belongs to another user.
    """
    logins = {PREFECT_CLIENT_SECRET: environment.get(PREFECT_CLIENT_SECRET) or environment.get(PREFECT_SECRET)}
    logins |= {name: environment.get(name) for name in (MLFLOW_USER, MLFLOW_PASSWORD)}
    path = directory / PASSWORD_FILE
    if not all(logins.values()) and (login := _read_password(path)):
        logins[PREFECT_CLIENT_SECRET] = logins[PREFECT_CLIENT_SECRET] or login
        if not logins[MLFLOW_PASSWORD]:
            logins |= mlflow_login(login)
    return {name: value for name, value in logins.items() if value and not environment.get(name)}


def use_service(root: StorePath) -> ServiceRecord | None:
    """Let this process and its children use the service of the root, unless the user has set the address of another.

    Must be called before Prefect is imported, because Prefect reads its address only once. The service's password is
    set only for the servers of the service.

    Returns:
        the record of the service; None if no service is running.

    Raises:
        InputError: the service belongs to another user, who has not shared its password.
    """
    service = read_service(root)
    if service is not None:
        logins = client_logins(service_dir(root))
        os.environ.setdefault("PREFECT_API_URL", service.prefect_api)
        os.environ.setdefault("PREFECT_UI_URL", service.prefect_ui)
        os.environ.setdefault("MLFLOW_TRACKING_URI", service.mlflow)
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        os.environ.update(past_the_proxy())
        needed = {PREFECT_CLIENT_SECRET} if os.environ["PREFECT_API_URL"] == service.prefect_api else set()
        if os.environ["MLFLOW_TRACKING_URI"] == service.mlflow:
            needed |= {MLFLOW_USER, MLFLOW_PASSWORD}
            os.environ[FILES_VARIABLE] = str(mlflow_files(root))
        os.environ.update({name: value for name, value in logins.items() if name in needed})
    return service


def mlflow_login(login: str) -> dict[str, str]:
    """Return the variables by which MLflow's clients log in.

    Args:
        login: `user:password`.
    """
    user, _, password = login.partition(":")
    return {MLFLOW_USER: user, MLFLOW_PASSWORD: password}


def make_private_root(root: Path) -> str | None:
    """Make the directory of a root with its mark, or remove the permissions of others from an existing directory.

    A directory with the sticky bit, such as /tmp, is meant for everybody and keeps its mode. Files in it are private.

    Returns:
        a line for the user if permissions of others were removed or could not be removed; else None.

    Raises:
        InputError: the directory cannot be made, or no file can be written in it.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            mode = stat.S_IMODE(root.stat().st_mode)
        (root / ROOT_MARK).touch()
    except OSError as error:
        raise InputError(f"--root {root} cannot be written ({error.strerror}); choose another root") from error
    if not mode & _OTHERS or mode & stat.S_ISVTX:
        return None
    try:
        root.chmod(mode & ~_OTHERS)
    except OSError:
        return (
            f"--root {root} is open to other users (mode {mode:o}) and belongs to user {root.stat().st_uid}, who alone "
            f"can close it: chmod 700 {root}"
        )
    return f"--root {root} was open to other users (mode {mode:o}); it is now its owner's alone (mode 700)"


def remove_unused_root(root: Path) -> None:
    """Remove the directory of a new root that holds no file except its mark."""
    with contextlib.suppress(OSError):
        if all(path.is_dir() or path.name == ROOT_MARK for path in root.rglob("*")):
            shutil.rmtree(root)


def _own_password(path: Path) -> str:
    if (login := _read_password(path)) is None:
        login = f"{USER}:{secrets.token_urlsafe(24)}"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(login + "\n")
    status = path.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        raise InputError(
            f"{path} can be read or was written by others (mode {stat.S_IMODE(status.st_mode):o}, "
            f"user {status.st_uid}); delete it, and a new password is made"
        )
    return login


def _read_password(path: Path) -> str | None:
    """Return `user:password`; None if there is no file, or only an empty one that a killed process has left."""
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except PermissionError:
        raise InputError(
            f"{path} may be read by user {path.lstat().st_uid} alone, and the service of this root asks for the "
            f"password in it; run as that user, or set {PREFECT_CLIENT_SECRET} (user:password), {MLFLOW_USER} and "
            f"{MLFLOW_PASSWORD}"
        ) from None


def _own_addresses() -> set[str]:
    addresses = (address for of_interface in psutil.net_if_addrs().values() for address in of_interface)
    return {a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6) and "%" not in a.address}


def _in_url(name: str) -> str:
    return f"[{name}]" if ":" in name else name
