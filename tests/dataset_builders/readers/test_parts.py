"""The files whose rows a recipe holds out by their names."""

import pytest

from dataset_builders.errors import InputError
from dataset_builders.readers.parts import parts_of
from dataset_builders.sources.registry import get_builder
from dataset_builders.storage.row_objects import DATA_STORES_VARIABLE
from tests.helpers.own_data import captions, csv_paths, draw_rows

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)


def parts_of_tables(source, heldout_files=()):
    table = get_builder("table")
    options = table.options(image="image", question="question", answer="answer")
    return parts_of(table, source, (), options, heldout_files)


def test_files_that_are_named_are_held_out_and_all_others_are_train(tmp_path):
    for name in ("a", "b", "c"):
        csv_paths(tmp_path / name, draw_rows(1, 3))
    parts = parts_of_tables(tmp_path, ["b/*", "c/data.csv"])
    assert [(part.name, part.split) for part in parts] == [
        ("a/data.csv", "train"),
        ("b/data.csv", "heldout"),
        ("c/data.csv", "heldout"),
    ]


@pytest.mark.parametrize(("named", "stores"), [(None, None), ("", ()), ("s3://a, gs://b/c", ("s3://a", "gs://b/c"))])
def test_parts_carry_the_stores_that_their_rows_may_name(named, stores, tmp_path, monkeypatch):
    monkeypatch.delenv(DATA_STORES_VARIABLE, raising=False)
    if named is not None:
        monkeypatch.setenv(DATA_STORES_VARIABLE, named)
    csv_paths(tmp_path, draw_rows(1, 3))
    assert [part.stores for part in parts_of_tables(tmp_path)] == [stores]


def test_a_glob_that_fits_no_file_is_refused(tmp_path):
    csv_paths(tmp_path, draw_rows(1, 3))
    with pytest.raises(InputError, match=r"heldout_files: no file of rows in .* is named 'test\*'; give a glob like"):
        parts_of_tables(tmp_path, ["test*"])


def test_the_splits_of_the_builder_are_not_contradicted(tmp_path):
    captions(tmp_path / "val", draw_rows(1, 3))
    folder = get_builder("image_folder")
    options = folder.options(question="What?", answer="text_file")
    with pytest.raises(InputError, match=r"set options\.heldout_splits, and leave out heldout_files"):
        parts_of(folder, tmp_path, (), options, ["val/*"])


def test_files_named_like_a_held_out_split_are_no_train_data_unless_the_recipe_says_so(tmp_path):
    for name in ("train", "test-00"):
        csv_paths(tmp_path / name, draw_rows(1, 3))
    with pytest.raises(
        InputError, match=r"test-00/data.csv'? in .* set heldout_files: \[\"test-\*/data.csv\"\] to hold"
    ):
        parts_of_tables(tmp_path, None)
    assert [part.split for part in parts_of_tables(tmp_path, [])] == [None, None]
    for name in ("train", "test-00"):
        assert len(parts_of_tables(tmp_path / name, None)) == 1
