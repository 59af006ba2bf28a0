"""Images in folders: captions in files next to them, folders as classes, splits by folder, and the odd files by
reason."""

import json
import os

import pytest

from dataset_builders.contracts.sample import Sample
from dataset_builders.errors import InputError
from dataset_builders.pictures.images import ImageLimits
from dataset_builders.recognise.recognise import recognise
from dataset_builders.sources import image_folder
from dataset_builders.sources.image_folder import ImageFolderOptions, iter_part, list_parts
from dataset_builders.storage.store import location
from stages.convert.stage import STAGE, ConvertConfig
from stages.shared.artifacts.artifact import External
from stages.shared.artifacts.run_stage import run_stage
from stages.shared.inputs.raw_source import open_raw
from tests.helpers.json_rows import read_source, reasons, turns, write_file
from tests.helpers.object_store import BUCKET, moto_server
from tests.helpers.raw_rows import encode, picture, png

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)

CAPTIONS = {"answer": "text_file", "question": "Describe it."}
CLASSES = {"answer": "folder_name", "question": "Which flower?"}
ONE = png(1)


def write_files(source, files):
    """Write files of these names, whose content is bytes or text."""
    for name, content in files.items():
        write_file(source / name, content if isinstance(content, bytes) else content.encode())
    return source


def read(source, **options):
    return read_source("image_folder", source, **CAPTIONS | options)


def answers(items):
    """Return key -> answer or reason."""
    return {item.key: turns(item)[1][1] if isinstance(item, Sample) else item.reason for item in items}


def test_a_text_beside_each_image(tmp_path):
    names = ("2.JPG", "10.png", "a.b.webp", "deep/er/1.png")
    files = {name: png(i) for i, name in enumerate(names)} | {
        "2.txt": "two",
        "10.txt": "\ufeff ten\r\nten ",
        "a.b.txt": "dots",
        "deep/er/1.txt": "deep",
        "README.md": "no row",
        ".hidden/1.png": ONE,
    }
    found = read(write_files(tmp_path, files))
    assert answers(found) == {
        "data/00000000": "two",
        "data/00000001": "ten\nten",
        "data/00000002": "dots",
        "deep/00000000": "deep",
    }
    assert [item.images[0] for item in found] == [png(i) for i in range(4)]
    assert turns(found[0])[0] == ("user", "<image>Describe it.")
    assert turns(read(tmp_path, question="It is <image>, so?")[0])[0] == ("user", "It is <image>, so?")
    assert [item.key for item in read_source("image_folder", tmp_path, ["deep"], **CAPTIONS)] == ["deep/00000000"]


def test_another_suffix_of_the_texts(tmp_path):
    files = {"1.png": ONE, "1.en.caption": "a dog", "1.txt": "ein Hund", "2.en.caption": "left over"}
    assert answers(read(write_files(tmp_path, files), suffix="en.caption")) == {
        "data/00000000": "a dog",
        "data/00000001": "image_not_found",
    }


def test_a_folder_names_the_class(tmp_path):
    files = {
        "train/water_lily/1.png": png(1),
        "train/plants/snow-drop/1.png": png(2),
        "val/water_lily/1.png": png(3),
        "rose/1.png": png(4),
        "rose/1.txt": "no row",
        "rose/1.jpg": encode(picture(5), "JPEG"),
        "train/no class.png": png(6),
        "none.png": png(7),
    }
    found = read(write_files(tmp_path, files), **CLASSES)
    assert list(answers(found).values()) == [
        *("schema_error", "rose", "rose"),
        *("schema_error", "snow drop", "water lily", "water lily"),
    ]
    assert [item.key for item in found] == [f"data/{i:08d}" for i in range(7)]
    assert found[0].detail == "'none.png': the image lies in no folder that names its class"
    parts = list_parts(tmp_path, (), ImageFolderOptions(**CLASSES))
    assert [(part.split, part.first_row, part.num_rows) for part in parts] == [
        (None, 0, 3),
        ("train", 3, 3),
        ("heldout", 6, 1),
    ]


def test_top_folders_say_the_split_and_those_below_the_subset(tmp_path):
    files = {}
    for i, name in enumerate(("train/cats/1", "test/cats/1", "dev/1", "train/1", "cats/1", "cats/test/2")):
        files |= {f"{name}.png": png(i), f"{name}.txt": name}
    options = ImageFolderOptions(**CAPTIONS, heldout_splits=("test", "dev"))
    parts = list_parts(write_files(tmp_path, files), (), options)
    found = {turns(item)[1][1]: (item.key, part.split) for part in parts for item in iter_part(part, options)}
    assert found == {
        "cats/1": ("cats/00000000", None),
        "cats/test/2": ("cats/00000001", None),
        "test/cats/1": ("cats/00000002", "heldout"),
        "train/cats/1": ("cats/00000003", "train"),
        "dev/1": ("data/00000000", "heldout"),
        "train/1": ("data/00000001", "train"),
    }


def test_parts_give_side_by_side_what_one_part_gives(tmp_path, monkeypatch):
    files = {}
    for i in range(20):
        files |= {f"{'train/' if i % 2 else ''}{i}.png": png(i), f"{'train/' if i % 2 else ''}{i}.txt": f"{i}"}
    write_files(tmp_path, files)
    whole = read(tmp_path)
    assert [turns(item)[1][1] for item in whole] == [str(i) for i in (*range(0, 20, 2), *range(1, 20, 2))]
    monkeypatch.setattr(image_folder, "_PART_ROWS", 3)
    options = ImageFolderOptions(**CAPTIONS)
    parts = list_parts(tmp_path, (), options)
    assert [part.num_rows for part in parts] == [3, 3, 3, 1] * 2
    assert [list(iter_part(part, options)) for part in reversed(parts)][::-1] == [
        whole[part.first_row : part.first_row + part.num_rows] for part in parts
    ]
    assert read_source("image_folder", tmp_path, rows={4, 11}, **CAPTIONS) == [whole[4], whole[11]]


def test_a_directory_is_listed_once_however_many_parts_there_are(tmp_path, monkeypatch):
    write_files(tmp_path, {f"{i}.png": ONE for i in range(9)} | {f"{i}.txt": "a" for i in range(9)})
    monkeypatch.setattr(image_folder, "_PART_ROWS", 2)
    parts = list_parts(tmp_path, (), ImageFolderOptions(**CAPTIONS))
    monkeypatch.setattr(os, "scandir", lambda *_: pytest.fail("listed again"))
    monkeypatch.setattr(os, "listdir", lambda *_: pytest.fail("listed again"))
    assert sum(len(list(iter_part(part, ImageFolderOptions(**CAPTIONS)))) for part in parts) == 9


ODD = {
    "no text": ({"2.png": ONE}, "schema_error", "'2.png': no caption file ('./2.txt': No such file"),
    "no image": ({"2.txt": "two"}, "image_not_found", "'2.txt': a text without an image of the same name"),
    "an empty text": ({"2.png": ONE, "2.txt": " \n"}, "empty_target", "'2.png': "),
    "a slot": ({"2.png": ONE, "2.txt": "see <image>"}, "special_token_in_text", "'2.png': "),
    "not UTF-8": ({"2.png": ONE, "2.txt": b"caf\xe9"}, "schema_error", "'2.png': '2.txt' is not UTF-8"),
    "a name that is an address": ({"data:2.png": ONE, "data:2.txt": "two"}, None, ""),
    "a name of two lines": ({"2\n.png": ONE}, "schema_error", "'2\\n.png': no caption file"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_row_is_named_and_its_neighbours_stay(name, tmp_path):
    files, reason, detail = ODD[name]
    write_files(tmp_path, {"1.png": ONE, "1.txt": "a", **files, "zebra.png": ONE, "zebra.txt": "b"})
    found = read(tmp_path)
    assert reasons(found) == [None, reason, None]
    assert reason is None or detail in found[1].detail


def test_two_images_of_a_name_share_its_text(tmp_path):
    found = read(write_files(tmp_path, {"1.png": png(1), "1.webp": encode(picture(2), "WEBP"), "1.txt": "a"}))
    assert [turns(item)[1][1] for item in found] == ["a", "a"] and found[0].images != found[1].images


def test_names_that_are_not_utf8(tmp_path):
    os.mkdir(os.fsencode(tmp_path) + b"/caf\xe9")
    with open(os.fsencode(tmp_path) + b"/caf\xe9/1.png", "wb") as file:
        file.write(ONE)
    (item,) = read(tmp_path, **CLASSES)
    assert item.reason == "schema_error" and item.detail.isascii()
    with pytest.raises(InputError, match="cannot be part of a key; rename it"):
        read(tmp_path)


def test_links_out_of_the_source_are_not_followed(tmp_path):
    write_files(tmp_path, {"out.png": ONE, "out.txt": "secret", "raw/1.txt": "a", "raw/2.png": ONE, "raw/2.txt": "b"})
    (tmp_path / "raw/1.png").symlink_to(tmp_path / "out.png")
    (tmp_path / "raw/3.png").symlink_to(tmp_path / "raw/2.png")
    write_file(tmp_path / "raw/3.txt", b"c")
    assert answers(read(tmp_path / "raw")) == {
        "data/00000000": "image_not_found",
        "data/00000001": "b",
        "data/00000002": "c",
    }
    (tmp_path / "raw/2.txt").unlink()
    (tmp_path / "raw/2.txt").symlink_to(tmp_path / "out.txt")
    with pytest.raises(InputError, match=r"2\.txt leads by a link to .*out\.txt, outside of the source"):
        read(tmp_path / "raw")


def test_sources_that_hold_no_rows_are_named(tmp_path):
    write_files(tmp_path, {"raw/cats/1.png": ONE, "my cats/1.png": ONE, "my_cats/1.png": ONE, "empty/a.md": "a"})
    for where, subsets, message in (
        ("raw", ["cat"], "no subset 'cat' in .*; did you mean 'cats'"),
        ("raw/cats/1.png", (), "is a file; the builder image_folder reads a directory"),
        ("empty", (), "holds no image"),
        ("none", (), "does not exist"),
        ("", (), r"'my cats' and 'my_cats' would both be the subset my_cats; rename one"),
    ):
        with pytest.raises(InputError, match=message):
            read_source("image_folder", tmp_path / where, subsets, **CAPTIONS)


def test_the_quarantine_names_the_image(tmp_path):
    files = {f"rose/{i}.png": png(i) for i in range(6)} | {"rose/3.png": b"no image", "stray.png": ONE}
    source, options = write_files(tmp_path / "raw", files), {"builder": "image_folder", "options": CLASSES}
    limits = {"max_image_pixels": 10**6, "min_image_side": 8, "shard_size_mb": 1, "max_skip_fraction": 1}
    config = ConvertConfig(**options, **limits, subsets=(), seed=1, heldout_fraction=0)
    artifact = run_stage(STAGE, config, {"raw": External(source, "raw", "0" * 16)}, tmp_path / "root").artifact
    lines = [json.loads(line) for line in (artifact.dir / "quarantine.jsonl").read_text().splitlines()]
    assert [(line["key"], line["file"], line["row"]) for line in lines] == [
        ("data/00000003", "rose/3.png", 0),
        ("data/00000006", "stray.png", 0),
    ]


def test_images_without_texts_in_a_store_are_a_source():
    with moto_server():
        top = location(f"s3://{BUCKET}/raw")
        (top / "rose/1.png").write_bytes(ONE)
        assert open_raw(str(top), (), "image_folder").digest
        assert answers(read(top, **CLASSES)) == {"data/00000000": "rose"}


@pytest.mark.parametrize("held", ["holdout", "testA", "minival", "seg_test", "dev-set", "val_unseen"])
def test_a_folder_that_is_named_like_held_out_data_is_not_trained_on_unless_the_recipe_says_so(held, tmp_path):
    write_files(tmp_path, {"seg_train/cat/1.png": ONE, "seg_train/dog/2.png": png(2), f"{held}/cat/3.png": png(3)})
    with pytest.raises(
        InputError, match=rf"/{held} is named like held-out data.*set options\.heldout_splits: \[.*{held}"
    ):
        read(tmp_path, **CLASSES)
    trial = recognise(tmp_path, ImageLimits(max_pixels=10**6, min_side=1)).best
    assert trial.heldout == 1 and trial.rows == 3
    assert len(read(tmp_path, **CLASSES, train_splits=["seg_train", held])) == 3


def test_a_split_below_a_folder_is_not_trained_on(tmp_path):
    write_files(tmp_path, {"pets/train/cat/1.png": ONE, "pets/test/cat/2.png": png(2)})
    with pytest.raises(InputError, match="pets/test is named like held-out data") as caught:
        read(tmp_path, **CLASSES)
    advice = str(caught.value).rpartition("give ")[2].removesuffix(" as the data")
    assert len(read(location(advice), **CLASSES)) == 2
    one = write_files(tmp_path / "one", {"cat/test tube/1.png": ONE, "cat/dev board/2.png": png(2)})
    assert len(read(one, **CLASSES)) == 2  # classes: nothing beside them is named after training


@pytest.mark.parametrize("text", ["0 0.10 0.5 0.2 0.3", "3 0.1 0.2 0.3 0.4\n12 0.5 .5 1 1e-3\n", "1 0 0 1 0 1 1 0 1"])
def test_labels_of_yolo_are_no_captions(text, tmp_path):
    write_files(tmp_path, {"1.png": ONE, "1.txt": text, "2.png": png(2), "2.txt": "2 red cars"})
    bad, good = read(tmp_path)
    assert bad.reason == "schema_error" and "YOLO" in bad.detail and isinstance(good, Sample)
