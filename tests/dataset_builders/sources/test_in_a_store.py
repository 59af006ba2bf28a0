"""Sources in an object store: each builder gives the same samples as from a disk, in small parts and by chosen rows."""

import pytest

from dataset_builders.readers import table_files, tar_files, text_files
from dataset_builders.sources import image_folder
from dataset_builders.storage.store import location
from tests.helpers.json_rows import read_source, reasons, turns
from tests.helpers.object_store import BUCKET, moto_server
from tests.helpers.own_data import LAYOUTS, draw_rows

pytestmark = pytest.mark.promise(
    "Each builder turns its source's rows into samples, names and counts each bad row, and no image is both "
    "trained on and held out."
)

CAPTION = {"question": "What?", "answer": "text_file"}
COLUMNS = {"image": "image", "question": "question", "answer": "answer"}
ANSWERS = COLUMNS | {"answer": "answers"}
PATHS = {"image": "image_path", "question": "query", "answer": "response"}
LABELS = {"image": "image", "question": "<image>Which?", "answer": "label"}
MEMBERS = {"question": "constant:What?", "answer": "txt"}
# Layout of `own_data` -> the options that read it.
OPTIONS = {
    "csv_paths": COLUMNS,
    "json_lines": PATHS,
    "parquet_images": ANSWERS,
    "arrow_dataset": LABELS,
    "openai_jsonl": {},
    "llava_json": {"image_root": "images"},
    "llava_parquet": {},
    "captions": CAPTION,
    "tar_captions": MEMBERS,
    "cauldron": {"turns": "chat"},
}


@pytest.fixture(scope="module")
def bucket():
    with moto_server():
        yield location(f"s3://{BUCKET}")


@pytest.mark.parametrize("layout", OPTIONS)
def test_a_source_in_a_store_gives_the_same(layout, bucket, tmp_path, monkeypatch):
    for module in (text_files, table_files, tar_files, image_folder):
        monkeypatch.setattr(module, "_PART_ROWS", 3)
    write, builder = LAYOUTS[layout]
    here, stored = tmp_path / "set", bucket / layout
    rows = draw_rows(1, 8)
    write(here, rows)
    for path in here.rglob("*"):
        if path.is_file():
            (stored / path.relative_to(here).as_posix()).write_bytes(path.read_bytes())
    found = read_source(builder, stored, **OPTIONS[layout])
    assert reasons(found) == [None] * 8 and [item.images for item in found] == [(row.image,) for row in rows]
    assert all(row.answer in turns(item)[-1][1] for item, row in zip(found, rows))
    assert found == read_source(builder, here, **OPTIONS[layout])
    assert read_source(builder, stored, rows={1, 6}, **OPTIONS[layout]) == [found[1], found[6]]
