"""Existing WebDataset tars by a field map: groups, half samples, odd members, truncated and damaged tars."""

import io
import itertools
import json
import subprocess
import tarfile

import pytest
from pydantic import ValidationError

from dataset_builders.contracts.sample import Sample, SkipSample
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import ImageLimits, check_image
from dataset_builders.readers import tar_files
from dataset_builders.sources.webdataset_tars import WebDatasetOptions, list_parts
from dataset_builders.storage.store import location
from tests.helpers.json_rows import read_source, reasons, turns, write_file
from tests.helpers.object_store import BUCKET, moto_server
from tests.helpers.raw_rows import png

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)

ONE, TWO = png(1), png(2)
CAPTION = {"question": "constant:Describe the picture.", "answer": "txt"}
PAIR = {"question": "json:question", "answer": "json:answers.0.text"}
CHAT = {"messages": "json:chat"}


def tar(members, tar_format=tarfile.USTAR_FORMAT):
    """Return a tar of (name, content or TarInfo type)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes) and len(content) == 1 and content in tarfile.SUPPORTED_TYPES:
                info.type, info.linkname = content, "target"
                file.addfile(info)
                continue
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return out.getvalue()


def read(tmp_path, members, rows=None, **options):
    write_file(tmp_path / "s/00000.tar", members if isinstance(members, bytes) else tar(members))
    return read_source("webdataset_tars", tmp_path, rows=rows, **options)


def captions(count):
    return [
        (f"{i:06d}.{field}", data) for i in range(count) for field, data in (("png", png(i)), ("txt", b"nr %d" % i))
    ]


def test_image_and_text(tmp_path):
    items = read(tmp_path, captions(3), **CAPTION)
    assert [item.key for item in items] == ["s/00000000", "s/00000001", "s/00000002"]
    assert turns(items[2]) == [("user", "<image>Describe the picture."), ("assistant", "nr 2")]
    assert [item.images for item in items] == [(png(i),) for i in range(3)]


def test_fields_of_a_json_member(tmp_path):
    members = [("a/b.json", {"question": " Is <image> it?\r\n", "answers": [{"text": "yes"}, {"text": "no"}]})]
    (sample,) = read(tmp_path, [*members, ("a/b.PNG", ONE)], **PAIR)
    assert turns(sample) == [("user", "Is <image> it?"), ("assistant", "yes")] and sample.images == (ONE,)


@pytest.mark.parametrize("unread", [{"label": False}, {"rejected": "no"}, {"train": 0}, {"objects": {"bbox": [[1]]}}])
def test_a_key_of_a_json_member_that_would_change_the_training_leaves_the_sample_out(unread, tmp_path):
    row = {"question": "a?", "answers": [{"text": "yes"}], "url": "https://example.com/1.png", "label": "cat"}
    members = [("a.json", row), ("a.png", ONE), ("b.json", {**row, **unread}), ("b.png", ONE)]
    assert reasons(read(tmp_path, members, **PAIR)) == [None, "schema_error"]


@pytest.mark.parametrize("suffix", ["jfif", "avif", "JPE"])
def test_images_of_every_suffix_are_images(suffix, tmp_path):
    (item,) = read(tmp_path, [(f"a.{suffix}", ONE), ("a.txt", b"a")], **CAPTION)
    assert item.images == (ONE,)


def test_members_without_a_name_are_rows_with_a_reason(tmp_path):
    """They may be in the root, in a folder, or between members of a sample, which stays whole; macOS's files are
    ignored."""
    members = [(".txt", b"a"), ("x/.png", ONE), ("a.png", ONE), (".json", b"{}"), ("._a.txt", b"m"), ("a.txt", b"one")]
    found = read(tmp_path, [*members, (".txt", b"b")], **CAPTION)
    assert reasons(found) == ["no_name", "no_name", None, "no_name", "no_name"]
    assert [item.key for item in found] == [f"s/{number:08d}" for number in range(5)]
    assert found[1].detail == "the member 'x/.png' has no name before its field"
    many = read(tmp_path, [(".txt", b"t")] * 5000, **CAPTION)
    assert reasons(many) == ["no_name"] * 5000


def test_members_without_a_name_move_no_part(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_files, "_PART_ROWS", 2)
    members = [member for name, data in captions(9) for member in ((name, data), (".txt", b"t"))]
    found = read(tmp_path, members, **CAPTION)
    assert [turns(item)[1][1] for item in found if isinstance(item, Sample)] == [f"nr {i}" for i in range(9)]
    assert len(found) == 9 + 18


def test_zero_bytes_are_called_empty(tmp_path):
    members = [("a.png", b""), ("a.json", {"question": "a?", "answers": [{"text": "b"}]})]
    found = read(tmp_path, [*members, ("b.png", ONE), ("b.json", b"")], **PAIR)
    assert reasons(found) == [None, "empty"]
    with pytest.raises(SkipSample, match="empty: the image has zero bytes"):
        check_image(found[0].images[0], ImageLimits(max_pixels=100, min_side=1))


def test_a_size_that_no_file_has_is_one_line(tmp_path):
    data = bytearray(tar([("a.png", ONE), ("a.txt", b"x" * 10)], tarfile.PAX_FORMAT))
    info = tarfile.TarInfo("b.txt")
    info.pax_headers = {"size": str(10**14)}
    end = -(-(data.rindex(b"x" * 10) + 10) // 512) * 512
    with pytest.raises(InputError, match="is cut or no tar: a header that points to where no file reaches"):
        read(tmp_path, bytes(data[:end]) + info.tobuf(tarfile.PAX_FORMAT), **CAPTION)


def test_several_images_in_order_of_their_numbers(tmp_path):
    pictures = [png(i) for i in range(12)]
    members = [(f"x.{i}.png", pictures[i]) for i in (3, 11, 0, 1, 2, 10, *range(4, 10))]
    (sample,) = read(tmp_path, [*members, ("x.txt", b"twelve")], **CAPTION)
    assert sample.images == tuple(pictures)


def test_conversations_of_either_form(tmp_path):
    openai = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "or "}, {"type": "image"}]},
        {"role": "assistant", "content": "b", "weight": 0},
    ]
    named = [
        {"role": "user", "content": [{"type": "image", "image": "1.png"}, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "b"},
    ]
    sharegpt = [{"from": "human", "value": "<image> or <image>?"}, {"from": "gpt", "value": "b"}]
    wrapped = {
        "system": "Be short.",
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "b"}],
    }
    members = []
    for i, chat in enumerate((openai, named, sharegpt, wrapped)):
        members += [(f"{i}.json", {"chat": chat}), (f"{i}.0.png", ONE), (f"{i}.1.png", TWO)]
    first, second, third, fourth = read(tmp_path, members, **CHAT)
    assert first.images == third.images == fourth.images == (ONE, TWO) and second.images == (TWO,)
    assert turns(first)[0] == ("user", "<image>or <image>") and not first.messages[1].is_learnt
    assert turns(third)[0] == ("user", "<image> or <image>?")
    assert turns(fourth)[:2] == [("system", "Be short."), ("user", "<image><image>?")]
    write_file(tmp_path / "s/00000.tar", tar([("0.json", openai), ("0.0.png", ONE), ("0.1.png", TWO)]))
    (whole,) = read_source("webdataset_tars", tmp_path, messages="json")
    assert turns(whole) == turns(first)


def test_members_that_nothing_asks_for(tmp_path):
    members = [
        ("__meta__", b"x"),
        ("d", tarfile.DIRTYPE),
        (".DS_Store", b"x"),
        ("d/._1.png", b"x"),
        ("d/1.png", ONE),
        ("d/1.link.png", tarfile.SYMTYPE),
        ("d/1.seg.npy", b"x"),
        ("d/1.depth.png", b"x"),
        ("d/README", b"x"),
        ("d/1.txt", b"\xef\xbb\xbfone"),
        ("./d/2.png", TWO),
        ("./d/2.txt", b"two"),
    ]
    items = read(tmp_path, members, **CAPTION)
    assert [item.images for item in items] == [(ONE,), (TWO,)]
    assert [turns(item)[1][1] for item in items] == ["one", "two"]


def test_image_fields_by_pattern(tmp_path):
    members = [("1.left.png", ONE), ("1.right.png", TWO), ("1.mask.png", b"x"), ("1.txt", b"pair")]
    (sample,) = read(tmp_path, members, images=("left.png", "r*.png"), **CAPTION)
    assert sample.images == (ONE, TWO)


BAD = {
    "no image": ([("1.txt", b"a")], CAPTION, "image_not_found"),
    "no text": ([("1.png", ONE)], CAPTION, "schema_error"),
    "no image in a chat": ([("1.json", {"chat": []})], CHAT, "image_not_found"),
    "json is none": ([("1.png", ONE), ("1.json", b"{")], PAIR, "json_parse_error"),
    "json without the field": ([("1.png", ONE), ("1.json", {"question": "a?"})], PAIR, "schema_error"),
    "answer is a number": (
        [("1.png", ONE), ("1.json", {"question": "a?", "answers": [{"text": 7}]})], PAIR, "schema_error"),
    "text not utf-8": ([("1.png", ONE), ("1.txt", b"\xff\xfe")], CAPTION, "schema_error"),
    "same member twice": ([("1.png", ONE), ("1.png", TWO), ("1.txt", b"a")], CAPTION, "duplicate_key"),
    "same member in capitals": ([("1.png", ONE), ("1.PNG", TWO), ("1.txt", b"a")], CAPTION, "duplicate_key"),
    "chat is text": ([("1.png", ONE), ("1.json", {"chat": "a"})], CHAT, "schema_error"),
    "chat names no member": (
        [("1.png", ONE), ("1.json", {"chat": [
            {"role": "user", "content": [{"type": "image", "image": "2.png"}, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": "b"}]})],
        CHAT, "image_not_found"),
}  # fmt: skip
ALONE = {"text_only": True, **CAPTION}
BAD |= {
    f"image is {name}": ([("1.png", kind), ("1.txt", b"a")], ALONE, "schema_error")
    for name, kind in {
        "a symbolic link": tarfile.SYMTYPE,
        "a hard link": tarfile.LNKTYPE,
        "a pipe": tarfile.FIFOTYPE,
        "a device": tarfile.CHRTYPE,
    }.items()
}
BAD |= {
    "the second image is a link": (
        [("1.0.png", ONE), ("1.1.png", tarfile.SYMTYPE), ("1.txt", b"a")], CAPTION, "schema_error"),
    "the text is a link": ([("1.png", ONE), ("1.txt", tarfile.LNKTYPE)], CAPTION, "schema_error"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_sample_is_named_and_its_neighbours_stay(name, tmp_path):
    members, options, reason = BAD[name]
    good = {
        "question": "a?",
        "answers": [{"text": "b"}],
        "chat": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}],
    }
    around = [[(f"{i}.png", ONE), (f"{i}.json", good), (f"{i}.txt", b"b")] for i in (0, 2)]
    items = read(tmp_path, [*around[0], *members, *around[1]], **options)
    assert reasons(items) == [None, reason, None]
    assert items[1].key == "s/00000001" and "'1'" in items[1].detail


def test_the_way_out_of_links_in_a_tar(tmp_path):
    write_file(tmp_path / "kept/1.png", ONE)
    write_file(tmp_path / "made/1.txt", b"one")
    (tmp_path / "made/1.png").symlink_to(tmp_path / "kept/1.png")
    (tmp_path / "made/2.png").hardlink_to(tmp_path / "kept/1.png")
    (tmp_path / "made/3.png").hardlink_to(tmp_path / "kept/1.png")
    for number in (2, 3):
        (tmp_path / f"made/{number}.txt").write_text("more")
    (tmp_path / "s").mkdir()
    command = ["tar", "--sort=name", "-cf", "s/00000.tar", "-C", "made", "."]
    subprocess.run(command, check=True, cwd=tmp_path)
    items = read_source("webdataset_tars", tmp_path, text_only=True, **CAPTION)
    assert reasons(items) == ["schema_error", None, "schema_error"] and "a hard link" in items[2].detail
    way_out = items[0].detail.partition("write the tar again with ")[2].split()
    subprocess.run([command[0], *way_out, *command[1:]], check=True, cwd=tmp_path)
    assert [item.images for item in read_source("webdataset_tars", tmp_path, **CAPTION)] == [(ONE,)] * 3


def test_an_unsorted_tar_is_refused_with_the_command_that_sorts_it(tmp_path):
    names = ["b b/1", "b b/10", "b b/1-a", "a", "-"]
    members = [
        (f"{name}.{field}", png(i) if field == "png" else b"nr %d" % i)
        for field in ("png", "txt")
        for i, name in enumerate(names)
    ]
    with pytest.raises(InputError, match=r"00000\.tar: the members of 'b b/1' lie apart .* sort the tar") as caught:
        read(tmp_path, members, **CAPTION)
    assert "\n" not in str(caught.value)
    command = str(caught.value).partition("by names: ")[2]
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    items = read_source("webdataset_tars", tmp_path, **CAPTION)
    assert sorted(turns(item)[1][1] for item in items) == [f"nr {i}" for i in range(5)]
    assert all(item.images == (png(int(turns(item)[1][1][3:])),) for item in items)


def test_a_tar_sorted_by_kind_is_refused_in_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_files, "_PART_ROWS", 1)
    with pytest.raises(InputError, match=r"'000000' lie apart"):
        read(tmp_path, sorted(captions(3), key=lambda member: member[0][-3:]), **CAPTION)


def test_samples_of_text_alone_where_they_are_meant(tmp_path):
    members = [("1.json", {"chat": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]})]
    assert reasons(read(tmp_path, members, text_only=True, **CHAT)) == [None]


def test_a_member_over_the_limit_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("dataset_builders.readers.conversation.MAX_IMAGE_BYTES", len(ONE) - 1)
    assert reasons(read(tmp_path, [("1.png", ONE), ("1.txt", b"a")], **CAPTION)) == ["bomb"]


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_parts_are_cut_between_samples_and_read_alone(tar_format, tmp_path, monkeypatch):
    monkeypatch.setattr(tar_files, "_PART_ROWS", 3)
    long = "d/" * 40 + ("n" * 60 if tar_format == tarfile.USTAR_FORMAT else "\u00e4" * 60)
    members = [(f"{long}{name}", data) for name, data in captions(8)]
    write_file(tmp_path / "s-000000.tar", tar(members, tar_format))
    write_file(tmp_path / "s-000001.tar", tar(captions(2), tar_format))
    parts = list_parts(tmp_path, (), WebDatasetOptions(**CAPTION))
    assert [(p.num_rows, p.first_row, p.file_row) for p in parts] == [(3, 0, 0), (3, 3, 3), (2, 6, 6), (2, 8, 0)]
    assert all(a.span[1] == b.span[0] for a, b in itertools.pairwise(parts) if a.path == b.path)
    items = read_source("webdataset_tars", tmp_path, **CAPTION)
    assert [item.images for item in items] == [(png(i),) for i in (*range(8), 0, 1)]
    chosen = read_source("webdataset_tars", tmp_path, rows={4, 9}, **CAPTION)
    assert [item.key for item in chosen] == ["s/00000004", "s/00000009"]


def test_parts_are_cut_by_bytes_too(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_files, "_PART_BYTES", 10_000)
    write_file(tmp_path / "00000.tar", tar(captions(20)))
    parts = list_parts(tmp_path, (), WebDatasetOptions(**CAPTION))
    assert len(parts) > 3 and sum(part.num_rows for part in parts) == 20 and {p.subset for p in parts} == {"data"}


def test_a_tar_that_is_cut_anywhere_is_refused(tmp_path):
    data = tar(captions(3))
    end = data.rstrip(b"\0").__len__()
    for cut in [*range(1, 512, 101), *range(512, end, 257), end - 1]:
        with pytest.raises(InputError) as caught:
            read(tmp_path, data[:cut], **CAPTION)
        message = str(caught.value)
        assert "00000.tar" in message and "download" in message and "\n" not in message
    whole = -(-end // 512) * 512
    with pytest.raises(InputError, match="no end of the tar"):
        read(tmp_path, data[:whole], **CAPTION)
    assert reasons(read(tmp_path, data[: whole + 512], **CAPTION)) == [None] * 3


def test_a_spoilt_header_in_the_middle_is_refused(tmp_path):
    """tarfile itself takes it for the end of the archive."""
    data = bytearray(tar(captions(3)))
    second = data.index(b"000001.png")
    data[second + 100] ^= 0xFF
    with tarfile.open(fileobj=io.BytesIO(bytes(data))) as file:
        assert len(file.getmembers()) == 2
    with pytest.raises(InputError, match="no header there"):
        read(tmp_path, bytes(data), **CAPTION)


@pytest.mark.parametrize("data", [b"", b"rubbish" * 200, b"\x1f\x8b\x08" + b"x" * 2000])
def test_no_tar(data, tmp_path):
    with pytest.raises(InputError, match="is cut or no tar"):
        read(tmp_path, data, **CAPTION)


def test_headers_do_not_pile_up(tmp_path, monkeypatch):
    seen = []
    real = tarfile.TarFile.next
    monkeypatch.setattr(tarfile.TarFile, "next", lambda self: (seen.append(len(self.members)), real(self))[1])
    read(tmp_path, captions(50), **CAPTION)
    assert len(seen) > 200 and max(seen) <= 1


@pytest.mark.parametrize(
    "options",
    [{}, {"question": "txt"}, {"answer": "txt"}, {**CAPTION, **CHAT}, {"messages": "constant:a"}, {"messages": ":a"}],
)
def test_options_say_where_the_text_is(options):
    with pytest.raises(ValidationError):
        WebDatasetOptions(**options)


@pytest.mark.full
def test_a_tar_that_is_cut_in_a_store_is_refused(tmp_path):
    with moto_server():
        source = location(f"s3://{BUCKET}/tars")
        (source / "s/00000.tar").write_bytes(tar(captions(8))[:3000])
        with pytest.raises(InputError, match="is cut"):
            read_source("webdataset_tars", source, **CAPTION)
