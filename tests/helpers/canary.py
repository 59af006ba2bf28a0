"""Secrets in the environment of athanor's commands, and searches for them: in everything below a directory, as they
are, encoded and in compressed files, and in the command lines that `ps` shows to every user of a machine."""

import base64
import binascii
import contextlib
import gzip
import io
import os
import sqlite3
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, quote_plus

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

_OURS = f"{os.getpid():07d}"  # command lines of another session of these tests do not count
SECRETS = {
    "AWS_ACCESS_KEY_ID": f"AKIACANARY7QZ2AC{_OURS}CESS",
    "AWS_SECRET_ACCESS_KEY": f"canary/aws+Secret/9fK2{_OURS}=x7Q",
    "AWS_SESSION_TOKEN": f"canary+aws/Session/Tok{_OURS}3n==",
    "HF_TOKEN": f"hf_canaryTokenOfTheHub{_OURS}0123",
    "PGPASSWORD": f"canary&postgres?Pass {_OURS}word",
    "MLFLOW_TRACKING_PASSWORD": f"canary-mlflow-Passw{_OURS}0rd!",
    "PREFECT_API_AUTH_STRING": f"admin:canary-prefect-Au{_OURS}th%1",
    "PREFECT_SERVER_API_AUTH_STRING": f"admin:canary-prefect-Au{_OURS}th%1",
    "ATHANOR_DATABASE_PASSWORD": f"canary~database~Pass{_OURS}w0rd",
    "WANDB_API_KEY": f"canary0of0somebody0elses0{_OURS}tool",
}
CANARIES = sorted({value.removeprefix("admin:") for value in SECRETS.values()})
EVERY = 0.05  # seconds between two looks at command lines; torchrun, ranks, servers and workers all run longer
DEEPEST = 4  # levels of archives within archives
_ZSTD, _GZIP, _ZIP = b"\x28\xb5\x2f\xfd", b"\x1f\x8b", b"PK\x03\x04"
_SQLITE, _PARQUET, _PNG = b"SQLite format 3\0", b"PAR1", b"\x89PNG"


def environment(place: Path) -> dict[str, str]:
    """Return an environment in which all files that programs write by themselves are below `place`."""
    for name in ("home", "tmp"):
        (place / name).mkdir(exist_ok=True)
    without = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME")
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    return {**inherited, "HOME": str(place / "home"), "TMPDIR": str(place / "tmp"), "PYTHONPATH": path, **SECRETS}


def athanor(
    place: Path, command: str, settings: Mapping[str, object], *arguments: str, seconds: float = 300, **more: str
) -> subprocess.CompletedProcess:
    """Run an athanor command on the root `place`/root in `environment`, with more variables."""
    sets = [f"--set={key}={value}" for key, value in settings.items()]
    words = [sys.executable, "-m", "flows.cli.main", command, "--root", str(place / "root"), *sets, *arguments]
    env = {**environment(place), **more}
    return subprocess.run(words, cwd=place, env=env, capture_output=True, text=True, timeout=seconds, check=False)


@contextlib.contextmanager
def seen_command_lines() -> Iterator[set[bytes]]:
    """Collect the command lines of all processes while the block lasts."""
    seen: set[bytes] = set()
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.add(path.read_bytes())
            ended.wait(EVERY)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def assert_nowhere(place: Path, *outputs: str | set[bytes]) -> None:
    """Assert that no secret is in the outputs or in anything below `place`."""
    said = [text.encode() if isinstance(text, str) else b"\n".join(text) for text in outputs]
    assert [hit for data in said for hit in find(data, CANARIES)] == []
    assert scan(place, CANARIES) == []


def spellings(secret: str) -> dict[str, bytes]:
    """Return the forms in which a secret may be in a file: name of the encoding -> bytes to search for."""
    data = secret.encode()
    found = {"plain": data, "hex": binascii.hexlify(data), "HEX": binascii.hexlify(data).upper()}
    found |= {"URL": quote(secret, safe="").encode(), "URL+": quote_plus(secret).encode()}
    found |= {"reversed": data[::-1], "UTF-16": secret.encode("utf-16-le")}
    for shift in range(3):  # the secret may start at any of three positions in a group
        for name, encode in (("base64", base64.b64encode), ("base64url", base64.urlsafe_b64encode)):
            whole = encode(bytes(shift) + data)
            sure = whole[(0, 2, 3)[shift] : len(whole) // 4 * 4 - 4]  # no letters that depend on neighbouring bytes
            found[f"{name} at {shift}"] = sure
    return found


def find(data: bytes, secrets: Iterable[str]) -> list[str]:
    """Return the forms of secrets that are in the bytes, as they are and unpacked."""
    wanted = [(secret, name, spelt) for secret in secrets for name, spelt in spellings(secret).items()]
    return sorted(
        {f"{secret} ({name}{where})" for part, where in _parts(data) for secret, name, spelt in wanted if spelt in part}
    )


def scan(directory: Path, secrets: Iterable[str]) -> list[str]:
    """Return `file: secret (form)` for everything found below a directory. Names of files and link targets
    count too."""
    secrets, found = list(secrets), []
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        found += [f"{name}: {hit} in the name" for hit in find(name.encode("utf-8", "surrogateescape"), secrets)]
        if path.is_symlink():
            found += [f"{name}: {hit} in the link" for hit in find(str(path.readlink()).encode(), secrets)]
        elif path.is_file():
            with contextlib.suppress(FileNotFoundError):  # a server's file that was deleted in the meantime
                found += [f"{name}: {hit}" for hit in find(path.read_bytes(), secrets)]
                if path.suffix in (".db", ".sqlite", ".sqlite3"):
                    found += [f"{name}: {hit} in a row" for hit in find(b"\n".join(_rows(path)), secrets)]
    return found


def _parts(data: bytes, where: str = "", depth: int = 0) -> Iterator[tuple[bytes, str]]:
    """Yield the bytes, and everything that can be unpacked from them."""
    yield data, where
    if depth == DEEPEST:
        return
    for kind, inner in _unpacked(data):
        yield from _parts(inner, f"{where} in {kind}", depth + 1)


def _unpacked(data: bytes) -> Iterator[tuple[str, bytes]]:
    with contextlib.suppress(Exception):  # not an archive, although it looks like one, or an incomplete one
        if data.startswith(_GZIP):
            yield "gzip", gzip.decompress(data)
        elif data.startswith(_ZSTD):
            yield "zstd", pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()
        elif data.startswith(_ZIP):
            with zipfile.ZipFile(io.BytesIO(data)) as file:
                yield from (("zip", file.read(name)) for name in file.namelist())
        elif data.startswith(_PARQUET):
            yield from (("parquet", cell) for cell in _cells(data))
        elif data.startswith(_PNG):
            with Image.open(io.BytesIO(data)) as image:
                image.load()
                yield "png", repr(image.info).encode()
        elif data[257:262] == b"ustar":
            with tarfile.open(fileobj=io.BytesIO(data)) as file:
                yield from (("tar", file.extractfile(member).read()) for member in file if member.isreg())


def _cells(data: bytes) -> Iterator[bytes]:
    """Return all text of a table as one value, then each value that is bytes, for example an image."""
    table = pq.read_table(io.BytesIO(data))
    values = [value for column in table.columns for value in column.to_pylist()]
    yield f"{table.schema.metadata}\n{values}".encode("utf-8", "surrogateescape")
    yield from _bytes_in(values)


def _bytes_in(value: object) -> Iterator[bytes]:
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _bytes_in(inner)


def _rows(path: Path) -> Iterator[bytes]:
    """Return every value of a SQLite file, read from its pages and its write-ahead log."""
    with (
        contextlib.suppress(sqlite3.DatabaseError),
        contextlib.closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=20)) as database,
    ):
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            for row in database.execute(f'SELECT * FROM "{table}"'):
                yield b" ".join(v if isinstance(v, bytes) else str(v).encode("utf-8", "surrogateescape") for v in row)
