"""Objects of stores that rows of data name by their addresses. Every one of them is read here.

Rows are untrusted, and a service reads with its own keys. So the rows of a request may name only objects below the
stores of ATHANOR_DATA_STORES, as its settings may, or below the source itself. Where the variable is not set, as for a
command that a person types, rows may name any store. A service sets it, perhaps to nothing.

A row is left out for an object that is not there, or that this machine may not or cannot read: no keys, no driver.
A store that does not answer is no fault of the row, and ends the command, since the same rows are read once it answers.
"""

import os
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from dataset_builders.errors import InputError, in_ascii, one_line
from dataset_builders.storage.store import StorePath, is_local, location

DATA_STORES_VARIABLE = "ATHANOR_DATA_STORES"
STORE_URL = re.compile(r"(s3a?|gs|gcs|hf|az|abfss?|oss|oci)://[A-Za-z0-9][A-Za-z0-9._@-]*(/[^\0]*)?")
_NOT_THERE = (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError)
_ABOUT_KEYS = re.compile("Credential|Auth|Token|Profile")  # names of the drivers' own errors

_unusable: dict[str, str] = {}  # protocol, or bucket where each has keys of its own -> why this process cannot read it


Result = TypeVar("Result")


class NoObject(Exception):
    """An object that a row names cannot be read; the text says why."""


def named_stores() -> list[str]:
    """Return the object stores of ATHANOR_DATA_STORES, which are separated by spaces or commas."""
    stores = os.environ.get(DATA_STORES_VARIABLE, "").replace(",", " ").split()
    for store in stores:
        if not STORE_URL.fullmatch(store) or ".." in store.split("/"):
            raise InputError(
                f"{DATA_STORES_VARIABLE}: {store!r} is not the URL of an object store, as s3://bucket/sets"
            )
    return stores


def stores_of_rows(source: StorePath) -> tuple[str, ...] | None:
    """Return the stores whose objects the rows of a source may name; None if they may name any."""
    if DATA_STORES_VARIABLE not in os.environ:
        return None
    return (*named_stores(), *(() if is_local(source) else (str(source),)))


def is_below(address: str, stores: Sequence[str]) -> bool:
    """Whether an address is one of the stores, or below one, as every program resolves it."""
    # fsspec reads a :: as two addresses, one in the other, and some programs resolve `..` in a key.
    is_plain = "::" not in address and ".." not in address.split("/")
    return is_plain and any(address == store or address.startswith(store.rstrip("/") + "/") for store in stores)


def read_object(address: str, stores: Sequence[str] | None, check_size: Callable[[int], None]) -> bytes:
    """Return the bytes of an object; `check_size` is called with its size in bytes before it is read.

    Raises:
        NoObject: the address is not below one of `stores_of_rows`, or the object is not there or cannot be read here.
        InputError: the store does not answer.
    """
    if stores is not None and not is_below(address, stores):
        raise NoObject(f"it is below no store of {DATA_STORES_VARIABLE}; add its store where the service is started")
    bucket = "/".join(address.split("/")[:3])
    keys_of = bucket.partition("://")[0] if bucket.startswith(("s3", "gs", "gcs")) else bucket
    if keys_of in _unusable:
        raise NoObject(_unusable[keys_of])
    try:
        path = location(address)
    except InputError as error:  # no driver, or a password in the address
        raise NoObject(str(error)) from error
    size = _asked(lambda: path.fs.info(path.path).get("size"), address, keys_of)
    check_size(size or 0)
    return _asked(lambda: path.fs.cat_file(path.path), address, keys_of)


def _asked(action: Callable[[], Result], address: str, keys_of: str) -> Result:
    """Return the result of one call to a store."""
    try:
        return action()
    except _NOT_THERE as error:
        raise NoObject(ascii(one_line(error, 100))) from None
    except Exception as error:  # every driver raises its own kinds of errors
        why = in_ascii(one_line(error) or type(error).__name__)
        if any(_ABOUT_KEYS.search(kind.__name__) for kind in type(error).__mro__):
            # Remembered, since the driver looks for keys for seconds each time.
            _unusable[keys_of] = f"{keys_of} cannot be read with the keys in the environment ({why})"
            raise NoObject(_unusable[keys_of]) from None
        raise InputError(
            f"{in_ascii(address)}, which a row names, cannot be read: its store does not answer ({why}); run the same "
            "command again, mend the endpoint in the environment (AWS_ENDPOINT_URL for s3://), or take out the row"
        ) from error
