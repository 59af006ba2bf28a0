"""The rules for access to the servers: a client needs the password and must call one of this machine's names, and a web
page must belong to the servers themselves.

`athanor up` makes a password at its first start and keeps it in the root, in a file that only its user may read. The
password is also required on loopback, which every user of the machine and every page in a browser can reach. A login in
the environment of `athanor up` takes precedence over the generated one, and is never written to disk.
"""

import ipaddress
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dataset_builders.errors import InputError

PREFECT_SECRET = "PREFECT_SERVER_API_AUTH_STRING"
PREFECT_CLIENT_SECRET = "PREFECT_API_AUTH_STRING"
MLFLOW_USER = "MLFLOW_TRACKING_USERNAME"
MLFLOW_PASSWORD = "MLFLOW_TRACKING_PASSWORD"
NAMES_VARIABLE = "ATHANOR_HOST_NAMES"
PASSWORD_FILE = "password"
USER = "athanor"
_EVERYWHERE = ("0.0.0.0", "::")


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


def mlflow_login(login: str) -> dict[str, str]:
    """Return the variables by which MLflow's clients log in.

    Args:
        login: `user:password`.
    """
    user, _, password = login.partition(":")
    return {MLFLOW_USER: user, MLFLOW_PASSWORD: password}


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


def past_the_proxy(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables that keep calls to this machine's servers away from the proxy; empty if no proxy is set."""
    proxies = {"http_proxy", "https_proxy", "all_proxy"}
    if not any(name.lower() in proxies and value for name, value in environment.items()):
        return {}
    exceptions = environment.get("no_proxy") or environment.get("NO_PROXY")
    names = ",".join([*([exceptions] if exceptions else []), "127.0.0.1", "localhost", "::1"])
    return {"NO_PROXY": names, "no_proxy": names}
