"""convert with boxes: they are checked against the decoded image, kept in the shards, and counted by label."""

import json

import pytest

from dataset_builders.contracts.boxes import Box, BoxPlace
from dataset_builders.contracts.sample import from_fields
from dataset_builders.contracts.shard_io import iter_records
from dataset_builders.readers import box_places
from stages.convert.stage import STAGE, ConvertConfig
from stages.shared.artifacts.artifact import External
from stages.shared.artifacts.run_stage import run_stage
from tests.helpers.json_rows import json_lines, write_file
from tests.helpers.raw_rows import png

pytestmark = pytest.mark.promise(
    "Boxes of every layout become pixels of the image as shown, by numbers that are checked by hand; a box that cannot "
    "be right leaves its row out with its numbers."
)
CONFIG = {
    "builder": "table",
    "options": {"image": "image", "question": "<image>Find all.", "answer": "answer", "boxes": "pixels"},
    "heldout_fraction": 0,
    "seed": 1,
    "max_image_pixels": 10**6,
    "min_image_side": 8,
    "shard_size_mb": 1,
    "max_skip_fraction": 0.9,
}


def convert(tmp_path, answers, boxes="pixels"):
    for i in range(len(answers)):
        write_file(tmp_path / f"raw/{i}.png", png(i))  # 40 x 32 px
    rows = [{"image": f"{i}.png", "answer": answer} for i, answer in enumerate(answers)]
    write_file(tmp_path / "raw/rows.jsonl", json_lines(rows))
    raw = External(tmp_path / "raw", "raw", "0" * 16)
    config = CONFIG | {"options": CONFIG["options"] | {"boxes": boxes}}
    artifact = run_stage(STAGE, ConvertConfig(**config), {"raw": raw}, tmp_path / "root").artifact
    samples = [
        from_fields(key, fields)
        for shard in artifact.manifest.shards
        for key, fields in iter_records(artifact.dir / shard.name)
    ]
    return artifact, samples


def test_boxes_are_kept_in_the_shards_and_counted_by_label(tmp_path):
    cat, dog = ({"bbox_2d": [1, 2, 30, 20.5], "label": label} for label in ("cat", "dog"))
    outside = {"bbox_2d": [1, 2, 50, 20], "label": "cat"}
    answers = [json.dumps(value) for value in ([cat, dog], [cat], [], [outside])] + ["none"]
    artifact, samples = convert(tmp_path, answers)
    place = BoxPlace(image=0, size=(40, 32), boxes=(Box(1, 2, 30, 20.5, "cat"),), is_list=True)
    assert [sample.messages[1].text for sample in samples] == ["<boxes>", "<boxes>", "<boxes>", "none"]
    assert samples[1].messages[1].boxes == (place,)
    assert [len(each.boxes) for sample in samples for each in sample.messages[1].boxes] == [2, 1, 0]
    assert artifact.manifest.stats["boxes"] == {
        "samples": 3,
        "samples_without_a_box": 1,
        "boxes": 3,
        "labels": 2,
    }
    assert artifact.manifest.skips == {"bad_box": 1}
    report = json.loads((artifact.dir / "report.json").read_text())
    (table,) = (section for section in report["sections"] if section["title"] == "Boxes")
    assert [row[:2] for row in table["rows"]] == [["cat", 2], ["dog", 1]]
    assert "Latin" in artifact.manifest.stats["scripts"]
    assert artifact.manifest.stats["scripts"]["Latin"] == 5 * len("Findall") - len("Findall") + len("none")


def test_answers_of_four_numbers_that_stay_text_are_counted(tmp_path):
    artifact, samples = convert(
        tmp_path, ["[1, 2, 30, 20]", "[0.1,0.2, 0.3,0.4].", "[1, 2, 3]", "no [1, 2, 30, 20]"], None
    )
    assert [sample.messages[1].text for sample in samples][:1] == ["[1, 2, 30, 20]"]
    ((words, number),) = artifact.manifest.stats["not_read"].items()
    assert number == 2 and "say in options.boxes what the numbers are" in words
    assert json.loads((artifact.dir / "report.json").read_text())["summary"]["not read"] == {words: 2}


def test_a_place_for_an_image_of_another_size_is_found_when_the_image_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(box_places, "header_size", lambda data: ((400, 300), 1))
    artifact, samples = convert(tmp_path, ['{"bbox_2d": [1, 2, 300, 200]}', "none"])
    assert artifact.manifest.skips == {"bad_box": 1} and len(samples) == 1
    line = json.loads((artifact.dir / "quarantine.jsonl").read_text())
    assert line["detail"] == "boxes for image 0 of 400 x 300 px, which is 40 x 32"
