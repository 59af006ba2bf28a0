"""Object stores: files complete or absent, ranges through a checked and bounded cache, recovery from broken
connections."""

import hashlib
import json
import os
import pickle
import random
import time
from pathlib import Path

import fsspec
import pytest
import s3fs
import xxhash
from upath import UPath

from dataset_builders.contracts.shard_io import ShardWriter, finished_shard, iter_records, read_record
from dataset_builders.errors import DamagedFile, InputError
from dataset_builders.storage import store
from dataset_builders.storage.files import atomic_path, sha256_file, write_json
from dataset_builders.storage.store import (
    LocalCache,
    cache_bound,
    check_no_userinfo,
    check_reachable,
    local_copy,
    local_dir,
    location,
    publish,
    read_range,
    remove_tree,
    upload_dir,
    walk_files,
    without_userinfo,
)
from tests.helpers.object_store import BUCKET, CuttingProxy, clear_drivers, environment, moto_server

pytestmark = pytest.mark.promise(
    "The data stages write the same bytes from one process, several or a Dask cluster, on a disk or in an object "
    "store whose connections are cut, in any order of completion and after kill -9."
)


@pytest.fixture(scope="module")
def address():
    with moto_server() as found:
        yield found


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ATHANOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_FIRST_WAIT", 0.01)
    return tmp_path / "cache"


@pytest.fixture
def place(address, request) -> UPath:
    return location(f"s3://{BUCKET}/{request.node.name}")


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def put(path: UPath, data: bytes) -> UPath:
    with atomic_path(path) as tmp:
        tmp.write_bytes(data)
    return path


def test_a_local_path_is_a_path_and_a_url_survives_a_process_border(place, tmp_path):
    assert location("a/b") == Path("a/b") and location(f"file://{tmp_path}/x") == tmp_path / "x"
    path = place / "shard.tar"
    assert str(path) == f"s3://{BUCKET}/{place.name}/shard.tar" and location(path) is path
    assert str(pickle.loads(pickle.dumps(path))) == str(path)


def test_a_protocol_without_a_driver_is_an_error_of_one_line():
    with pytest.raises(InputError, match=r"^nothing://x: no driver for nothing:// is installed .*$"):
        location("nothing://x")


def test_a_file_appears_whole_or_not_at_all(place):
    with pytest.raises(KeyError), atomic_path(place / "a.bin") as tmp:
        tmp.write_bytes(b"half")
        raise KeyError
    assert not (place / "a.bin").exists()
    put(place / "a.bin", content(100))
    assert (place / "a.bin").read_bytes() == content(100)
    write_json(place / "a.json", {"b": 1})
    assert json.loads((place / "a.json").read_text()) == {"b": 1}
    assert sha256_file(place / "a.bin") == hashlib.sha256(content(100)).hexdigest()


def test_a_listing_sees_what_another_process_wrote(place):
    put(place / "a", b"1")
    assert [f.name for f in walk_files(place)] == [f.name for f in place.iterdir()] == ["a"]
    other = s3fs.S3FileSystem(skip_instance_cache=True)  # another process could have done this
    other.pipe_file(f"{place.path}/below/b", b"2")
    assert (place / "below" / "b").is_file() and len(list(place.iterdir())) == 2
    assert [f.name for f in walk_files(place)] == ["a", "b"]
    remove_tree(place)
    assert walk_files(place) == [] and not place.exists()


def test_shards_and_records(place, tmp_path):
    for directory in (place, tmp_path):
        with ShardWriter(directory, "train/shard-00000.tar") as writer:
            ranges = [writer.write(f"s/{i:08d}", {"json": b"{}", "0.png": content(3000, i)}) for i in range(5)]
            entry = writer.commit("train")
        assert finished_shard(directory, entry.name) == entry
        shard = directory / entry.name
        assert [k for k, _ in iter_records(shard, entry)] == [r.key for r in ranges]
        for i, r in enumerate(ranges):
            assert read_record(shard, r.offset, r.size, checksum=r.checksum)["0.png"] == content(3000, i)
            assert read_record(shard, r.offset, r.size, ("0.png",), r.checksum) == {"json": b"{}"}
    assert (place / entry.name).read_bytes() == (tmp_path / entry.name).read_bytes()
    for r in ranges:
        data = (tmp_path / entry.name).read_bytes()[r.offset : r.offset + r.size]
        assert xxhash.xxh3_64_intdigest(data) == r.checksum


def test_a_range_is_fetched_once_and_a_spoilt_copy_again(place, cache, monkeypatch):
    path = put(place / "a", content(10_000))
    fetched = []
    original = path.fs.cat_file
    monkeypatch.setattr(path.fs, "cat_file", lambda *a, **k: fetched.append(k) or original(*a, **k))
    for _ in range(3):
        assert read_range(path, 100, 500) == content(10_000)[100:600]
    assert len(fetched) == 1
    (copy,) = [f for f in (cache / "ranges").rglob("*") if f.is_file()]
    for spoilt in (b"", b"short", copy.read_bytes()[:-1] + b"?", bytes(508)):
        copy.write_bytes(spoilt)
        assert read_range(path, 100, 500) == content(10_000)[100:600]
    assert len(fetched) == 5


def test_wrong_bytes_are_noticed(place, tmp_path):
    path = put(place / "a", content(1000))
    here = tmp_path / "local"
    here.write_bytes(content(1000))
    for file in (path, here):
        assert read_range(file, 0, 10, xxhash.xxh3_64_intdigest(content(1000)[:10])) == content(1000)[:10]
        with pytest.raises(DamagedFile, match="the 11 bytes at byte 0 are not the ones that were written; delete it"):
            read_range(file, 0, 11, checksum=1)
        with pytest.raises(DamagedFile, match=r"its SHA-256 is [0-9a-f]{12}\.\.\., and 000000000000\.\.\. was written"):
            local_copy(file, "0" * 64)
        with pytest.raises(DamagedFile, match="cut short: 10 of 50 bytes are left at byte 990"):
            read_range(file, 990, 50)
        with pytest.raises(DamagedFile, match="nowhere is missing"):
            read_range(file.parent / "nowhere", 0, 1)


def test_a_copy_of_a_file_is_made_again_when_it_changed_or_is_spoilt(place):
    path = put(place / "a.parquet", content(1000))
    copy = local_copy(path)
    assert copy.name == "a.parquet" and local_copy(path) == copy
    copy.write_bytes(b"spoilt")
    assert local_copy(path).read_bytes() == content(1000)
    put(path, content(1000, seed=1))
    assert local_copy(path).read_bytes() == content(1000, seed=1)


def test_a_directory_comes_and_goes_whole(place, tmp_path):
    for name in ("b/c.bin", ".hidden", "manifest.json"):
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_bytes(name.encode())
    upload_dir(tmp_path / "here", place, "manifest.json")
    copy = local_dir(place)
    for name in ("b/c.bin", ".hidden", "manifest.json"):
        assert (copy / name).read_text() == name
    assert (tmp_path / "here/b/c.bin").is_file(), "an upload takes nothing away"
    assert local_dir(place) == copy


def test_a_copied_directory_counts_in_the_bound_and_goes_a_day_after_its_use(place, cache, monkeypatch):
    monkeypatch.setenv("ATHANOR_CACHE_GB", "0.001")
    for name in ("old", "new"):
        put(place / name / "weights", content(600_000))
        tree = local_dir(place / name)
        assert (tree / "weights").is_file()
        if name == "old":
            day_ago = time.time() - 90_000
            for file in tree.iterdir():
                os.utime(file, (day_ago, day_ago))
    kept = [p.parent.parent.name for p in (cache / "roots").glob("*/tree/weights")]
    assert len(kept) == 1 and kept[0] == tree.parent.name, "the unused one goes, the other stays"
    assert (tree / "weights").is_file() and local_dir(place / "old").is_dir(), "it comes back when it is wanted"


def test_the_manifest_is_uploaded_last(place, tmp_path, monkeypatch):
    for name in ("manifest.json", "z", "a/b"):
        (tmp_path / "d" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "d" / name).write_text(name)
    order = []
    monkeypatch.setattr(store, "publish", lambda local, path: order.append(path.name) or publish(local, path))
    upload_dir(tmp_path / "d", place, "manifest.json")
    assert order == ["b", "z", "manifest.json"]
    order.clear()
    upload_dir(tmp_path / "d", place, "manifest.json")
    assert order == ["manifest.json"], "what is there already is not sent again"


def _bytes_below(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def test_the_cache_stays_within_its_bound(tmp_path):
    cache = LocalCache(tmp_path / "c", bound=1_000_000)
    data = {i: content(20_000, i) for i in range(200)}
    for i, bytes_ in data.items():
        assert cache.read(f"key {i}", lambda b=bytes_: b) == bytes_
        if i % 10 == 0:
            cache.read("key 0", lambda: data[0])
        assert _bytes_below(tmp_path) <= 1_000_000 * 1.01
    assert _bytes_below(tmp_path) > 500_000
    fetched = []
    cache.read("key 199", lambda: fetched.append(199) or data[199])
    cache.read("key 0", lambda: fetched.append(0) or data[0])
    assert fetched == [], "the newest and the most used are kept"
    cache.read("key 1", lambda: fetched.append(1) or data[1])
    assert fetched == [1], "the oldest has gone"


def test_several_processes_share_the_bound(tmp_path):
    caches = [LocalCache(tmp_path / "c", bound=1_000_000) for _ in range(3)]
    for i in range(300):
        caches[i % 3].read(f"key {i}", lambda i=i: content(20_000, i))
    assert _bytes_below(tmp_path) <= 1_000_000


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_a_bound_that_is_none(text, monkeypatch):
    monkeypatch.setenv("ATHANOR_CACHE_GB", text)
    with pytest.raises(InputError, match=f"ATHANOR_CACHE_GB={text} is not a positive number of gigabytes"):
        cache_bound()


def test_a_connection_cut_in_a_read_and_in_a_write(address, place, cache):
    data = content(3_000_000)
    with CuttingProxy(address) as proxy, environment(proxy.address):
        path = location(str(place / "big"))
        proxy.cut_up += [100_000, 1_000_000]
        put(path, data)
        assert proxy.cuts == 2 and not list(Path(os.environ["ATHANOR_CACHE_DIR"], "uploads").iterdir())
        proxy.cut_down += [50_000, 700_000]
        assert read_range(path, 500, 2_000_000) == data[500:2_000_500]
        assert proxy.cuts == 4
        proxy.cut_down += [300_000]
        assert local_copy(path, hashlib.sha256(data).hexdigest()).read_bytes() == data
        assert proxy.cuts == 5


@pytest.mark.full
def test_a_store_that_stays_broken_is_an_error_that_says_what_failed(address, place):
    put(place / "a", content(100_000))
    with CuttingProxy(address) as proxy, environment(proxy.address):
        proxy.cut_down += [30_000] * 100
        with pytest.raises(OSError, match=r"^cannot read s3://.*/a, tried 5 times: "):
            read_range(location(str(place / "a")), 0, 100_000)
    clear_drivers()


def test_a_store_that_does_not_answer_or_knows_us_not(address, place, monkeypatch):
    check_reachable(place)
    check_reachable(location(f"s3://{BUCKET}"))
    with environment("http://127.0.0.1:9"), pytest.raises(InputError, match=r"^s3://.* cannot be reached \(.*AWS_"):
        check_reachable(location("s3://bucket/root"))


def test_a_shard_that_is_cut_or_damaged_is_not_read_as_less(tmp_path):
    with ShardWriter(tmp_path, "a.tar") as writer:
        ranges = [writer.write(f"s/{i:08d}", {"json": b"{}", "0.png": content(700, i)}) for i in range(3)]
        writer.commit("train")
    whole = (tmp_path / "a.tar").read_bytes()
    last, end = ranges[-1], ranges[-1].offset + ranges[-1].size
    for size in (end - 1, last.offset + 600, last.offset + 100, end):  # an end needs two empty blocks
        (tmp_path / "cut.tar").write_bytes(whole[:size])
        with pytest.raises(DamagedFile):
            list(iter_records(tmp_path / "cut.tar"))
        if size < end - 512:  # a tar that lacks only padding is whole
            with pytest.raises(DamagedFile):
                read_record(tmp_path / "cut.tar", last.offset, last.size)
    for place in (0, 130, 150, 156, 300):  # name, size, checksum, kind, padding of a header
        (tmp_path / "bad.tar").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DamagedFile):
            read_record(tmp_path / "bad.tar", ranges[0].offset, ranges[0].size)


@pytest.mark.parametrize("key", ["../../escaped", "sub/../../../escaped", "/escaped-at-the-top", "a/.."])
def test_an_object_whose_name_leads_out_is_not_copied(cache, key):
    """Keys of a store are any text: `..` and a leading / would otherwise write outside of the copy."""
    drive = fsspec.filesystem("memory")
    drive.store.clear()
    directory = location("memory://bucket/model")
    drive.pipe("/bucket/model/config.json", b"{}")
    drive.store[f"/bucket/model/{key}"] = drive.store["/bucket/model/config.json"]
    with pytest.raises(InputError, match="which is not a file below it; delete that object"):
        local_dir(directory)
    assert not [path for path in cache.parent.rglob("*") if "escaped" in path.name]
    assert not Path("/escaped-at-the-top").exists()


SECRETS = {
    "s3://AKIA:sec/ret+canary@bucket/a": "s3://...@bucket/a",
    "s3://canary@bucket": "s3://...@bucket",
    "HTTP://me:canary@host:5000/#/x": "HTTP://...@host:5000/#/x",
    "postgresql+psycopg2://me:can@ary@host/runs": "postgresql+psycopg2://...@host/runs",
    "abfs://box:canary@account/x": "abfs://...@account/x",
    "memory://a:canary@b": "memory://...@b",
}


@pytest.mark.parametrize("url", SECRETS)
def test_a_url_with_a_password_is_refused_without_showing_it(url):
    assert without_userinfo(f"see {url}, or '{url}'") == f"see {SECRETS[url]}, or '{SECRETS[url]}'"
    with pytest.raises(InputError, match="must not carry a key or password") as caught:
        location(url)
    assert "canary" not in str(caught.value) and "ary@" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("/a:b@c", "abfs://box@account/x", "http://host:5000/x@y", "s3://b/c:d@e", "postgresql://me@host/d"),
        *("a/b", "tcp://h:1"),
    ],
)
def test_what_has_an_at_sign_and_no_password(text):
    assert without_userinfo(text) == text
    check_no_userinfo(text)
