"""The channels and the kinds of notifications that the environment names, read without Prefect.

ATHANOR_NOTIFY_WEBHOOK   URL that gets a JSON object with kind, name, message and url
ATHANOR_NOTIFY_SLACK     URL of an incoming webhook of Slack, or of a service that takes the same {"text": ...}
ATHANOR_NOTIFY_EMAIL     mail server and receiver in Apprise's form, mailtos://user:password@host?to=me@example.org
ATHANOR_NOTIFY           kinds, separated by commas (default: all of KINDS)
"""

import os
import re
from collections.abc import Mapping

from dataset_builders.errors import InputError

VARIABLE = "ATHANOR_NOTIFY"
CHANNELS = ("webhook", "slack", "email")
KINDS: dict[str, tuple[str, ...]] = {
    "failed": ("prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"),
    "late": ("prefect.flow-run.Late",),
    "refused": ("prefect.flow-run.Refused",),  # the state that deployments/flows.py returns
    "champion": ("athanor.champion",),
}
_URL = re.compile(r"https?://[^\s/]+\S*")
_MAIL = re.compile(r"mailtos?://\S+")


def addresses(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return channel -> address for the channels of the environment.

    Raises:
        InputError: a value is not an address of its channel. The message does not show it.
    """
    channels = {}
    for channel in CHANNELS:
        name = f"{VARIABLE}_{channel.upper()}"
        if value := environment.get(name, "").strip():
            if not (_MAIL if channel == "email" else _URL).fullmatch(value):
                form = "mailtos://user:password@host?to=address" if channel == "email" else "http(s)://host/..."
                raise InputError(f"{name} is not of the form {form}; mend it, or unset it for no notification")
            channels[channel] = value
    return channels


def wanted_kinds(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the kinds of ATHANOR_NOTIFY, all if it is not set.

    Raises:
        InputError: a kind is not known.
    """
    kinds = environment.get(VARIABLE, "").replace(",", " ").split() or list(KINDS)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise InputError(f"{VARIABLE}: {unknown[0]!r} is not known; one of {', '.join(KINDS)}")
    return kinds
