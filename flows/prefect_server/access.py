"""Who may reach the servers: this machine alone, unless both ask for a password."""

import importlib.util
import ipaddress
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dataset_builders.errors import InputError

PREFECT_SECRET = "PREFECT_SERVER_API_AUTH_STRING"
PREFECT_CLIENT_SECRET = "PREFECT_API_AUTH_STRING"
MLFLOW_USER = "MLFLOW_TRACKING_USERNAME"
MLFLOW_PASSWORD = "MLFLOW_TRACKING_PASSWORD"
_MIN_PASSWORD = 12  # characters; MLflow's own bound
_EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Access:
    """The address on which the servers listen, and which of them ask for a password.

    Attributes:
        host: address to bind.
        has_prefect_auth, has_mlflow_auth: that server asks for a password; the secrets stay in the environment.
    """

    host: str
    has_prefect_auth: bool
    has_mlflow_auth: bool

    @property
    def name(self) -> str:
        """This machine's name for browsers: the host, or the machine's own name if all addresses are bound."""
        return socket.getfqdn() if self.host in _EVERYWHERE else self.host

    @property
    def local_name(self) -> str:
        """This machine's name for its own programs."""
        return "127.0.0.1" if self.host in _EVERYWHERE else self.host

    def url(self, port: int, *, local: bool = False) -> str:
        """http://name:port"""
        name = self.local_name if local else self.name
        return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def check_access(host: str, environment: Mapping[str, str] = os.environ) -> Access:
    """The access that the host and the environment give.

    Raises:
        InputError: others reach the host but a password is missing, or one is incomplete.
    """
    missing = [name for name in (PREFECT_SECRET, MLFLOW_USER, MLFLOW_PASSWORD) if not environment.get(name)]
    if not is_loopback(host) and missing:
        raise InputError(
            f"--host {host} lets others in, so both servers need a password; set {', '.join(missing)} in the "
            "environment, or leave --host out and use an ssh tunnel"
        )
    if (MLFLOW_USER in missing) != (MLFLOW_PASSWORD in missing):
        raise InputError(f"{MLFLOW_USER} and {MLFLOW_PASSWORD} go together; set both or neither")
    has_mlflow_auth = MLFLOW_PASSWORD not in missing
    length = len(environment.get(MLFLOW_PASSWORD, ""))
    if has_mlflow_auth and length < _MIN_PASSWORD:
        raise InputError(f"{MLFLOW_PASSWORD} has {length} characters; MLflow wants {_MIN_PASSWORD} or more")
    if has_mlflow_auth and importlib.util.find_spec("flask_wtf") is None:
        raise InputError(f"{MLFLOW_PASSWORD} is set, but MLflow's login is not installed; pip install 'athanor[auth]'")
    return Access(host, PREFECT_SECRET not in missing, has_mlflow_auth)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise InputError(f"--host {host} is not an IP address; give one, for example 127.0.0.1 or 0.0.0.0") from None


def allowed_hosts(access: Access) -> str:
    """The names by which MLflow may be called. Any other comes from a foreign page (DNS rebinding)."""
    names = {"localhost", "127.0.0.1", "[::1]", access.name, access.local_name}
    return ",".join(sorted(pattern for name in names for pattern in (name, f"{name}:*")))


def past_the_proxy(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that keep calls to this machine's own servers from going through a proxy; empty if none is set."""
    proxies = {"http_proxy", "https_proxy", "all_proxy"}
    if not any(name.lower() in proxies and value for name, value in environment.items()):
        return {}
    exceptions = environment.get("no_proxy") or environment.get("NO_PROXY")
    names = ",".join([*([exceptions] if exceptions else []), "127.0.0.1", "localhost", "::1"])
    return {"NO_PROXY": names, "no_proxy": names}


def mlflow_auth_environment(directory: Path) -> dict[str, str]:
    """Variables with which MLflow's server asks for a password. The first user and the cookies' key are in no file."""
    config = directory / "mlflow-auth.ini"
    database = f"sqlite:///{directory / 'mlflow-auth.db'}"
    config.write_text(f"[mlflow]\ndefault_permission = READ\ndatabase_uri = {database}\n", encoding="utf-8")
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(config),
        "MLFLOW_AUTH_ADMIN_USERNAME": os.environ[MLFLOW_USER],
        "MLFLOW_AUTH_ADMIN_PASSWORD": os.environ[MLFLOW_PASSWORD],
        "MLFLOW_FLASK_SERVER_SECRET_KEY": os.environ.get("MLFLOW_FLASK_SERVER_SECRET_KEY") or secrets.token_hex(32),
    }
