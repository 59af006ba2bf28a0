"""Raw data from a directory, a file or the hub: a digest of the files read, and one clear line when it is missing."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from dataset_builders.errors import InputError
from dataset_builders.readers.source_files import list_files
from dataset_builders.sources.registry import BUILDERS, get_builder
from dataset_builders.sources.the_cauldron import patterns
from stages.shared.inputs import raw_source
from stages.shared.inputs.raw_source import content_digest, open_raw
from tests.helpers.hub import hub_server
from tests.helpers.json_rows import write_file
from tests.helpers.raw_rows import plain_rows, png, write_source

REPO = Path(__file__).parents[4]
ALL = patterns(())


def test_a_directory_is_known_by_its_content(tmp_path):
    one = write_source(tmp_path / "one", {"a": plain_rows(2), "b": plain_rows(2, 9)})
    same = write_source(tmp_path / "same", {"a": plain_rows(2), "b": plain_rows(2, 9)})
    other = write_source(tmp_path / "other", {"a": plain_rows(2), "b": plain_rows(2, 10)})
    for name in ("README.md", "a/notes.txt", ".cache/train-9.parquet", "a/.train-9.parquet"):
        (same / name).parent.mkdir(parents=True, exist_ok=True)
        (same / name).write_text("not data")
    found = open_raw(str(one), (), "the_cauldron")
    assert (found.dir, found.name) == (one, "raw") and len(found.digest) == 16
    assert open_raw(str(same), (), "the_cauldron").digest == found.digest
    assert open_raw(str(other), (), "the_cauldron").digest != found.digest
    only = [content_digest(source, patterns(["a"])) for source in (one, other)]
    assert only[0] == only[1] != content_digest(one, patterns(["b"]))


def test_pictures_that_rows_may_point_at_count(tmp_path):
    source = write_source(tmp_path, {"a": plain_rows(2)})
    before = content_digest(source, ALL)
    (source / "a" / "deep").mkdir()
    (source / "a" / "deep" / "1.png").write_bytes(png(1))
    with_picture = content_digest(source, ALL)
    (source / "a" / "deep" / "1.png").write_bytes(png(2))
    assert len({before, with_picture, content_digest(source, ALL)}) == 3


@pytest.mark.parametrize("name", ["1.WEBP", "1.tif", "1.Jfif", "1.avif", "1", "deep/1.jpg_large"])
@pytest.mark.parametrize("builder", ["table", "llava", "openai_messages"])
def test_a_picture_counts_whatever_its_suffix_is(name, builder, tmp_path):
    write_file(tmp_path / "rows.jsonl", b"{}")
    write_file(tmp_path / name, png(1))
    before = open_raw(str(tmp_path), (), builder).digest
    write_file(tmp_path / "README.md", b"no row may name it as an image")
    assert open_raw(str(tmp_path), (), builder).digest == before
    write_file(tmp_path / name, png(2))
    assert open_raw(str(tmp_path), (), builder).digest != before


def test_a_single_file_is_its_own_source(tmp_path):
    write_source(tmp_path, {"a": plain_rows(4)}, file_rows=2)
    file, other = (tmp_path / "a" / f"train-{i}.parquet" for i in (0, 1))
    found = open_raw(str(file), (), "table")
    assert found.dir == file
    other.write_bytes(b"another")
    assert open_raw(str(file), (), "table").digest == found.digest
    (tmp_path / "a" / "beside.jpg").write_bytes(b"a picture that a row may point at")
    assert open_raw(str(file), (), "table").digest != found.digest


def test_digest_sees_renamed_files_and_not_the_order_of_subsets(tmp_path):
    source = write_source(tmp_path, {"a": plain_rows(2), "b": plain_rows(2, 9)})
    digests = {content_digest(source, patterns(subsets)) for subsets in (["a", "b"], ["b", "a"], [])}
    assert len(digests) == 1
    (source / "a" / "train-0.parquet").rename(source / "a" / "train-1.parquet")
    assert content_digest(source, ALL) not in digests


def test_links_inside_the_source_are_followed_and_rings_are_not(tmp_path):
    linked = write_source(tmp_path / "linked", {"a": plain_rows(2), "b": plain_rows(2), ".kept": plain_rows(2)})
    plain = write_source(tmp_path / "plain", {"a": plain_rows(2), "b": plain_rows(2), "c": plain_rows(2)})
    (linked / "c").symlink_to(linked / ".kept")
    (linked / "b" / "train-0.parquet").unlink()
    (linked / "b" / "train-0.parquet").symlink_to("../a/train-0.parquet")
    (linked / "a" / "ring").symlink_to(linked)
    assert content_digest(linked, ALL) == content_digest(plain, ALL)
    (tmp_path / "by another name").symlink_to(linked)
    assert content_digest(tmp_path / "by another name", ALL) == content_digest(plain, ALL)
    (tmp_path / "one.parquet").symlink_to(linked / "a" / "train-0.parquet")
    assert open_raw(str(tmp_path / "one.parquet"), (), "table").digest


MANY_WAYS = {
    "two folders with two links each to the other": {"a/1": "b", "a/2": "b", "b/1": "a", "b/2": "a"},
    "each folder links twice to the next": {f"{i}/{j}": f"{i + 1}" for i in range(24) for j in "ab"},
    "all folders link to all": {f"{i}/{j}": f"{j}" for i in range(12) for j in range(12) if i != j},
    "hidden folders": {"a": ".x", "b": ".x", ".x/1": ".y", ".x/2": ".y", ".y/1": ".x", ".y/2": ".x"},
}


@pytest.mark.parametrize("links", MANY_WAYS.values(), ids=MANY_WAYS)
def test_each_real_directory_is_walked_once(links, tmp_path):
    for folder in {path.partition("/")[0] for path in links if "/" in path} | set(links.values()):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text("{}")
    for link, target in links.items():
        (tmp_path / link).symlink_to(tmp_path / target)
    found = list_files(tmp_path, ("**/*.jsonl",))
    real = {path.resolve() for path in tmp_path.rglob("*.jsonl") if path.is_file()}
    assert sorted(file.path.resolve() for file in found) == sorted(real)
    under_their_own_names = {file.name for file in found if file.path == file.path.resolve()}
    assert under_their_own_names == {f.relative_to(tmp_path).as_posix() for f in real if "/." not in str(f)}


@pytest.mark.parametrize("target", ["/proc", "/", "../beside", "/proc/self/root"])
def test_a_link_out_of_the_source_is_refused_before_it_is_walked(target, tmp_path, monkeypatch):
    (tmp_path / "source" / "a").mkdir(parents=True)
    (tmp_path / "beside").mkdir()
    (tmp_path / "source" / "a" / "train.csv").write_text("image,question,answer\n")
    (tmp_path / "source" / "more").symlink_to(target)
    walked, walk = [], os.walk
    monkeypatch.setattr(os, "walk", lambda top, **options: walk(walked.append(str(top)) or top, **options))
    with pytest.raises(InputError, match=r"source/more leads by a link to /.*, outside of .*delete the link"):
        open_raw(str(tmp_path / "source"), (), "table")
    one_file = open_raw(str(tmp_path / "source" / "a" / "train.csv"), (), "table")
    (tmp_path / "source" / "a" / "pictures").symlink_to(target)  # the rows of one file cannot read there
    assert open_raw(str(tmp_path / "source" / "a" / "train.csv"), (), "table").digest == one_file.digest
    assert all(place.startswith(str(tmp_path / "source")) and "more" not in place for place in walked)
    for link in ("more", "a/pictures"):
        (tmp_path / "source" / link).unlink()
    assert open_raw(str(tmp_path / "source"), (), "table").digest


ROW_FILES = {
    "the_cauldron": "x.parquet",
    "cord_v2": "x.parquet",
    "openai_messages": "x.jsonl",
    "llava": "x.json",
    "webdataset_tars": "x.tar",
    "table": "x.arrow",
    "image_folder": "x.txt",
    "detection": "x.json",
}


@pytest.mark.promise(
    "Images that cost seconds per kilobyte, damaged JPEGs, endless chat templates and links out of a source "
    "are refused with a reason."
)
@pytest.mark.parametrize("builder", ROW_FILES)
@pytest.mark.parametrize("linked", ["file", "directory"])
def test_a_file_that_links_out_of_the_source_is_refused(builder, linked, tmp_path):
    source, outside = tmp_path / "source", tmp_path / "source-2" / ROW_FILES[builder]
    outside.parent.mkdir(parents=True)
    outside.write_text("root:x:0:0:root:/root:/bin/bash\n")
    source.mkdir()
    place = source / "a" / outside.name
    if linked == "file":
        place.parent.mkdir()
        place.symlink_to(outside)
    else:
        place.parent.symlink_to(outside.parent)
    link, target = (place, outside) if linked == "file" else (place.parent, outside.parent)
    line = f"{link} leads by a link to {target}, outside of the source {source}; copy it there, delete the link, or"
    with pytest.raises(InputError, match=line):
        open_raw(str(source), (), builder)
    with pytest.raises(InputError, match=line):
        list_files(source, get_builder(builder).patterns(()))


def test_every_builder_is_tried():
    assert set(ROW_FILES) == set(BUILDERS)


@pytest.mark.promise(
    "Images that cost seconds per kilobyte, damaged JPEGs, endless chat templates and links out of a source "
    "are refused with a reason."
)
def test_a_picture_that_links_out_is_no_reason_to_refuse_the_rest(tmp_path):
    source = write_source(tmp_path / "source", {"a": plain_rows(2)})
    (tmp_path / "outside.png").write_bytes(png(1))
    (source / "a" / "1.png").symlink_to(tmp_path / "outside.png")
    assert len(list_files(source, ALL)) == 2


@pytest.mark.parametrize("below", ["", "data"])
def test_a_snapshot_of_the_hubs_cache_links_to_its_blobs(below, tmp_path):
    cache = tmp_path / "hub" / "datasets--owner--name"
    file = cache / "snapshots" / "0123" / "data" / "a" / "train-0.parquet"
    write_source(tmp_path / "made", {"a": plain_rows(2)})
    for directory in (file.parent, cache / "blobs"):
        directory.mkdir(parents=True)
    (tmp_path / "made" / "a" / "train-0.parquet").rename(cache / "blobs" / "abc")
    file.symlink_to("../../../../blobs/abc")
    source = cache / "snapshots" / "0123" / below
    assert [found.path for found in list_files(source, ["**/*.parquet"])] == [file]
    (file.parent / "train-1.parquet").symlink_to("/etc/hostname")
    with pytest.raises(InputError, match=r"train-1\.parquet leads by a link to /etc/hostname, outside of the source"):
        list_files(source, ["**/*.parquet"])


def test_memo_spares_the_second_reading_and_notices_a_change(tmp_path, monkeypatch):
    source, memo = write_source(tmp_path / "raw", {"a": plain_rows(2)}), tmp_path / "deep" / "digests.json"
    first = content_digest(source, ALL, memo)
    monkeypatch.setattr(raw_source, "sha256_file", lambda path: pytest.fail(f"read {path}"))
    assert content_digest(source, ALL, memo) == first
    monkeypatch.undo()
    path = source / "a" / "train-0.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    os.utime(path, ns=(1, 1))
    assert content_digest(source, ALL, memo) not in (first, None)


def test_memo_notices_a_change_whose_size_and_time_were_restored(tmp_path):
    source, memo = write_source(tmp_path / "raw", {"a": plain_rows(2)}), tmp_path / "digests.json"
    path = source / "a" / "train-0.parquet"
    first, before = content_digest(source, ALL, memo), path.stat()
    with path.open("r+b") as file:
        file.write(b"?")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert content_digest(source, ALL, memo) == content_digest(source, ALL) != first


@pytest.mark.parametrize("damaged", [b"", b'{"a', b"[]", b"\xff", b"[" * 100_000])
def test_a_damaged_memo_is_written_anew(damaged, tmp_path):
    source, memo = write_source(tmp_path / "raw", {"a": plain_rows(2)}), tmp_path / "digests.json"
    first = content_digest(source, ALL, memo)
    whole = memo.read_bytes()
    memo.write_bytes(damaged)
    assert content_digest(source, ALL, memo) == first and memo.read_bytes() == whole


@pytest.mark.promise(
    "The hub's own client downloads data and takes a release, tested against a local server; the hub reads its "
    "model card."
)
def test_a_misspelt_subset_of_the_hub_is_named_before_a_download_where_its_subsets_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_source.huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("downloaded"))
    for subset, message in [("ai3d", "has no subset 'ai3d'; did you mean 'ai2d'"), ("qqqq", "'qqqq'; it has ai2d, ")]:
        with pytest.raises(InputError, match=message):
            open_raw("HuggingFaceM4/the_cauldron", [subset], "the_cauldron")
    source = write_source(tmp_path, {"ai2d": plain_rows(2)})
    monkeypatch.setattr(raw_source.huggingface_hub, "snapshot_download", lambda *_, **__: str(source))
    with pytest.raises(InputError, match=r"owner/name has no subset 'ai3d' that the builder the_cauldron reads"):
        open_raw("owner/name", ["ai3d"], "the_cauldron")
    assert open_raw("owner/name", ["ai2d"], "the_cauldron").dir == source


def test_what_is_not_there_says_so_in_one_line(tmp_path, monkeypatch):
    def offline(name, **options):
        raise LocalEntryNotFoundError("no network\nand a long story")

    monkeypatch.setattr(raw_source.huggingface_hub, "snapshot_download", offline)
    for source, subsets, builder, message in [
        (str(tmp_path / "nowhere"), (), "the_cauldron", "nowhere does not exist"),
        ("some/deep/place", (), "the_cauldron", "does not exist"),
        ("HuggingFaceM4/the_cauldron", (), "the_cauldron", "needs subsets"),
        ("owner/name", ("ai2d",), "the_cauldron", "the hub cannot be reached"),
        ("naver-clova-ix/cord-v2", (), "cord_v2", "the hub cannot be reached"),
        ("naver-clova-ix/cord-v2", ("cord_v2_tain",), "cord_v2", "did you mean 'cord_v2_train'"),
        (str(tmp_path), (), "the_culdron", "unknown dataset builder"),
    ]:
        with pytest.raises(InputError, match=message) as caught:
            open_raw(source, subsets, builder)
        assert "\n" not in str(caught.value)


@pytest.mark.promise(
    "The hub's own client downloads data and takes a release, tested against a local server; the hub reads its "
    "model card."
)
def test_a_gated_dataset_says_what_to_do(monkeypatch):
    def gated(name, **options):
        raise GatedRepoError("401 Client Error", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(raw_source.huggingface_hub, "snapshot_download", gated)
    with pytest.raises(InputError, match=r"owner/name is gated: accept its terms"):
        open_raw("owner/name", (), "table")


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_source(tmp_path / "raw", {"a": plain_rows(1)})
    assert open_raw("~/raw", (), "the_cauldron").dir == Path(tmp_path / "raw")


DOWNLOAD = """
import sys
from stages.shared.inputs.raw_source import open_raw
from tests.helpers.json_rows import read_source
name, builder, *subsets = sys.argv[1:]
found = open_raw(name, subsets, builder)
options = {"turns": "chat"} if builder == "the_cauldron" else {"image": "picture", "question": "ask", "answer": "say"}
for item in read_source(builder, found.dir, subsets, **options):
    print(item.key, getattr(item, "reason", "sample"))
"""


def download(address, home, *arguments):
    """Return the output of a process that reads through the hub at this address. The environment is read at its
    start."""
    environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-c", DOWNLOAD, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=REPO)


@pytest.mark.promise(
    "The hub's own client downloads data and takes a release, tested against a local server; the hub reads its "
    "model card."
)
def test_what_the_hub_serves_is_downloaded_by_patterns_and_read(tmp_path):
    name = "HuggingFaceM4/the_cauldron"
    served = write_source(tmp_path / "hub", {"ai2d": plain_rows(3), "vqav2": plain_rows(2)})
    (served / "README.md").write_text("not data")
    with hub_server(name, served) as (address, fetched):
        done = download(address, tmp_path / "home", name, "the_cauldron", "ai2d")
        assert done.stdout.split() == ["ai2d/00000000", "sample", "ai2d/00000001", "sample", "ai2d/00000002", "sample"]
        assert fetched == ["ai2d/train-0.parquet"] and "%|" in done.stderr  # a progress bar
        again = download(address, tmp_path / "home", name, "the_cauldron", "ai2d")
        assert again.stdout == done.stdout and len(fetched) == 1
        other = download(address, tmp_path / "home", name, "the_cauldron", "ai3d")
        assert "has no subset 'ai3d'; did you mean 'ai2d'" in other.stderr and len(fetched) == 1
        missing = download(address, tmp_path / "home", "owner/name", "table")
        assert "is neither a directory here nor a dataset of the hub" in missing.stderr


@pytest.mark.promise(
    "The hub's own client downloads data and takes a release, tested against a local server; the hub reads its "
    "model card."
)
def test_pictures_of_a_hub_dataset_are_downloaded_with_the_rows_that_point_at_them(tmp_path):
    (tmp_path / "hub" / "pictures").mkdir(parents=True)
    (tmp_path / "hub" / "pictures" / "1.png").write_bytes(png(1))
    table = pa.table({"picture": ["pictures/1.png", "pictures/2.png"], "ask": ["?", "?"], "say": ["a", "b"]})
    pq.write_table(table, tmp_path / "hub" / "qa.parquet")
    with hub_server("owner/name", tmp_path / "hub") as (address, fetched):
        done = download(address, tmp_path / "home", "owner/name", "table")
    assert sorted(fetched) == ["pictures/1.png", "qa.parquet"]
    assert done.stdout.split() == ["qa/00000000", "sample", "qa/00000001", "image_not_found"]
