"""Secrets of the environment are in nothing that a run leaves: files, databases, logs, jobs of a cluster, `ps`."""

import base64
import gzip
import io
import json
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, PngImagePlugin

from tests.helpers.canary import CANARIES, SECRETS, assert_nowhere, athanor, find, scan, seen_command_lines, spellings
from tests.helpers.compose_file import INFRA
from tests.helpers.small_run import SMALL

pytestmark = [
    pytest.mark.full,
    pytest.mark.promise(
        "Secrets appear in no file, log, database or command line of a run, servers ask for a login, and no "
        "foreign pickle or code runs."
    ),
]

RUN = {**SMALL, "tokenize.codec": "u8_zstd", "train.num_steps": 3}


# The scanner finds a secret in every kind of file that a run leaves.


def _sqlite(path: Path, secret: str) -> None:
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = wal")
    database.execute("CREATE TABLE t (a TEXT)")
    database.execute("INSERT INTO t VALUES (?)", ("x" * 5000 + secret + "y" * 5000,))
    database.commit()
    (path.parent / "kept-open").mkdir()
    for file in path.parent.glob(f"{path.name}*"):  # before closing, which moves the log into the file
        (path.parent / "kept-open" / file.name).write_bytes(file.read_bytes())
    database.close()


def _tar(inner: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("0.json")
        info.size = len(inner)
        tar.addfile(info, io.BytesIO(inner))
    return out.getvalue()


def _zip(inner: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a", inner)
    return out.getvalue()


def _parquet(cell: str | dict) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"a": [cell]}), out, compression="zstd")
    return out.getvalue()


def _png(text: str) -> bytes:
    about, out = PngImagePlugin.PngInfo(), io.BytesIO()
    about.add_text("Comment", text, zip=True)
    Image.new("RGB", (2, 2)).save(out, "PNG", pnginfo=about)
    return out.getvalue()


PACKED = {
    "text": lambda secret: f"a\n{secret}\nb".encode(),
    "zstd in tar": lambda secret: _tar(pa.compress(secret.encode() * 2, codec="zstd", asbytes=True)),
    "gzip": lambda secret: gzip.compress(secret.encode()),
    "zip": lambda secret: _zip(secret.encode()),
    "text in parquet": _parquet,
    "png in parquet in tar": lambda secret: _tar(_parquet({"bytes": _png(secret), "path": ""})),
}


@pytest.mark.parametrize("kind", PACKED)
def test_the_scanner_finds_a_secret_in(tmp_path, kind):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(PACKED[kind](CANARIES[0]))
    (hit, *_) = scan(tmp_path, CANARIES)
    assert hit.startswith(f"a/file: {CANARIES[0]} (")
    (tmp_path / "a" / "file").write_bytes(PACKED[kind]("nothing"))
    assert scan(tmp_path, CANARIES) == []


@pytest.mark.parametrize("canary", CANARIES, ids=range(len(CANARIES)))  # they differ from process to process
@pytest.mark.parametrize("shift", range(3))
def test_the_scanner_finds_each_spelling(canary, shift):
    for name, spelt in spellings(canary).items():
        assert len(spelt) > 12 and find(b"\0" + spelt + b"\1", CANARIES), name
    for encode in (subprocess.list2cmdline, repr, json.dumps):
        assert find(encode([canary] if encode is subprocess.list2cmdline else canary).encode(), CANARIES)
    text = "x" * shift + f"user:{canary}@host"
    assert find(base64.b64encode(text.encode()), CANARIES) and find(base64.urlsafe_b64encode(text.encode()), CANARIES)


def test_the_scanner_finds_a_secret_in_a_database_and_its_log(tmp_path):
    _sqlite(tmp_path / "x.db", CANARIES[0])
    hits = scan(tmp_path, CANARIES)
    assert [hit for hit in hits if hit.startswith("x.db:") and hit.endswith("in a row")]
    assert [hit for hit in hits if hit.startswith("kept-open/x.db-wal:")]


def test_the_scanner_finds_a_secret_in_names(tmp_path):
    (tmp_path / CANARIES[0].replace("/", "%2F")).touch()
    (tmp_path / "link").symlink_to(f"/nowhere/{CANARIES[-1]}")
    hits = scan(tmp_path, CANARIES)
    assert any("in the name" in hit for hit in hits) and any("in the link" in hit for hit in hits)


def test_command_lines_are_seen(tmp_path):
    with seen_command_lines() as seen:
        subprocess.run([sys.executable, "-c", "import time; time.sleep(0.5)", CANARIES[0]], check=True)
    assert find(b"\n".join(seen), CANARIES)


# A run


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess, set[bytes]]:
    """Run the whole pipeline with the real trainer, without a service."""
    place = tmp_path_factory.mktemp("canary")
    with seen_command_lines() as seen:
        done = athanor(place, "run", RUN)
    assert done.returncode == 0, done.stderr
    return place, done, seen


TRAINER = b"-m\0trainer"  # the length of a command line in /proc


def test_a_run_leaves_no_secret(ran):
    place, done, seen = ran
    assert "15 of 15 stages made" in done.stdout
    left = {path.name for path in (place / "root").rglob("*")}
    assert {"mlflow.db", "prefect.db", "manifest.json", "report.html", "metrics.jsonl"} <= left
    assert any(TRAINER in line for line in seen) and len(list((place / "root" / "logs").iterdir())) == 1
    assert_nowhere(place, done.stdout, done.stderr, seen)


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes"])
def test_what_would_be_submitted_holds_no_secret(ran, launcher):
    job_file = {"slurm": "slurm/header.sbatch", "kubernetes": "kubernetes/trainjob.yaml"}[launcher]
    words = [f"--set=execution.cluster.{each}" for each in (f"launcher={launcher}", f"job_file={INFRA / job_file}")]
    done = athanor(ran[0], "plan", RUN, *words)
    assert done.returncode == 0, done.stderr
    assert_nowhere(ran[0], done.stdout, done.stderr)


URL = "s3://{AWS_ACCESS_KEY_ID}:{AWS_SECRET_ACCESS_KEY}@bucket/x".format(**SECRETS)
FAILING = {
    "data": ["--debug", "--set", f"data={URL}"],
    "root": ["--root", URL],
}


@pytest.mark.parametrize("what", FAILING)
def test_a_run_that_is_refused_shows_no_secret(tmp_path, what):
    """A secret in a wrong place is only in this process's own command line. See test_security.py for more."""
    done = athanor(tmp_path, "run", RUN, *FAILING[what])
    assert done.returncode == 2 and "must not carry a key" in done.stderr
    assert_nowhere(tmp_path, done.stdout, done.stderr)


def test_a_tracking_server_that_is_not_there_shows_no_secret(ran):
    """The server's address, which wrongly holds a password, is in no message, page or record."""
    address = f"http://me:{SECRETS['MLFLOW_TRACKING_PASSWORD']}@127.0.0.1:9"
    done = athanor(ran[0], "run", RUN, MLFLOW_TRACKING_URI=address)
    assert_nowhere(ran[0], done.stdout, done.stderr)
