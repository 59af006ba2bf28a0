"""Which images a row may name and which it may not: nothing on this machine outside of the source."""

import base64
import dataclasses
import os
import sys
import urllib.parse
from types import SimpleNamespace

import pytest

from dataset_builders.contracts.sample import SkipSample
from dataset_builders.errors import InputError
from dataset_builders.readers.image_refs import ImageReader, check_image_root
from dataset_builders.readers.parts import Part
from dataset_builders.storage import row_objects
from dataset_builders.storage.row_objects import DATA_STORES_VARIABLE, stores_of_rows
from dataset_builders.storage.store import location
from tests.helpers.json_rows import data_uri, write_file
from tests.helpers.object_store import BUCKET, environment, free_port, moto_server
from tests.helpers.raw_rows import encode, picture, png

pytestmark = pytest.mark.promise(
    "Images that cost seconds per kilobyte, damaged JPEGs, endless chat templates and links out of a source "
    "are refused with a reason."
)

ONE = png(1)


def part_of(source, name="s/rows.jsonl"):
    return Part(path=source / name, name=name, subset="s", span=(0, 0), first_row=0, file_row=0, num_rows=0)


@pytest.fixture
def source(tmp_path):
    write_file(tmp_path / "outside.png", ONE)
    write_file(tmp_path / "source-2/x.png", ONE)
    source = tmp_path / "source"
    write_file(source / "pics/1.png", ONE)
    write_file(source / "s/a b.png", ONE)
    (source / "s/inside.png").symlink_to(source / "pics/1.png")
    (source / "link.png").symlink_to(tmp_path / "outside.png")
    (source / "links").symlink_to(tmp_path)
    (source / "s/loop").symlink_to(source / "s/loop")
    return source


def refused(reader, ref):
    with pytest.raises(SkipSample) as caught:
        reader.read(ref)
    caught.value.detail.encode()
    return caught.value


@pytest.mark.parametrize(
    "ref",
    [
        *("a b.png", "./a b.png", "../pics/1.png", "../s/../pics//1.png", "..\\pics\\1.png"),
        *("inside.png", "{source}/pics/1.png"),
    ],
)
def test_paths_are_relative_to_the_file_that_names_them(ref, source):
    assert ImageReader(part_of(source)).read(ref.format(source=source)) == ONE


def test_paths_are_relative_to_the_root_of_all_files_or_of_their_own(source):
    assert ImageReader(part_of(source), "pics").read("1.png") == ONE
    assert refused(ImageReader(part_of(source)), "1.png").reason == "image_not_found"
    roots = {"s/rows.jsonl": "pics", "s/other.jsonl": ""}
    assert ImageReader(part_of(source), roots).read("1.png") == ONE
    assert refused(ImageReader(part_of(source, "s/other.jsonl"), roots), "1.png").reason == "image_not_found"
    with pytest.raises(InputError, match=r"image_root names no directory for the rows of s/third\.jsonl"):
        ImageReader(part_of(source, "s/third.jsonl"), roots)


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        *((ref, "its suffix is of no image") for ref in ("rows.jsonl", "notes.TXT", "s3://bucket/rows.json")),
        ("https://example.com/a.png", "download"),
        ("C:\\data\\1.png", "a path on a drive of Windows"),
        ("..\\..\\outside.png", "outside of the source"),
    ],
)
def test_a_refusal_says_why(ref, words, source):
    assert words in refused(ImageReader(part_of(source)), ref).detail


def test_a_file_may_have_a_name_with_a_backslash(source):
    write_file(source / "s/a\\b.png", ONE + b"b")
    assert ImageReader(part_of(source)).read("a\\b.png") == ONE + b"b"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_base64_without_a_head_is_read(kind, source):
    data = encode(picture(1), kind)
    assert ImageReader(part_of(source)).read(base64.b64encode(data).decode()) == data
    assert refused(ImageReader(part_of(source)), base64.b64encode(data).decode() + "?").reason == "decode_error"


OUTSIDE = ["../../outside.png", "../../source-2/x.png", "/etc/hostname", "../link.png", "../links/outside.png", "loop"]
NO_PATHS = ["", " ", ".", "..", "../pics", "no.png", "a b.png/x", "\0", "a\0b", "x" * 5000, "\ud800", "\udc80.png"]
NO_ADDRESSES = [
    *("http://example.com/a.png", "HTTPS://example.com/a.png", "ftp://example.com/a.png", "memory://a/b.png"),
    *("file:///etc/hostname", "local:///etc/hostname", "simplecache::file:///etc/hostname"),
    *("s3://", "s3://bucket", "s3:///x", "s3://a/b::file:///etc/hostname", "C:\\pictures\\1.png"),
]


@pytest.mark.parametrize("ref", [*OUTSIDE, *NO_PATHS, *NO_ADDRESSES])
def test_what_is_not_below_the_source_is_not_found(ref, source):
    assert refused(ImageReader(part_of(source)), ref).reason == "image_not_found"


def test_a_pipe_is_no_file(source):
    os.mkfifo(source / "s/pipe.png")
    assert refused(ImageReader(part_of(source)), "pipe.png").reason == "image_not_found"


def test_a_file_of_absurd_size_is_not_read(source):
    reader = ImageReader(part_of(source), "pics")
    assert reader.read("1.png", len(ONE)) == ONE
    with pytest.raises(SkipSample, match="bomb: a file of"):
        reader.read("1.png", len(ONE) - 1)


def test_a_broken_disk_is_no_fault_of_the_row(source, monkeypatch):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("pathlib.Path.read_bytes", fail)
    with pytest.raises(OSError, match="Input/output"):
        ImageReader(part_of(source), "pics").read("1.png")


def test_data_uris(source):
    reader = ImageReader(part_of(source))
    plain = data_uri(ONE)
    head, body = plain.split(",")
    assert reader.read(plain) == ONE
    assert reader.read(f"{head},{body[:40]}\n {body[40:]}") == ONE
    assert reader.read(f"{head.upper()},{urllib.parse.quote(body, safe='')}") == ONE
    assert reader.read(f"data:image/png;charset=x;base64,{body}") == ONE
    assert reader.read(f"data:image/png,{urllib.parse.quote(ONE)}") == ONE
    for broken in (f"{head},{body[:-1]}", f"{head},*{body}", f"{head},\u00e9", "data:image/png;base64"):
        assert refused(reader, broken).reason == "decode_error", broken[-30:]


def test_image_root_must_be_a_directory_inside(source):
    check_image_root(source, "")
    check_image_root(source, "pics")
    for wrong in ("no", "../source-2", str(source / "pics"), "pics/1.png", "pics/../..", {"s/rows.jsonl": ".."}):
        with pytest.raises(InputError, match=r"image_root='.*' is not a directory below"):
            check_image_root(source, wrong)


@pytest.mark.full
def test_objects_of_a_store_and_paths_beside_a_stored_file(tmp_path, source):
    with moto_server():
        stored = location(f"s3://{BUCKET}/data/set")
        (stored / "pics/1.png").write_bytes(ONE)
        (stored / "s/rows.jsonl").write_bytes(b"\n")
        location(f"s3://{BUCKET}/data/set-2/x.png").write_bytes(ONE)
        here, there = ImageReader(part_of(source)), ImageReader(part_of(stored))
        assert here.read(f"s3://{BUCKET}/data/set/pics/1.png") == ONE
        assert there.read(f"s3://{BUCKET}/data/set-2/x.png") == ONE  # an address may be in any store
        assert there.read("../pics/1.png") == ONE and ImageReader(part_of(stored), "pics").read("1.png") == ONE
        for wrong in ("../../set-2/x.png", "../pics/2.png", "/etc/hostname", "../pics", f"/{BUCKET}/data/set-2/x.png"):
            assert refused(there, wrong).reason == "image_not_found"
        for wrong in (f"s3://{BUCKET}/no.png", "s3://no-such-bucket/no.png", "s3://a_b.-c/x"):
            assert refused(here, wrong).reason == "image_not_found"
        _rows_of_a_request_name_allowed_stores_alone(source, stored)


def _rows_of_a_request_name_allowed_stores_alone(source, stored):
    for allowed, ref, is_read in (
        (f"s3://{BUCKET}/data", f"s3://{BUCKET}/data/set/pics/1.png", True),
        (f"s3://{BUCKET}", f"s3://{BUCKET}/data/set-2/x.png", True),
        (f"gs://other s3://{BUCKET}/data/set/", f"s3://{BUCKET}/data/set/pics/1.png", True),
        (f"s3://{BUCKET}/data/set", f"s3://{BUCKET}/data/set-2/x.png", False),
        (f"s3://{BUCKET}/data/set", f"s3://{BUCKET}/data/set/../set-2/x.png", False),
        (f"s3://{BUCKET}/data", f"s3a://{BUCKET}/data/set/pics/1.png", False),
        (f"s3://{BUCKET}x", f"s3://{BUCKET}/data/set/pics/1.png", False),
        ("", f"s3://{BUCKET}/data/set/pics/1.png", False),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(DATA_STORES_VARIABLE, allowed)
            local = dataclasses.replace(part_of(source), stores=stores_of_rows(source))
            beside = dataclasses.replace(part_of(stored), stores=stores_of_rows(stored))
        if is_read:
            assert ImageReader(local).read(ref) == ONE
        else:
            assert DATA_STORES_VARIABLE in refused(ImageReader(local), ref).detail
        assert ImageReader(beside).read("../pics/1.png") == ImageReader(beside).read(f"{stored}/pics/1.png") == ONE


@pytest.mark.parametrize("error", ["NoCredentialsError", "DefaultCredentialsError", "ClientAuthenticationError"])
def test_rows_of_a_store_without_keys_are_left_out_after_one_try(error, source, monkeypatch):
    asked = []

    def fail(address):
        asked.append(address)
        raise type(error, (Exception,), {})("Unable to locate \x1b credentials")

    monkeypatch.setattr(row_objects, "_unusable", {})
    monkeypatch.setattr(
        row_objects, "location", lambda address: SimpleNamespace(fs=SimpleNamespace(info=fail), path=address)
    )
    reader = ImageReader(part_of(source))
    for i in range(60):
        skip = refused(reader, f"s3://bucket-{i}/x.png")
        assert skip.reason == "image_not_found" and "s3 cannot be read with the keys in the environment" in skip.detail
        assert skip.detail.isascii() and skip.detail.isprintable()
    assert len(asked) == 1
    assert "az://one cannot be read" in refused(reader, "az://one/x.png").detail  # each account has keys of its own
    assert "az://two cannot be read" in refused(reader, "az://two/x.png").detail and len(asked) == 3


def test_rows_of_a_store_without_a_driver_or_with_a_password_are_left_out(source, monkeypatch):
    monkeypatch.setattr(row_objects, "_unusable", {})
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    reader = ImageReader(part_of(source))
    assert "no driver for gs:// is installed" in refused(reader, "gs://bucket/x.png").detail
    assert "must not carry a key" in refused(reader, "s3://key@bucket/x.png").detail
    assert row_objects._unusable == {}


def test_a_store_that_does_not_answer_ends_the_command_with_one_line(source, monkeypatch):
    monkeypatch.setattr(row_objects, "_unusable", {})
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    line = r"s3://bucket/x.png, which a row names, .* does not answer .*take out"
    with environment(f"http://127.0.0.1:{free_port()}"), pytest.raises(InputError, match=line):
        ImageReader(part_of(source)).read("s3://bucket/x.png")
