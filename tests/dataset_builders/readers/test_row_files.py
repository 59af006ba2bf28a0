"""The assignment of a source's files to subsets."""

import pytest

from dataset_builders.readers.source_files import list_files, subset_files, subset_patterns
from tests.helpers.json_rows import write_file

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)

# file names -> the subset of each
SOURCES = {
    "three digits": ({f"{i:03d}.tar": "data" for i in range(60)}),
    "one digit": {"7.tar": "data", "8.tar": "data", "10.tar": "data"},
    "four digits alone": {"0000.tar": "data"},
    "a separator": {"pets-0.tar": "pets", "pets-1.tar": "pets", "cars_00.tar": "cars", "cars_01.tar": "cars"},
    "no separator": {"part9.tar": "part", "part10.tar": "part"},
    "a number of numbers": {"train-0-of-2.tar": "train", "test-1-of-2.tar": "test", "1-of-9.tar": "data"},
    "a number that counts nothing": {
        "vqa2.tar": "vqa2",
        "vqa.tar": "vqa",
        "gqa-1.tar": "gqa-1",
        "coco2014.tar": "coco",
    },
    "characters that no key has": {
        "my data.tar": "my_data",
        "gr\u00f6\u00dfe-00000.tar": "gr__e",
        "my cats/0.tar": "my_cats",
    },
    "folders": {"chart_1/0.tar": "chart_1", "chart_2/0.tar": "chart_2", "chart_2/1.tar": "chart_2"},
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_running_number_has_any_number_of_digits(kind, tmp_path):
    expected = SOURCES[kind]
    for name in expected:
        write_file(tmp_path / name, b"")
    found = {file.name: subset for subset, files in subset_files(tmp_path, (), (".tar",)) for file in files}
    assert found == expected
    for subset in set(expected.values()):  # a download by the patterns of a subset includes all its files
        matched = {file.name for file in list_files(tmp_path, subset_patterns([subset], (".tar",)))}
        assert {name for name, other in expected.items() if other == subset} <= matched
