"""The directory of the images of each file of rows, where the rows name them by their file names alone."""

import json

import pytest

from dataset_builders.pictures.images import ImageLimits
from dataset_builders.recognise.recognise import recognise
from tests.helpers.json_rows import json_lines, write_file
from tests.helpers.raw_rows import png

pytestmark = pytest.mark.promise(
    "`athanor init` makes a recipe from common layouts of data, with settings that fit the GPU by the estimate, "
    "names each fault, and refuses rows with a command that makes them readable."
)

LIMITS = ImageLimits(max_pixels=10**6, min_side=1)


def write(source, files, folders):
    """Write files of four rows and folders of four pictures, all with the same names and other content."""
    for name in files:
        rows = [{"image": f"{i}.png", "question": f"{name} {i}?", "answer": "b"} for i in range(4)]
        if name.endswith(".csv"):
            lines = ["image,question,answer", *(",".join(row.values()) for row in rows)]
            write_file(source / name, "\n".join(lines).encode())
        else:
            write_file(source / name, json.dumps(rows).encode() if name.endswith(".json") else json_lines(rows))
    for number, folder in enumerate(folders):
        for i in range(4):
            write_file(source / folder / f"{i}.png", png(10 * number + i))


def pictures_of(source):
    """Return file of rows -> the folders of the pictures that its rows get."""
    found = recognise(source, LIMITS).best
    folder_of = {path.read_bytes(): path.parent.name for path in source.rglob("*.png")}
    pairs = {
        (s.messages[0].text.partition(" ")[0].removeprefix("<image>"), folder_of[s.images[0]]) for s in found.samples
    }
    assert len(found.samples) == found.tried
    return pairs


@pytest.mark.parametrize(
    ("files", "folders"),
    [
        (("train.json", "val.json"), ("train", "val")),
        (("train.csv", "test.csv"), ("train_images", "test_images")),
        (("captions_train2017.jsonl", "captions_val2017.jsonl"), ("images/train2017", "images/val2017")),
    ],
)
def test_each_file_gets_the_pictures_of_the_folder_that_is_named_like_it(files, folders, tmp_path):
    write(tmp_path, files, folders)
    assert pictures_of(tmp_path) == set(zip(files, (folder.rpartition("/")[2] for folder in folders)))


def test_a_folder_that_fits_alone_serves_all_files(tmp_path):
    write(tmp_path, ("train.json", "val.json"), ("pictures",))
    assert pictures_of(tmp_path) == {("train.json", "pictures"), ("val.json", "pictures")}
    assert recognise(tmp_path, LIMITS).best.reading.options["image_root"] == "pictures"


@pytest.mark.parametrize(
    ("files", "folders", "words"),
    [
        (("rows.json",), ("a", "b"), "rows.json: its images are found in a and in b, which may differ"),
        # no word of testA and testB tells their folders apart
        (
            ("train.jsonl", "testA.jsonl", "testB.jsonl"),
            ("train", "test_a", "test_b"),
            "write the folder into each path",
        ),
    ],
)
def test_two_folders_that_fit_one_file_are_refused(files, folders, words, tmp_path):
    write(tmp_path, files, folders)
    found = recognise(tmp_path, LIMITS)
    assert found.best is None and words in found.trials[0].refused
