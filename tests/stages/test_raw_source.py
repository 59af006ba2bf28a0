"""Raw data from a directory or the hub: a digest of the content, and one clear line when it is not there."""

import os
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from dataset_builders.contracts.errors import InputError
from stages import raw_source
from stages.raw_source import content_digest, open_raw
from tests.helpers.raw_rows import plain_rows, write_source


def test_a_directory_is_known_by_its_content(tmp_path):
    one = write_source(tmp_path / "one", {"a": plain_rows(2), "b": plain_rows(2, 9)})
    same = write_source(tmp_path / "same", {"a": plain_rows(2), "b": plain_rows(2, 9)})
    other = write_source(tmp_path / "other", {"a": plain_rows(2), "b": plain_rows(2, 10)})
    (same / "README.md").write_text("not data")
    found = open_raw(str(one), ())
    assert (found.dir, found.name) == (one, "raw") and len(found.digest) == 16
    assert open_raw(str(same), ()).digest == found.digest != open_raw(str(other), ()).digest
    assert content_digest(one, ["a"]) == content_digest(other, ["a"]) != content_digest(one, ["b"])


def test_digest_sees_renamed_files_and_not_the_order_of_subsets(tmp_path):
    source = write_source(tmp_path, {"a": plain_rows(2), "b": plain_rows(2, 9)})
    assert content_digest(source, ["a", "b"]) == content_digest(source, ["b", "a"]) == content_digest(source, [])
    before = content_digest(source, [])
    (source / "a" / "train-0.parquet").rename(source / "a" / "train-1.parquet")
    assert content_digest(source, []) != before


def test_memo_spares_the_second_reading_and_notices_a_change(tmp_path, monkeypatch):
    source, memo = write_source(tmp_path / "raw", {"a": plain_rows(2)}), tmp_path / "deep" / "digests.json"
    first = content_digest(source, [], memo)
    monkeypatch.setattr(raw_source, "sha256_file", lambda path: pytest.fail(f"read {path}"))
    assert content_digest(source, [], memo) == first
    monkeypatch.undo()
    path = source / "a" / "train-0.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    os.utime(path, ns=(1, 1))
    assert content_digest(source, [], memo) not in (first, None)


def test_a_hub_dataset_is_downloaded_subset_by_subset(tmp_path, monkeypatch):
    source = write_source(tmp_path / "snapshot", {"ai2d": plain_rows(2)})
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(source)

    monkeypatch.setattr(raw_source.huggingface_hub, "snapshot_download", download)
    assert open_raw("HuggingFaceM4/the_cauldron", ["ai2d"]).dir == source
    assert asked == {"name": "HuggingFaceM4/the_cauldron", "repo_type": "dataset", "allow_patterns": ["ai2d/*.parquet"]}
    with pytest.raises(InputError, match="has no subset 'ai3d'"):
        open_raw("HuggingFaceM4/the_cauldron", ["ai3d"])


def test_what_is_not_there_says_so_in_one_line(tmp_path, monkeypatch):
    def offline(name, **options):
        raise LocalEntryNotFoundError("no network\nand a long story")

    monkeypatch.setattr(raw_source.huggingface_hub, "snapshot_download", offline)
    for source, subsets, message in [
        (str(tmp_path / "nowhere"), (), "nowhere does not exist"),
        ("some/deep/place", (), "does not exist"),
        ("owner/name", (), "needs subsets"),
        ("owner/name", ("ai2d",), "the hub cannot be reached"),
    ]:
        with pytest.raises(InputError, match=message) as caught:
            open_raw(source, subsets)
        assert "\n" not in str(caught.value)


def test_a_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_source(tmp_path / "raw", {"a": plain_rows(1)})
    assert open_raw("~/raw", ()).dir == Path(tmp_path / "raw")
